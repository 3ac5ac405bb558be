"""Rules for norms, GLUs and RoPE on DTensors: they run on local shards, without communication if rows are sharded.

Rows are independent of one another, so any dimension except the last may be sharded. The weight is replicated, and its
gradient is a partial sum. This file is imported when the first DTensor is seen.

`register_sharding` caches its choices by an op's tensors and by all arguments from the first int on. So in an
op's schema, the first flag that changes the shapes of results must be an int.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ligermodels.errors import InputError
from ligermodels.ops.runtime.library import Rows

WEIGHTS = ("weight", "bias", "q_norm", "k_norm")


def is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


def replicated(op: str, x: Any, others: dict[str, Any]) -> list[Any]:
    """The tensors `others` on the mesh of x. Plain tensors, such as a table or a bias, are replicated.

    Args:
        op: name of the op, for the message.
        x: the first argument of the op.
        others: its other tensors, by name.

    Raises:
        InputError: another argument is a DTensor, but x is not.
    """
    if not isinstance(x, DTensor):
        name = next(name for name, t in others.items() if isinstance(t, DTensor))
        raise InputError(f"{op}: {name} is a DTensor, but the first argument is not: pass {name}.to_local(), or both")
    everywhere = [Replicate()] * x.device_mesh.ndim
    return [
        t if t is None or isinstance(t, DTensor) else DTensor.from_local(t, x.device_mesh, everywhere, run_check=False)
        for t in others.values()
    ]


def register(op: Any, rows: Rows | None) -> None:
    """Register the rules of an op with torch. Raises InputError if it has none."""
    if rows is None:
        raise InputError(
            f"{op._opname} takes no DTensor: pass local tensors (x.to_local()), or gather first (x.full_tensor())"
        )
    names = [argument.name for argument in op._schema.arguments]
    register_sharding(op)(functools.partial(_rules, rows, names, len(op._schema.returns)))


def _rules(rows: Rows, names: list[str], num_results: int, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of an op's results and arguments, for each placement of its rows."""
    by_name = dict(zip(names, arguments, strict=True))
    whole = rows.whole if isinstance(rows.whole, int) else rows.whole(**by_name)
    exist = rows.results(**by_name) if rows.results else (True,) * num_results
    placements = [Replicate(), *(Shard(dim) for dim in range(len(arguments[0].shape) - whole))]
    return [
        (_results(exist, by_name, placement), [_argument(key, x, placement) for key, x in by_name.items()])
        for placement in placements
    ]


def _argument(name: str, x: Any, rows: Any) -> Any:
    """The placement of an argument for a placement of the rows; None for arguments that are not tensors."""
    if not hasattr(x, "placements"):
        return None
    if name in WEIGHTS:
        return Replicate()
    if name in ("cos", "sin") and isinstance(rows, Shard):  # (B or 1, T, R/2) beside heads (B, T, heads, D)
        return Replicate() if rows.dim > 1 or (rows.dim == 0 and x.shape[0] == 1) else rows
    return rows


def _results(exist: Sequence[bool], arguments: dict[str, Any], rows: Any) -> list[Any]:
    """The placements of the results for a placement of the rows. A result that is not needed is empty."""
    needs = {key.removeprefix("need_"): needed for key, needed in arguments.items() if key.startswith("need_")}
    if not needs:  # a forward pass
        return [rows if each else Replicate() for each in exist]
    weight_gradient = Partial() if isinstance(rows, Shard) else Replicate()
    placements = [weight_gradient if key in WEIGHTS else rows for key in needs]
    return [p if needed else Replicate() for p, needed in zip(placements, needs.values(), strict=True)]
