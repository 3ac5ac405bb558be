"""Tiny random Llama checkpoints with awkward sizes, made and saved by transformers, the oracle."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Head widths that are not hidden / heads, fewer key/value heads than heads, and no round sizes.
BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "x_kept_by_export": {"extra": [1, "é"]},
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Fields left out on purpose: head_dim, num_key_value_heads, rope.
    "llama-2": {**{k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads")}, "hidden_size": 84},
    "llama-3": {**BASE, "rope_theta": 500_000.0, "rope_scaling": None, "torch_dtype": "float32"},
    "llama-3.1": {**BASE, "rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING},
    "llama-3.2": {
        **BASE,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 7],
        "rope_parameters": {**LLAMA3_SCALING, "factor": 32.0, "rope_theta": 500_000.0},
    },
    "biases-linear-one-kv-head": {
        **BASE,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "rope_theta": 1234.5,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
}


def make_checkpoint(folder: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Save a random checkpoint whose config.json is `config` to the letter; returns the oracle, attention eager."""
    # A copy: LlamaConfig adds rope_theta to the dict that it is given.
    oracle_config = LlamaConfig(**{k: deepcopy(v) for k, v in config.items() if k != "model_type"})
    oracle_config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, json.dumps(config))) % 1000)
    oracle = LlamaForCausalLM(oracle_config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            # Biases and norms too: at their initial 0 and 1 a mistake in them would not show.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.ndim == 1 else 0.15)
    oracle.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return oracle


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |found - wanted| / max |wanted|."""
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())
