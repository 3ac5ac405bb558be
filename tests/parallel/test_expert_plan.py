"""The memory of QLoRA of whole mixtures on one GPU, as `ligermodels plan` counts it, beside arithmetic by hand."""

from typing import Any

import pytest
import torch

import ligermodels as lm
from ligermodels.parallel.memory import step_memory

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
USABLE = 0.94
"""Of a GPU's memory; the rest is the CUDA context and fragmentation."""


def lora_parameters(config: dict[str, Any], size: int, experts: int, r: int) -> int:
    hidden, width = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    attention = 2 * (hidden + q) + 2 * (hidden + kv)  # q and o; k and v
    expert = (hidden + 2 * size) + (size + hidden)  # A and B of gate_up, and of down
    return config["num_hidden_layers"] * r * (attention + experts * expert)


def int4_bytes(config: dict[str, Any], size: int, experts: int) -> int:
    """Half a byte per element, in groups of 128 inputs that are filled up, with a float32 scale for each."""
    hidden, width = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    rows_of = {hidden: q + 2 * kv + experts * 2 * size, q: hidden}
    total = sum(rows * -(-inputs // 128) * (64 + 4) for inputs, rows in rows_of.items())
    return config["num_hidden_layers"] * (total + experts * hidden * -(-size // 128) * (64 + 4))


@pytest.mark.parametrize(
    ("config", "size", "experts", "r", "gigabytes"),
    [(QWEN3_30B, 768, 128, 8, 24), (GPT_OSS_20B, 2880, 32, 16, 24)],
    ids=["Qwen3-30B-A3B, 24 GB", "gpt-oss-20b, 24 GB"],
)
def test_qlora_of_experts_on_one_gpu(config: dict[str, Any], size: int, experts: int, r: int, gigabytes: int) -> None:
    """A sequence of 4,096 tokens, with full activation checkpointing and AdamW in the parameters' dtype."""
    model = lm.from_config(config, dtype=torch.bfloat16, device="meta")
    lm.add_lora(lm.quantize(model, "int4"), r, target_modules=["all-linear", "experts"])
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == lora_parameters(config, size, experts, r)
    model.activation_checkpointing = "full"
    memory = step_memory(model, 1, 4096)
    embeddings = 2 * config["vocab_size"] * config["hidden_size"]
    routers = config["num_hidden_layers"] * experts * config["hidden_size"]
    known = int4_bytes(config, size, experts) + 2 * (trained + embeddings + routers)
    assert known < memory.weights < 1.003 * known  # norms and biases are small
    assert memory.optimizer_states == 4 * trained
    assert memory.total < USABLE * gigabytes * 1e9
