"""Native models inside vLLM 0.32 on the CPU: its tokens and log-probabilities are ours, in float32.

`make test-serving` makes the environment and runs this; or LIGERMODELS_VLLM_PYTHON names the Python of one in which
this package is installed too.
"""

from pathlib import Path

import pytest
import torch
from engine_process import PYTHON, EngineProcess, needs_vllm
from native_checkpoints import (
    HYBRID,
    INSIDE_VLLM,
    PROMPTS,
    assert_equal,
    has_states,
    native,
    ours,
    random_checkpoint,
    servable,
)

import ligermodels as lm

pytestmark = needs_vllm


@pytest.mark.parametrize("name", INSIDE_VLLM if PYTHON else [])
def test_tokens_and_log_probs(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """Four requests at once, with prefills in parts of 32 tokens."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)))
    (found,) = engines.serve(tmp_path, **native(HYBRID if has_states(name) else {}))
    assert_equal(found, wanted)


LARGEST = {"bfloat16": 0.2, "float16": 0.03}
"""Bounds of docs/serving.md. vLLM refuses Gemma 2 in float16."""
CASES = [(name, dtype) for dtype in LARGEST for name in ("gemma2", "qwen3_moe", "deepseek_v3", "qwen3_next")]


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case != ("gemma2", "float16")])
def test_log_probs_in_half_precision(name: str, dtype: str, engines: EngineProcess, tmp_path: Path) -> None:
    """The log-probabilities of the engine's tokens, and those of one forward pass in the same dtype, are as near as two
    orders of rounding allow."""
    random_checkpoint(tmp_path, servable(name))
    options = {**(HYBRID if has_states(name) else {}), "dtype": dtype}
    (found,) = engines.serve(tmp_path, **native(options))
    model = lm.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    difference = 0.0
    for prompt, tokens, theirs in zip(PROMPTS, found["tokens"], found["log_probs"], strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            log_probs = model.log_probs(ids, ids).log_probs
        assert log_probs is not None
        apart = log_probs[0, len(prompt) - 1 : -1] - torch.tensor(theirs)
        difference = max(difference, apart.abs().max().item())
    print(f"largest difference of log-probabilities, {name}, {dtype}: {difference:.1e}")
    assert 0 < difference < LARGEST[dtype]
