"""Checkpoints that this package writes, opened by vLLM's own model classes on the CPU."""

from pathlib import Path

import pytest
from engine_process import EngineProcess, needs_vllm
from native_checkpoints import NEW, PROMPTS, assert_equal, ours, random_checkpoint, servable

pytestmark = needs_vllm

NAMES = [
    "arcee", "ernie4_5", "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm4", "glm4_moe", "granite", "granite_swa", "granitemoehybrid", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "llama-2", "mellum", "ministral", "mistral-window", "mixtral", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "vaultgemma",
]  # fmt: skip
"""docs/serving.md lists the others with the reasons."""


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_new_models(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """A model from a config without `architectures` is served as a language model, with our greedy tokens."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)))
    options = {"max_model_len": 128, "enable_prefix_caching": False}
    (found,) = engines.serve(tmp_path, prompts=PROMPTS, max_tokens=NEW, options=options)
    assert_equal(found, wanted)
