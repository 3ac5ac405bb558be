"""Models for tests of float8, of sizes that it takes, and what compares their gradients."""

from typing import Any

import torch
from torch import Tensor
from zoo import BASE, CONFIGS

import ligermodels as lm
from ligermodels.layers.float8 import Float8
from ligermodels.training import FusedAdamW

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {**BASE, **SIZES, "model_type": "llama", "num_hidden_layers": 3}
TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2}
MODELS = {
    "llama": TWO_LAYERS,
    "qwen2, with biases": {**TWO_LAYERS, "model_type": "qwen2"},
    "qwen3, with norms of heads": {**TWO_LAYERS, "model_type": "qwen3"},
    "gemma2, with four norms": {**CONFIGS["gemma2"], **SIZES, "query_pre_attn_scalar": 16},
    "olmo2, without norms before": {**CONFIGS["olmo2"], **SIZES, "num_key_value_heads": 4},
}

FULL = {"num_experts_per_tok": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
"""All experts for each token: with fewer, other choices on random weights decide how far gradients differ."""
DELTA = {f"linear_{name}": size for name, size in (("num_key_heads", 4), ("num_value_heads", 8))}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
}
GEMMA4 = {**SIZES, "num_key_value_heads": 1, "global_head_dim": 32}
DENSE, ATTENTION = ("mlp.gate_up", "mlp.down"), ("mixer.qkv", "mixer.o")
UNGATED = ("mlp.shared.up", "mlp.shared.down")
SHARED = ("mlp.shared.gate_up", "mlp.shared.down")
QKV_LATENT = tuple(f"mixer.{name}" for name in ("q", "kv_a", "kv_b", "o"))
LATENT_LINEARS = tuple(f"mixer.{name}" for name in ("q_a", "q_b", "kv_a", "kv_b", "o"))
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "deepseek_v3": (
        {**CONFIGS["deepseek_v3"], **LATENT, "q_lora_rank": 48, "n_routed_experts": 6, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 32},
        {*LATENT_LINEARS, *DENSE, *SHARED},
    ),
    "deepseek_v3-without-experts": (
        {**CONFIGS["deepseek_v3-without-experts"], **LATENT, "q_lora_rank": None},
        {*QKV_LATENT, *DENSE},
    ),
    "qwen3_next": (
        {**CONFIGS["qwen3_next"], **SIZES, **DELTA, **FULL},
        {"mixer.in_proj", "mixer.out", *ATTENTION, *DENSE, *SHARED},
    ),
    "qwen3_5_text": ({**CONFIGS["qwen3_5_text"], **SIZES, **DELTA}, {"mixer.in_proj", "mixer.out", *ATTENTION, *DENSE}),
    "lfm2-biases": ({**CONFIGS["lfm2-biases"], **SIZES}, {"mixer.in_proj", "mixer.out", *ATTENTION, *DENSE}),
    "gemma4_text-per-layer-inputs": (
        {**CONFIGS["gemma4_text-per-layer-inputs"], **GEMMA4},
        {*ATTENTION, "mixer.q", *DENSE},
    ),
    "gemma4_text-experts": (
        {**CONFIGS["gemma4_text-experts"], **GEMMA4, "moe_intermediate_size": 16, "top_k_experts": 5},
        {*ATTENTION, "mlp.dense.gate_up", "mlp.dense.down"},
    ),
    "muse_glimmer_text": (
        {**CONFIGS["muse_glimmer_text"], **SIZES, "qk_scale_factor": 0.3, "output_multiplier": 1.0}
        | {"final_logit_softcapping": 20.0},
        {*ATTENTION, *DENSE},
    ),
    "arcee": ({**CONFIGS["arcee"], **SIZES}, {*ATTENTION, "mlp.up", "mlp.down"}),
    "nemotron_h-latent-experts-and-biases": (
        {**CONFIGS["nemotron_h-latent-experts-and-biases"], **SIZES, "moe_latent_size": 32, "n_group": 1}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 32, "topk_group": 1}
        | {"moe_shared_expert_intermediate_size": 48, "mamba_num_heads": 16, "mamba_head_dim": 4}
        | {"n_groups": 2, "ssm_state_size": 16},
        {*ATTENTION, "mixer.in_proj", "mixer.out", "mlp.latent_in", "mlp.latent_out", *UNGATED},
    ),
    "kimi_linear": (
        {**CONFIGS["kimi_linear"], **LATENT, "q_lora_rank": None, "num_expert_group": 1, "topk_group": 1}
        | {"num_experts_per_token": 8, "moe_intermediate_size": 32}
        | {"linear_attn_config": CONFIGS["kimi_linear"]["linear_attn_config"] | {"head_dim": 16, "num_heads": 16}},
        {*QKV_LATENT, "mixer.in_proj", "mixer.low_rank", "mixer.decay_b", "mixer.z_b", "mixer.out", *DENSE, *SHARED},
    ),
    "bailing_hybrid": (
        {**CONFIGS["bailing_hybrid"], **LATENT, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 16}
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
        {*QKV_LATENT, "mixer.in_proj", "mixer.out", *DENSE, *SHARED},
    ),
    "mixtral": ({**CONFIGS["mixtral"], **SIZES, "num_local_experts": 6, "num_experts_per_tok": 6}, {*ATTENTION}),
    "gpt_oss": ({**CONFIGS["gpt_oss"], **SIZES, "num_experts_per_tok": 5}, {*ATTENTION}),
    "falcon_h1-norms-and-biases": (
        {**CONFIGS["falcon_h1-norms-and-biases"], **SIZES}
        | {"mamba_d_ssm": 64, "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 16},
        {f"mixer.mixers.{part}" for part in ("0.in_proj", "0.out", "1.qkv", "1.o")} | {*DENSE},
    ),
    "hunyuan_v1_dense": ({**CONFIGS["hunyuan_v1_dense"], **SIZES}, {*ATTENTION, *DENSE}),
    "cohere2": ({**CONFIGS["cohere2"], **SIZES, "logit_scale": 1.0}, {*ATTENTION, *DENSE}),
    "apertus": ({**CONFIGS["apertus"], **SIZES}, {*ATTENTION, "mlp.up", "mlp.down"}),
    "lfm3": ({**CONFIGS["lfm3"], **SIZES}, {"mixer.in_proj", "mixer.out", *ATTENTION, *DENSE}),
    "mimo_v2_flash": (
        {**CONFIGS["mimo_v2_flash"], **SIZES, "num_attention_heads": 8, "head_dim": 32, "v_head_dim": 16}
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
        {*ATTENTION, *DENSE},
    ),
    "llama4_text": (
        {**CONFIGS["llama4_text"], **SIZES, "intermediate_size": 48, "intermediate_size_mlp": 96}
        | {"num_experts_per_tok": 5},
        {*ATTENTION, *DENSE, *SHARED},
    ),
    "laguna": (
        {**CONFIGS["laguna"], **SIZES, "num_attention_heads_per_layer": [4, 2, 2, 4], **FULL},
        {*ATTENTION, *DENSE, *SHARED},
    ),
}
"""Name in the zoo -> its config with sizes for float8, and the layers of its blocks that compute in float8."""


def family(name: str, **options: Any) -> lm.CausalLM:
    """A model of FAMILIES; its queries are scaled down, for where they are normalised a random model of scores that
    large is so ill-conditioned that rounding of its weights changes gradients as much."""
    model = build(FAMILIES[name][0], **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "q_norm" in key:
                parameter.mul_(0.25)
    return model


def build(config: dict[str, Any] = TWO_LAYERS, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(config, **options).train()


def tokens(batch: int = 2, length: int = 19) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: lm.CausalLM) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def agreement(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Cosine, and the ratio of norms."""
    a, b = found.double().flatten(), wanted.double().flatten()
    return float(a @ b / (a.norm() * b.norm())), float(a.norm() / b.norm())


def in_place_of(model: lm.CausalLM) -> list[str]:
    """The linear layers that compute in float8, by name."""
    return [name for name, module in model.named_modules() if isinstance(getattr(module, "compute", None), Float8)]


def losses_of_training(model: lm.CausalLM) -> list[float]:
    """Of 30 steps on one batch."""
    optimizer, found = FusedAdamW(model.parameters(), lr=3e-3), []
    for _ in range(30):
        loss = model(tokens(4, 32), labels=tokens(4, 32)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
