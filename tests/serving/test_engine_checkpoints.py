"""Checkpoints that this package writes, opened by vLLM's own model classes on the CPU."""

from pathlib import Path

import pytest
from engine_process import PYTHON, EngineProcess, needs_vllm
from native_checkpoints import BY_VLLM, NEW, PROMPTS, assert_equal, ours, random_checkpoint, servable

pytestmark = needs_vllm


@pytest.mark.parametrize("name", BY_VLLM if PYTHON else [])
def test_checkpoints_of_new_models(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """A model from a config without `architectures` is served as a language model, with our greedy tokens."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)))
    options = {"max_model_len": 128, "enable_prefix_caching": False}
    (found,) = engines.serve(tmp_path, prompts=PROMPTS, max_tokens=NEW, options=options)
    assert_equal(found, wanted)
