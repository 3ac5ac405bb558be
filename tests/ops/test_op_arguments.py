"""Arguments of ops that are no tensors, numbers or flags: errors name the op and the argument."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def whole(*values: int) -> Tensor:
    return torch.tensor(values)


STEP = {"q": ones(1, 1, 1, 4), "k": ones(1, 1, 1, 4), "v": ones(1, 1, 2, 4), "g": ones(1, 1, 2), "beta": ones(1, 1, 2)}
STATE = {"state": ones(1, 2, 4, 4)}
SSD = {
    "x": ones(1, 1, 2, 4),
    "dt": ones(1, 1, 2),
    "A": ones(2),
    "B": ones(1, 1, 1, 4),
    "C": ones(1, 1, 1, 4),
    "D": None,
}
TREE = {"ancestors": torch.ones(1, 1, dtype=torch.bool)}
QKV = {"qkv": ones(1, 2, 32), "cos": None, "sin": None, "num_kv_heads": 1, "group_size": 2, "head_dim": 8}
GATES = {"a": ones(1, 3, 2), "b": ones(1, 3, 2), "log_rate": ones(2), "bias": ones(2)}
LORA = {"x": ones(3, 8), "weight": ones(6, 8), "a": ones(2, 8), "b": ones(6, 2)}
DECODE = {"q": ones(2, 1, 2, 8), "k_cache": ones(2, 6, 1, 8), "v_cache": ones(2, 6, 1, 8), "cache_seqlens": whole(1, 2)}
INPUTS = {"best": whole(1)[None, None], "root": whole(5), "cache_seqlens": whole(3), "depth": whole(0, 1)}
INPUTS |= {"rank": whole(0, 0), "stops": whole(9)}
NORM = {"x": ones(3, 2, 8), "z": ones(3, 2, 8), "weight": ones(8), "eps": 1e-6}
PRODUCT = {
    "a": ones(3, 16).to(torch.float8_e4m3fn),
    "b": ones(16, 16).to(torch.float8_e4m3fn),
    "scale_a": torch.ones(()),
}
PRODUCT |= {"scale_b": torch.ones(()), "out_dtype": torch.float32}
LAYER = {"x": ones(3, 16), "weight": ones(32, 16), "recipe": ops.Float8Recipe()}
CONV = {"inputs": ones(1, 2, 3), "x": ones(1, 1, 3), "node": whole(0), "tree": (whole(0), whole(0))}


@pytest.mark.parametrize(
    ("op", "arguments", "changed", "message"),
    [
        (ops.gated_rms_norm, NORM, {"weight": None}, "weight must be a tensor, got NoneType"),
        (ops.gated_rms_norm, NORM, {"norm_before_gate": "no"}, "norm_before_gate: must be True or False, got 'no'"),
        (ops.rope_qkv, QKV, {"qkv": [1.0]}, "qkv must be a tensor, got list"),
        (ops.rope_qkv, QKV, {"num_kv_heads": 1.0}, "num_kv_heads: must be a whole number of at least 1, got 1.0"),
        (ops.rope_qkv, QKV, {"num_kv_heads": -4, "group_size": -3}, "num_kv_heads: must be a whole number"),
        (ops.delta_gates, GATES, {"a": None}, "a must be a tensor, got NoneType"),
        (ops.gated_delta_rule, STEP, {"g": None}, "g must be a tensor, got NoneType"),
        (ops.gated_delta_rule, STEP, {"final_state": None}, "final_state: must be True or False, got None"),
        (ops.gated_delta_rule_step, STEP | STATE, {"state": None}, "state must be a tensor, got NoneType"),
        (ops.gated_delta_rule_step, STEP | STATE, {"q": None}, "q must be a tensor, got NoneType"),
        (ops.gated_delta_rule_tree, STEP | STATE | TREE, {"ancestors": None}, "ancestors must be a tensor"),
        (ops.ssd, SSD, {"final_state": 1}, "final_state: must be True or False, got 1"),
        (ops.ssd_step, SSD | STATE, {"x": None}, "x must be a tensor, got NoneType"),
        (ops.ssd_tree, SSD | STATE | TREE, {"state": None}, "state must be a tensor, got NoneType"),
        (ops.commit_conv_inputs, CONV, {"inputs": None}, "inputs must be a tensor, got NoneType"),
        (ops.lora_linear, LORA, {"scaling": None}, "scaling must be a number, got None"),
        (ops.decode_attention, DECODE, {"tree_mask": [[True]]}, "tree_mask must be a tensor, got list"),
        (ops.tree_inputs, INPUTS, {"best": None}, "best must be a tensor, got NoneType"),
        (ops.topk_indices, {"x": ones(2, 5), "k": 2}, {"k": 2.0}, "k must be from 0 to 5, .*; got 2.0"),
        (ops.topk_indices, {"x": ones(2, 5), "k": 2}, {"k": True}, "k must be from 0 to 5, .*; got True"),
        (ops.topk_indices, {"x": ones(2, 5), "k": 2}, {"x": None}, "x must be a tensor, got NoneType"),
        (ops.compact_kv_cache, {"stored": None, "slots": whole(0)[None]}, {}, "stored must be a tensor, got NoneType"),
        (
            ops.sort_by_expert,
            {"experts": whole(0, 1), "num_experts": 2},
            {"experts": ones(2)},
            "experts must be integers",
        ),
        (
            ops.sort_by_expert,
            {"experts": whole(0, 1), "num_experts": 2},
            {"num_experts": -1},
            "num_experts: must be a wh",
        ),
        (ops.swiglu, {"gate": ones(3, 8)}, {"limit": "1"}, "limit must be above 0, got '1'"),
        (ops.swiglu, {"gate": ones(3, 8)}, {"limit_activation": 1}, "limit_activation: must be True or False, got 1"),
        (ops.gated_activation, {"gate_up": ones(3, 8), "options": "silu"}, {}, "must be GLUOptions, got 'silu'"),
        (ops.float8_cast, {"x": None, "dtype": torch.float8_e4m3fn}, {}, "x must be a tensor, got NoneType"),
        (ops.float8_linear, LAYER, {"weight": None}, "weight must be a tensor, got NoneType"),
        (ops.float8_mm, PRODUCT, {"scale_a": 1.0}, "scale_a must be a tensor, got float"),
    ],
)
def test_other_types(op: Any, arguments: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    if changed and None not in arguments.values():
        op(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()})
    with pytest.raises(InputError, match=f"{op.__name__}: .*{message}"):
        op(**arguments | changed)
