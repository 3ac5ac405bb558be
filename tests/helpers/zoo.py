"""Tiny checkpoints of every family, with awkward sizes: their configs, and what makes and compares them."""

from typing import Any

from zoo_latest import LATEST
from zoo_multimodal import multimodal
from zoo_newer import NEWER as OTHERS
from zoo_oracles import auto_class as auto_class
from zoo_oracles import gradients_of as gradients_of
from zoo_oracles import make_checkpoint as make_checkpoint
from zoo_oracles import plain as plain
from zoo_oracles import randomize as randomize
from zoo_oracles import relative_error as relative_error
from zoo_oracles import stored_as as stored_as
from zoo_oracles import thinker as thinker
from zoo_parts import BASE as BASE
from zoo_parts import DELTA, EXPERTS, MINISTRAL3, YARN
from zoo_parts import GEMMA as GEMMA
from zoo_parts import GEMMA4 as GEMMA4
from zoo_parts import GPT_OSS as GPT_OSS
from zoo_parts import LATENT as LATENT
from zoo_parts import LLAMA as LLAMA
from zoo_parts import LLAMAS as LLAMAS
from zoo_parts import MIXTURES as MIXTURES
from zoo_parts import PHI_LONGROPE as PHI_LONGROPE
from zoo_parts import SANDWICH as SANDWICH

NEWER = {**OTHERS, **LATEST}
CONFIGS: dict[str, dict[str, Any]] = {
    **LLAMAS,
    **LATENT,
    **GEMMA4,
    "mistral-window": {**BASE, "model_type": "mistral", "sliding_window": 9, "rope_theta": 1e4},
    "mistral-nemo": {**BASE, "model_type": "mistral", "sliding_window": None, "rope_theta": 1e6},
    "ministral": {
        **BASE,
        "model_type": "ministral",
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {**BASE, "model_type": "ministral3", "rope_parameters": {**YARN, **MINISTRAL3}},
    "ministral3-window": {
        **BASE,
        "model_type": "ministral3",
        "sliding_window": 9,
        "rope_parameters": {**YARN, **MINISTRAL3, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.5},
    },
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "gemma": {**GEMMA, "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {**SANDWICH, "model_type": "gemma2", "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {
        **SANDWICH,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
    "qwen2": {**BASE, "model_type": "qwen2", "rope_theta": 1e6},
    "qwen2-windows": {
        **BASE,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        **BASE,
        "model_type": "qwen2",
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {**BASE, "model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3_moe": {
        **BASE,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
    },
    "qwen3_moe-normalised": {**BASE, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 5, "norm_topk_prob": True},
    **MIXTURES,
    "gpt_oss": GPT_OSS,
    "gpt_oss-v4-fields": {  # As on the hub, without biases in the attention.
        **{name: value for name, value in GPT_OSS.items() if name != "rope_parameters"},
        "attention_bias": False,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "swiglu_alpha": 1.3,
        "experts_per_token": 2,
        "initial_context_length": 16,
        "rope_theta": 1e4,
        "rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False},
    },
    "phi3": {
        **BASE,
        "model_type": "phi3",
        "sliding_window": 9,
        "head_dim": 10,
        "original_max_position_embeddings": 128,
    },
    "phi3-short": {**BASE, **PHI_LONGROPE, "original_max_position_embeddings": 128},
    "phi3-long": {**BASE, **PHI_LONGROPE, "num_hidden_layers": 3, "original_max_position_embeddings": 4},
    "olmo2": {**BASE, "model_type": "olmo2", "head_dim": 10},
    "granite": {
        **BASE,
        "model_type": "granite",
        "head_dim": 10,
        "embedding_multiplier": 3.5,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.21,
    },
    "smollm3": {**BASE, "model_type": "smollm3", "head_dim": 10, "num_hidden_layers": 4},
    "vaultgemma": {**SANDWICH, "model_type": "vaultgemma", "attn_logit_softcapping": 3.0},
    "olmo3": {  # As transformers 4 writes it.
        **BASE,
        "model_type": "olmo3",
        "head_dim": 10,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "rope_theta": 5e5,
        "rope_scaling": {**YARN, "attention_factor": 1.3},
    },
    "olmo3-rope-by-type": {
        **BASE,
        "model_type": "olmo3",
        "head_dim": 10,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {**YARN, "rope_theta": 7e4},
        },
    },
    "seed_oss": {**BASE, "model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
    "seed_oss-biases": {
        **BASE,
        "model_type": "seed_oss",
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "exaone4": {**BASE, "model_type": "exaone4", "head_dim": 10, "sliding_window": 9, "num_hidden_layers": 4},
    "exaone4-no-window": {
        **BASE,
        "model_type": "exaone4",
        "sliding_window": None,
        "sliding_window_pattern": None,
        "layer_types": ["full_attention"] * 2,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "ernie4_5": {**BASE, "model_type": "ernie4_5", "head_dim": 10, "tie_word_embeddings": True},
    "ernie4_5-biases": {
        **BASE,
        "model_type": "ernie4_5",
        "use_bias": True,
        "num_key_value_heads": 3,
        "rope_theta": 1e4,
    },
    "glm4": {**BASE, "model_type": "glm4", "head_dim": 10},
    "glm4-no-bias": {
        **BASE,
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 0.75,
    },
    "arcee": {**BASE, "model_type": "arcee", "num_attention_heads": 5, "num_key_value_heads": 5},
    "arcee-biases-yarn": {
        **BASE,
        "model_type": "arcee",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**YARN, "rope_theta": 1e4},
    },
    "mellum": {
        **BASE,
        **EXPERTS,
        "model_type": "mellum",
        "num_experts": 5,
        "sliding_window": 9,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse", "dense"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {**YARN, "rope_theta": 7e4},
        },
    },
    "qwen3_5_text": {  # With the fields of published checkpoints.
        **BASE,
        **DELTA,
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    },
    "qwen3_5_text-other-sizes": {
        **BASE,
        **DELTA,
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **BASE,
        **DELTA,
        **EXPERTS,
        "model_type": "qwen3_next",
        "num_experts": 6,
        "shared_expert_intermediate_size": 13,
        "mlp_only_layers": [1],
    },
    "qwen3_next-without-experts": {**BASE, **DELTA, "model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5_moe_text": {
        **BASE,
        **DELTA,
        **EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "num_experts": 5,
        "shared_expert_intermediate_size": 13,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
    },
    **NEWER,
}


EACH_FAMILY = sorted({config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values())
"""The first config of each model_type, for tests of what does not depend on a family's options."""
OF_EACH_KIND = (
    "apertus", "bailing_hybrid", "biases-linear-one-kv-head", "cohere2", "deepseek_v2", "deepseek_v2-greedy",
    "deepseek_v3-without-experts", "ernie4_5_moe-biases", "falcon_h1", "falcon_h1-norms-and-biases", "gemma2",
    "gemma4_text-experts", "gemma4_text-per-layer-inputs", "gpt_oss", "hunyuan_v1_dense", "internlm3",
    "kimi_linear", "laguna", "lfm2-biases", "lfm3", "llama4_text", "mimo_v2_flash", "mistral4", "muse_glimmer_text",
    "nemotron_h-latent-experts-and-biases", "olmo_hybrid", "phi3-long", "qwen2_moe",
)  # fmt: skip
"""Few configs that together have every kind of layer with every option of its config (tests/archs/test_zoo.py), for
tests of code that goes by layers, not by families."""
OF_EACH_LAYOUT = (*OF_EACH_KIND, "glm4", "granitemoehybrid", "qwen3_5_text", "qwen3_next")
"""With the families whose checkpoints divide tensors in other ways, for tests of weight maps: rotary channels that are
partly interleaved, gates beside up projections of shared experts, and two ways of Gated DeltaNet's projections."""
HYBRIDS = {name for name, config in CONFIGS.items() if "linear_num_key_heads" in config}
"""Configs with layers of Gated DeltaNet."""
SHORT_CONVS = {name for name, config in CONFIGS.items() if "conv_L_cache" in config}
"""Configs with gated short convolutions."""
MAMBAS = {name for name, config in CONFIGS.items() if {"mamba_n_heads", "mamba_num_heads"} & config.keys()}
"""Configs with layers of Mamba2."""
WITHOUT_GATES = {name for name in NEWER if name.startswith("nemotron_h")}
"""Configs whose experts have no gate."""
NEWER_MIXTURES = ["cohere2_moe", "cohere2_moe-root-mean-square-norms"]
NEWER_MIXTURES += sorted(
    name for name, config in NEWER.items() if "moe_intermediate_size" in config and name not in WITHOUT_GATES
)
LLAMA4 = {name for name in NEWER if name.startswith("llama4")}
"""Configs in which routing weights multiply the inputs of experts."""
KIMI = {name for name in NEWER if name.startswith(("kimi_linear", "bailing_hybrid"))}
"""Configs with layers of Kimi Delta Attention and of latent attention."""
ONLY_NATIVE = {*LLAMA4, "cohere2", "cohere2_moe", "falcon_h1", "falcon_h1-norms-and-biases", *WITHOUT_GATES}
"""Configs with layers or norms that transformers' modules cannot compute natively in place (`nativize`)."""

MULTIMODAL = multimodal(CONFIGS)
"""Checkpoints of more than a language model, around those of CONFIGS."""

HEADS = {"text_config": {"num_attention_heads": 32}}
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen2_5_omni": {"thinker_config": {}},
    "qwen3_omni_moe": {"thinker_config": HEADS},
    "qwen3_omni_moe_thinker": HEADS,
}
"""What configs of some types must say: transformers' default of Qwen3-Omni is 28 heads of 2048 / 28 channels."""
