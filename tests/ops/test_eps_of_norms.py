"""The epsilon of norms: a negative one is an error that names it, where rows of small values would become NaN."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ligermodels import ops
from ligermodels.errors import InputError

X, WEIGHT = torch.zeros(2, 64), torch.ones(64)
NORMS: dict[str, Callable[[Any], Any]] = {
    "rms_norm": lambda eps: ops.rms_norm(X, WEIGHT, eps),
    "add_rms_norm": lambda eps: ops.add_rms_norm(X, X, WEIGHT, eps),
    "layer_norm": lambda eps: ops.layer_norm(X, WEIGHT, None, eps),
    "gated_rms_norm": lambda eps: ops.gated_rms_norm(X, X, WEIGHT, eps),
    "float8_add_rms_norm": lambda eps: ops.float8_add_rms_norm(X, X, WEIGHT, eps, torch.float8_e4m3fn),
    "rope_qkv": lambda eps: ops.rope_qkv(
        torch.zeros(1, 1, 12), None, None, num_kv_heads=1, group_size=1, head_dim=4, q_norm=torch.ones(4), eps=eps
    ),
}


def _cached(**options: Any) -> Any:
    cache = torch.zeros(1, 2, 1, 4)
    return ops.rope_qkv_cached(
        torch.zeros(1, 1, 12), None, None, num_kv_heads=1, group_size=1, head_dim=4, k_cache=cache, v_cache=cache,
        slots=torch.zeros(1, dtype=torch.int32), q_norm=torch.ones(4), **options,
    )  # fmt: skip


NORMS["rope_qkv_cached"] = lambda eps: _cached(eps=eps)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "1e-6", None])
@pytest.mark.parametrize("op", NORMS)
def test_a_wrong_epsilon_is_named(op: str, eps: Any) -> None:
    with pytest.raises(InputError, match=f"^{op}: eps: must be a number of at least 0"):
        NORMS[op](eps)


def test_a_wrong_epsilon_of_values_is_named() -> None:
    with pytest.raises(InputError, match=r"^rope_qkv_cached: value_norm_eps: must be a number of at least 0"):
        _cached(value_norm_eps=-1e-6)
