"""How the ops of norms, GLUs and RoPE run on DTensors: on local shards, without communication if rows are sharded.

Rows are independent of one another, so that any dimension but the last may be sharded; the weight is replicated and its
gradient is a partial sum. This file is imported when the first DTensor is seen.

`register_sharding` caches its choices by an op's tensors and by what follows the first argument that is an int. So that
is what an op declares the first flag to be that changes the shapes of its results.
"""

import math
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ligermodels.errors import InputError

Rule = tuple[list[Any], list[Any]]  # placements of the outputs, and of the arguments; None for what is no tensor


def is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


def replicated(op: str, x: Any, others: dict[str, Any]) -> list[Any]:
    """The tensors `others` on the mesh of x, a DTensor: plain ones are replicated, as a table or a bias is.

    Raises InputError if x is not a DTensor, but one of the others is."""
    if not isinstance(x, DTensor):
        name = next(name for name, t in others.items() if isinstance(t, DTensor))
        raise InputError(f"{op}: {name} is a DTensor, but the first argument is not: pass {name}.to_local(), or both")
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [
        t if t is None or isinstance(t, DTensor) else DTensor.from_local(t, x.device_mesh, everywhere, run_check=False)
        for t in others.values()
    ]


def _rows(x: Any, last: int) -> list[Any]:
    """The placements for the leading dimensions of x, but for its `last` ones."""
    return [Replicate(), *(Shard(d) for d in range(len(x.shape) - last))]


def _if(there: Any, placement: Any) -> Any:
    """The placement of an argument that may be None."""
    return None if there is None else placement


def _result(needed: Any, placement: Any) -> Any:
    """The placement of a result that is empty unless it is needed."""
    return placement if needed else Replicate()


def _sum(needed: bool, rows: Any) -> Any:
    """The placement of a weight's gradient, given that of the rows."""
    return Partial() if needed and isinstance(rows, Shard) else Replicate()


def _rms_norm_forward(x: Any, residual: Any, weight: Any, after: Any, eps: Any, offset: Any, cast_before: Any) -> Any:
    total = residual is not None and not after
    arguments = (None,) * 4
    return [
        ([p, _result(total, p), p], [p, _if(residual, p), _if(weight, Replicate()), *arguments]) for p in _rows(x, 1)
    ]


def _rms_norm_backward(
    dy: Any, dx_more: Any, x: Any, weight: Any, rstd: Any, need_x: bool, need_weight: bool, offset: Any
) -> list[Rule]:
    return [
        (
            [_result(need_x, p), _sum(need_weight and weight is not None, p)],
            [p, _if(dx_more, p), p, _if(weight, Replicate()), p, None, None, None],
        )
        for p in _rows(x, 1)
    ]


def _layer_norm_forward(x: Any, weight: Any, bias: Any, eps: Any) -> list[Rule]:
    whole = Replicate()
    return [([p, p, p], [p, _if(weight, whole), _if(bias, whole), None]) for p in _rows(x, 1)]


def _layer_norm_backward(
    dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, need_x: bool, need_weight: bool, need_bias: bool
) -> list[Rule]:
    whole = Replicate()
    return [
        (
            [_result(need_x, p), _sum(need_weight, p), _sum(need_bias, p)],
            [p, p, _if(weight, whole), _if(bias, whole), p, p, None, None, None],
        )
        for p in _rows(x, 1)
    ]


def _glu_places(gate: Any, up: Any) -> list[Any]:
    """Rows and, where no pair is cut in two, columns."""
    parts = math.prod(gate.mesh.shape) * (2 if up is None else 1)
    return _rows(gate, 0 if gate.shape[-1] % parts == 0 else 1)


def _glu_forward(gate: Any, up: Any, activation: Any) -> list[Rule]:
    return [([p], [p, _if(up, p), None]) for p in _glu_places(gate, up)]


def _glu_backward(dy: Any, gate: Any, up: Any, need_gate: bool, need_up: bool, activation: Any) -> list[Rule]:
    return [
        ([_result(need_gate, p), _result(need_up and up is not None, p)], [p, p, _if(up, p), None, None, None])
        for p in _glu_places(gate, up)
    ]


def _table(table: Any, placement: Any) -> Any:
    """The placement of cos or sin (B or 1, T, R/2) beside heads (B, T, heads, D)."""
    shared = isinstance(placement, Shard) and (placement.dim > 1 or (placement.dim == 0 and table.shape[0] == 1))
    return Replicate() if shared else placement


def _rope_rotate(q: Any, k: Any, cos: Any, sin: Any, inverse: Any) -> list[Rule]:
    return [([p, _result(k is not None, p)], [p, _if(k, p), _table(cos, p), _table(sin, p), None]) for p in _rows(q, 1)]


def _rope_split(
    qkv: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, *sizes_and_norm: Any
) -> list[Rule]:  # heads are counted by arguments, so that they cannot be sharded
    return [
        (
            [p, p, p],
            [
                p,
                *(None if t is None else _table(t, p) for t in (cos, sin)),
                *(_if(weight, Replicate()) for weight in (q_norm, k_norm)),
                *(None for _ in sizes_and_norm),
            ],
        )
        for p in _rows(qkv, 1)
    ]


def _rope_merge(
    dq: Any, dk: Any, dv: Any, cos: Any, sin: Any, q_norm: Any, k_norm: Any, qkv: Any,
    need_qkv: bool, need_q_norm: bool, need_k_norm: bool, eps: Any, offset: Any,
) -> list[Rule]:  # fmt: skip
    return [
        (
            [_result(need_qkv, p), _sum(need_q_norm, p), _sum(need_k_norm, p)],
            [
                *(p, p, p),
                *(None if t is None else _table(t, p) for t in (cos, sin)),
                *(_if(weight, Replicate()) for weight in (q_norm, k_norm)),
                _if(qkv, p),
                *(None,) * 5,
            ],
        )
        for p in _rows(dq, 2)
    ]


RULES = {
    rule.__name__.removeprefix("_"): rule
    for rule in (
        *(_rms_norm_forward, _rms_norm_backward, _layer_norm_forward, _layer_norm_backward),
        *(_glu_forward, _glu_backward, _rope_rotate, _rope_split, _rope_merge),
    )
}


def register(name: str, op: Any) -> None:
    """Registers the rule of an op with torch. Raises InputError if it has none."""
    if name not in RULES:
        raise InputError(
            f"{name} takes no DTensor: pass local tensors (x.to_local()), or gather first (x.full_tensor())"
        )
    register_sharding(op)(RULES[name])
