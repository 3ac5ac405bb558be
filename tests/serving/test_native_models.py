"""Native models inside vLLM 0.32 on the CPU: its tokens and log-probabilities are ours, in float32.

`make test-serving` makes the environment and runs this; or LIGERMODELS_VLLM_PYTHON names the Python of one in which
this package is installed too.
"""

from pathlib import Path

import pytest
from engine_process import PYTHON, EngineProcess, needs_vllm
from native_checkpoints import HYBRID, assert_equal, has_states, native, ours, random_checkpoint, servable
from zoo import EACH_FAMILY

pytestmark = needs_vllm

UNKNOWN = {"internlm3", "iquestcoder", "lfm3", "bailing_hybrid", "exaone", "sarvam_mla", "sarvam_moe"}
"""vLLM reads config.json by transformers, which does not have these types."""
OPTIONS = {"gemma4_text-keys-as-values", "gemma4_text-per-layer-inputs", "gemma4_text-experts", "mistral4-groups"}
OPTIONS |= {"phi3-short", "ministral3-window", "glm4_moe-qk-norm", "deepseek_v3-without-experts"}
OPTIONS |= {"falcon_h1-norms-and-biases", "nemotron_h-latent-experts-and-biases", "lfm2-biases"}
NAMES = sorted({*EACH_FAMILY, *OPTIONS} - UNKNOWN) if PYTHON else []


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_log_probs(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """Four requests at once, with prefills in parts of 32 tokens."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)))
    (found,) = engines.serve(tmp_path, **native(HYBRID if has_states(name) else {}))
    assert_equal(found, wanted)
