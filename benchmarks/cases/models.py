"""The models of the benchmarks, as Hugging Face configs with the sizes of the published checkpoints."""

from __future__ import annotations

from typing import Any

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
"""Fields of every config."""


def _config(model_type: str, *sizes: int, tied: bool = False, **others: Any) -> dict[str, Any]:
    """A config.json: `sizes` are the values of SIZES, `tied` of `tie_word_embeddings`, and `others` further fields."""
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True)), **others, "tie_word_embeddings": tied}


LLAMA_3: dict[str, Any] = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
QWEN_3: dict[str, Any] = {"head_dim": 128, "rope_theta": 1000000.0}
GEMMA_4: dict[str, Any] = {
    "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "final_logit_softcapping": 30.0,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128,
    "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
GRANITE_4: dict[str, Any] = {
    "shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 64,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "embedding_multiplier": 12.0,
    "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "rms_norm_eps": 1e-5,
    "position_embedding_type": "nope",
}  # fmt: skip
NEMOTRON_3: dict[str, Any] = {
    "ssm_state_size": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256, 8192, **LLAMA_3),
    "llama-3-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256, 8192, **LLAMA_3),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, 32, 8, 128256, 8192, tied=True, head_dim=64, **LLAMA_3),
    "gemma-2-2b": _config(
        "gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, tied=True, head_dim=256, sliding_window=4096,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1000000.0, sliding_window=None),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rope_theta=1000000.0),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, rms_norm_eps=1e-6, **QWEN_3),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, tied=True, **QWEN_3),
    "qwen3-0.6b": _config("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, tied=True, rms_norm_eps=1e-6, **QWEN_3),
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, router_aux_loss_coef=0.001, rms_norm_eps=1e-6, **QWEN_3,
    ),
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 3, 49152, 8192, tied=True, rope_theta=1e5, rms_norm_eps=1e-5),
    "qwen3.5-9b": _config(
        "qwen3_5_text", 4096, 12288, 32, 16, 4, 248320, 262144, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "gemma-4-e2b": _config(
        "gemma4_text", 1536, 6144, 35, 8, 1, 262144, 131072, tied=True, num_kv_shared_layers=20,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7, use_double_wide_mlp=True, **GEMMA_4,
    ),
    "gemma-4-e4b": _config(
        "gemma4_text", 2560, 10240, 42, 8, 2, 262144, 131072, tied=True, num_kv_shared_layers=18,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7, **GEMMA_4,
    ),
    "ministral-3-8b": _config(
        "ministral3", 4096, 14336, 34, 32, 8, 131072, 262144, head_dim=128,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    ),
    "mixtral-8x7b": _config(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2,
        router_aux_loss_coef=0.02, rope_theta=1e6, rms_norm_eps=1e-5,
    ),
    "qwen3.5-35b-a3b": _config(
        "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248320, 262144, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8, router_aux_loss_coef=0.001,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "lfm2-1.2b": _config(
        "lfm2", 2048, 12288, 16, 32, 8, 65536, 128000, tied=True, norm_eps=1e-5, conv_L_cache=3,
        layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    ),
    "granite-4.0-h-micro": _config(
        "granitemoehybrid", 2048, 8192, 40, 32, 8, 100352, 131072, tied=True, **GRANITE_4,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    ),
    "granite-4-layers": _config(
        "granitemoehybrid", 2048, 8192, 4, 32, 8, 10048, 131072, tied=True, **GRANITE_4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "falcon-h1-1.5b": _config(
        "falcon_h1", 2048, 4096, 24, 8, 2, 65536, 131072, head_dim=128, rope_theta=1e11, mamba_d_ssm=3072,
        mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256, mamba_n_groups=1, mamba_rms_norm=False,
    ),
    "nemotron-3-nano-4-layers": _config(
        "nemotron_h", 2688, 1856, 4, 32, 2, 10048, 262144, head_dim=128, **NEMOTRON_3,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "muse-glimmer-4-layers": _config(
        "muse_glimmer_text", 6656, 19968, 4, 32, 2, 15488, 131072, head_dim=128, sliding_window=2048,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], final_logit_softcapping=20.0,
    ),
    "gpt-oss-20b": _config("gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, **GPT_OSS),
    "gpt-oss-4-layers": _config("gpt_oss", 2880, 2880, 4, 64, 8, 201088, 131072, **GPT_OSS),
}  # fmt: skip
"""Name -> config.json."""

FEW_LAYERS: dict[str, dict[str, Any]] = {
    "lfm2-1.2b": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
    "granite-4.0-h-micro": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "granite-4-layers": {},
    "muse-glimmer-4-layers": {},
    "nemotron-3-nano-4-layers": {"n_routed_experts": 8},
    "qwen3.5-9b": {"num_hidden_layers": 4},
    "gemma-4-e2b": {
        "num_hidden_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 5,
    },
    "gemma-4-e4b": {
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 6,
    },
}
"""Name -> fields of a small model with every kind of layer; the default is two layers."""

NOT_IN_FP32 = frozenset({"qwen3.5-9b"})
"""Models that transformers does not compute in fp32 if flash-linear-attention is installed."""


LOSS_ALONE = frozenset({"gemma-4-e4b", "muse-glimmer-4-layers"})
"""Models with a check of the loss alone: random weights amplify rounding so much that in transformers the difference
between gradients in bf16 and fp32 is as large as the gradients."""


def few_layers(name: str) -> dict[str, Any]:
    """The config of a model with a few of its layers."""
    return CONFIGS[name] | FEW_LAYERS.get(name, {"num_hidden_layers": 2})
