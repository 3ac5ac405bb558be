"""Random checkpoints, their tokens by this package, and settings of vLLM for native models."""

from pathlib import Path
from typing import Any

import torch
from zoo import CONFIGS, EACH_FAMILY

import ligermodels as lm
from ligermodels.integrations.vllm import ARCHITECTURE, HYBRID_ARCHITECTURE
from ligermodels.integrations.vllm.plan import StatePlan, plan_mixers
from ligermodels.layers.initialization import persistent_tensors

LENGTHS, NEW = (70, 5, 41, 23), 12
PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
HEAD_DIM = 32
"""vLLM's attention on the CPU has no odd widths of heads; tests/integrations/test_vllm_models.py has them."""
LATENT = {"qk_rope_head_dim": 10, "qk_nope_head_dim": HEAD_DIM - 10, "v_head_dim": 18}
WIDE_VALUES = {"deepseek_v3-without-experts": {"v_head_dim": 2 * HEAD_DIM}}
FACTORS = {"short_factor": [1 + 0.03 * i for i in range(16)], "long_factor": [1.5 + 0.4 * i for i in range(16)]}
HYBRID = {"hf_overrides": {"architectures": [HYBRID_ARCHITECTURE]}, "enable_prefix_caching": False}
CACHING: dict[str, Any] = {"enable_prefix_caching": True}

UNKNOWN = {"internlm3", "iquestcoder", "lfm3", "bailing_hybrid", "exaone", "sarvam_mla", "sarvam_moe", "lara_mini"}
"""vLLM reads config.json by transformers, which does not have these types."""
OPTIONS = {"gemma4_text-keys-as-values", "gemma4_text-per-layer-inputs", "gemma4_text-experts", "mistral4-groups"}
OPTIONS |= {"phi3-short", "ministral3-window", "glm4_moe-qk-norm", "deepseek_v3-without-experts"}
OPTIONS |= {"falcon_h1-norms-and-biases", "nemotron_h-latent-experts-and-biases", "lfm2-biases"}
INSIDE_VLLM = sorted({*EACH_FAMILY, *OPTIONS} - UNKNOWN)
"""Configs that native models inside vLLM are tested with."""
BY_VLLM = [
    "arcee", "ernie4_5", "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm4", "glm4_moe", "granite", "granite_swa", "granitemoehybrid", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "llama-2", "mellum", "ministral", "mistral-window", "mixtral", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "vaultgemma",
]  # fmt: skip
"""Configs with which vLLM's own classes are tested. docs/serving.md lists the others with the reasons."""


def servable(name: str) -> dict[str, Any]:
    """A config of the zoo with heads of widths that vLLM has, in attention alone."""
    config = {field: value for field, value in CONFIGS[name].items() if not field.startswith("_x")}
    config |= {"head_dim": HEAD_DIM, "hidden_size": HEAD_DIM * config["num_attention_heads"]}
    if "qk_rope_head_dim" in config:
        config |= {**LATENT, **WIDE_VALUES.get(name, {})}
        del config["head_dim"]
    config |= {name: config["hidden_size"] for name in ("block_dim", "conv_dim", "conv_dim_out") if name in config}
    if "mamba_expand" in config:
        config["mamba_d_head"] = "auto"
    if "global_head_dim" in config:
        config["global_head_dim"] = 2 * HEAD_DIM
    if "short_factor" in (config.get("rope_scaling") or {}):
        config["rope_scaling"] = {**config["rope_scaling"], **FACTORS}
    return config


def has_states(name: str) -> bool:
    """Whether some mixers of a config are recurrent."""
    plans = plan_mixers(lm.from_config(servable(name), device="meta").config, 128, torch.float32)
    return any(isinstance(plan, StatePlan) for plan in plans.values())


def random_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> lm.CausalLM:
    """A checkpoint none of whose tensors has its initial value, and its model."""
    torch.manual_seed(seed)
    model = lm.from_config(config, dtype="float32").eval()
    with torch.no_grad():
        for tensor in persistent_tensors(model).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.15)
    model.save_pretrained(folder)
    return model


def ours(model: lm.CausalLM, prompts: list[list[int]] = PROMPTS) -> dict[str, list[Any]]:
    """Greedy tokens after prompts, and their log-probabilities by one forward pass over all tokens."""
    found: dict[str, list[Any]] = {"tokens": [], "log_probs": []}
    for prompt in prompts:
        ids = model.generate([prompt], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        with torch.no_grad():
            log_probs = model.log_probs(ids, ids).log_probs
        assert log_probs is not None
        found["tokens"].append(ids[0, len(prompt) :].tolist())
        found["log_probs"].append(log_probs[0, len(prompt) - 1 : -1].tolist())
    return found


def native(options: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """Arguments of `EngineProcess` for a native model. Chunks of 32 tokens of a prefill share batches with other
    requests.

    Args:
        options: arguments of vLLM's `LLM`.
        arguments: in place of the default arguments.
    """
    chunks = {"max_model_len": 128, "block_size": 32, "max_num_batched_tokens": 32}
    options = {**chunks, "hf_overrides": {"architectures": [ARCHITECTURE]}, **(options or {})}
    return {"prompts": PROMPTS, "max_tokens": NEW, "options": options, **arguments}


def assert_equal(theirs: dict[str, Any], wanted: dict[str, list[Any]]) -> None:
    assert theirs["tokens"] == wanted["tokens"]
    different = {tuple(tokens) for tokens in wanted["tokens"]}
    assert len(different) == len(PROMPTS)  # a model that repeats one shows little
    torch.testing.assert_close(torch.tensor(theirs["log_probs"]), torch.tensor(wanted["log_probs"]), atol=1e-4, rtol=0)
