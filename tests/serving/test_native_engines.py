"""Engines of native models inside vLLM: their caches, new weights, several ranks, and settings that they refuse."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, needs_vllm
from native_checkpoints import CACHING, HYBRID, assert_equal, has_states, native, ours, random_checkpoint, servable
from zoo import CONFIGS

import ligermodels as lm

pytestmark = needs_vllm

FIRST, OTHER = (torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 40))
BEGUN = [FIRST, FIRST[:50] + OTHER[:20], FIRST[:33], FIRST[:64] + OTHER[20:]]
"""Prompts that begin alike."""


@pytest.mark.parametrize(("name", "block"), [("qwen3_next", 32), ("bamba", 64), ("lfm2", 32)])
def test_states_of_prefixes(name: str, block: int, engines: EngineProcess, tmp_path: Path) -> None:
    """Recurrent states from vLLM's prefix cache: of a block of the prompt itself, and of a longer or other prompt. vLLM
    chooses the tokens of a block, for attention to have pages as large as states."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)), BEGUN)
    options = {**HYBRID, **CACHING, "max_num_batched_tokens": 64}
    first, second = engines.serve(tmp_path, **native(options, prompts=BEGUN, steps=[None, None]))
    assert_equal(first, wanted)
    assert_equal(second, wanted)
    assert second["cached"] == [len(prompt) // block * block for prompt in BEGUN]


@pytest.mark.parametrize(
    ("name", "options", "apart"), [("qwen3_next", {**HYBRID, **CACHING}, False), ("qwen3_moe", CACHING, True)]
)
def test_updates(name: str, options: dict[str, Any], apart: bool, engines: EngineProcess, tmp_path: Path) -> None:
    """New weights in a running engine, in this process or another, from a model and by vLLM's own reload; nothing is
    left over."""
    config = {**servable(name), "tie_word_embeddings": True}
    old, new = (random_checkpoint(tmp_path / f"{seed}", config, seed) for seed in range(2))
    update, back = ["update_weights", str(tmp_path / "1")], ["update_weights", str(tmp_path / "0")]
    steps = [None, update, ["reload_weights", str(tmp_path / "0")], update, back, update]
    found = engines.serve(tmp_path / "0", **native(options, apart=apart, steps=steps))
    by_old, by_new = ours(old), ours(new)
    assert by_old["tokens"] != by_new["tokens"]
    for theirs, each in zip(found, [by_old, by_new] * 3, strict=True):
        assert_equal(theirs, each)
    used = [theirs["resources"] for theirs in found[-3:]]
    assert used[0] == used[1] == used[2] and used[0][1] == 0


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_batch_invariant(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """With `set_batch_invariant` log-probabilities of requests have equal bits alone and in a batch of four, whose
    chunks of prefills end elsewhere. Without it they do not."""
    wanted = ours(random_checkpoint(tmp_path, servable(name)))
    asked = native({"enable_prefix_caching": False}, steps=[None, "alone"])
    together, alone = engines.serve(tmp_path, **asked, batch_invariant=True)
    assert_equal(together, wanted)
    assert together["log_probs"] == alone["log_probs"]
    together, alone = engines.serve(tmp_path, **asked)
    assert together["log_probs"] != alone["log_probs"]


EVEN: dict[str, dict[str, Any]] = {"gemma2": {"num_key_value_heads": 2}}
DIVIDED = ["gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"]
"""Windows, softcaps and a tied head; experts and sinks; latent attention; recurrent mixers. Each engine takes long to
start; tests/integrations/test_vllm_models.py has more of them."""
RANKS = {"tensor_parallel_size": 2}


def divisible(name: str) -> dict[str, Any]:
    """A servable config with sizes that two ranks divide."""
    config = {**servable(name), **EVEN.get(name, {})}
    return config | {field: size + size % 2 for field, size in config.items() if field.endswith("intermediate_size")}


@pytest.mark.parametrize("name", DIVIDED)
def test_tensor_parallel(name: str, engines: EngineProcess, tmp_path: Path) -> None:
    """Two workers, each with its half of the heads and channels."""
    wanted = ours(random_checkpoint(tmp_path, divisible(name)))
    (found,) = engines.serve(tmp_path, **native({**(HYBRID if has_states(name) else {}), **RANKS}))
    assert_equal(found, wanted)


def test_updates_of_ranks(engines: EngineProcess, tmp_path: Path) -> None:
    """New weights in two workers, from a model and by vLLM's own reload, by way of the engine's own process."""
    old, new = (random_checkpoint(tmp_path / f"{seed}", divisible("gpt_oss"), seed) for seed in range(2))
    first, second = str(tmp_path / "0"), str(tmp_path / "1")
    steps = [None, ["update_weights", second], ["update_weights", first], ["reload_weights", second]]
    found = engines.serve(tmp_path / "0", **native(RANKS, steps=steps, apart=True))
    for theirs, wanted in zip(found, [ours(old), ours(new)] * 2, strict=True):
        assert_equal(theirs, wanted)


def test_ranks_that_do_not_divide(engines: EngineProcess, tmp_path: Path) -> None:
    """The error of the workers, in their log."""
    lm.from_config({**divisible("qwen3"), "num_key_value_heads": 3}).save_pretrained(tmp_path)
    _, log = engines.error(tmp_path, **native(RANKS))
    message = r"blocks\[0\]\.mixer\.num_kv_heads \(num_key_value_heads\): 3 .* Numbers of ranks that work .*: 1"
    assert re.search(f"ConfigError: {message}", log)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bamba", {}, r"blocks.0.mixer: keeps a recurrent state, .*LigerModelsHybridForCausalLM"),
    ("lfm2", {**HYBRID, **CACHING, "prefix_match_unit": 16}, "prefix_match_unit: .* whole blocks"),
    ("qwen3_next", {**HYBRID, "mamba_cache_dtype": "bfloat16"}, "mamba_cache_dtype: must be auto or float32"),
    ("qwen2", HYBRID, "architectures: LigerModelsHybridForCausalLM is for models with recurrent mixers"),
    ("phi3-long", {}, "rope: LongRopeScaling .* give --max-model-len 4 or less"),
    ("llama-3", {"quantization": "fp8", "dtype": "bfloat16"}, "quantization: fp8 "),
    ("llama-2", {"enable_lora": True}, "enable_lora: "),
    ("qwen3_moe", {"enable_expert_parallel": True}, "enable_expert_parallel: tensor_parallel_size divides"),
    (
        "qwen3",
        {"hf_overrides": {"architectures": ["LigerModelsForCausalLM"], "rms_norm_eps": 0.5}},
        "hf_overrides: may name architectures, and quantization_config as null",
    ),
    ("nemotron_h", {**HYBRID, "speculative_config": NGRAM}, "speculative_config: .* after rejected drafts"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=[message.split()[0] for *_, message in REFUSED])
def test_refusals(name: str, options: dict[str, Any], message: str, engines: EngineProcess, tmp_path: Path) -> None:
    """At load, with errors of this package that name the reason."""
    lm.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    error, _ = engines.error(tmp_path, last="speculative_config" in options, **native(options))
    assert re.search(f"^ConfigError: {message}", error)
