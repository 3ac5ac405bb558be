"""Rules for norms, GLUs and RoPE on DTensors: they run on local shards, without communication if rows are sharded.

Rows are independent of one another, so any dimension except the last may be sharded. The weight is replicated, and its
gradient is a partial sum. This file is imported when the first DTensor is seen.

`register_sharding` caches its choices by an op's tensors and by all arguments from the first int on. So in an
op's schema, the first flag that changes the shapes of results must be an int.
"""

import functools
import math
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ligermodels.errors import InputError

WEIGHTS = ("weight", "bias", "q_norm", "k_norm")
WHOLE = {  # op -> number of last dimensions of its first tensor that cannot be sharded
    "rms_norm_forward": 1,
    "rms_norm_backward": 1,
    "layer_norm_forward": 1,
    "layer_norm_backward": 1,
    "glu_forward": 1,  # or none: see _rules
    "glu_backward": 1,
    "rope_rotate": 1,
    "rope_split": 1,  # arguments count the heads, so heads cannot be sharded
    "rope_merge": 2,
}


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


def register(name: str, op: Any) -> None:
    """Register the rules of an op with torch. Raises InputError if it has none."""
    if name not in WHOLE:
        raise InputError(
            f"{name} takes no DTensor: pass local tensors (x.to_local()), or gather first (x.full_tensor())"
        )
    names = [argument.name for argument in op._schema.arguments]
    register_sharding(op)(functools.partial(_rules, name, names, len(op._schema.returns)))


def _rules(name: str, names: list[str], num_results: int, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of an op's results and arguments, for each placement of its rows."""
    by_name = dict(zip(names, arguments, strict=True))
    whole = WHOLE[name]
    if name.startswith("glu"):  # columns too, where no pair is cut in two
        gate = by_name["gate"]
        parts = math.prod(gate.mesh.shape) * (2 if by_name["up"] is None else 1)
        whole = 0 if gate.shape[-1] % parts == 0 else 1
    placements = [Replicate(), *(Shard(dim) for dim in range(len(arguments[0].shape) - whole))]
    return [
        (_results(name, num_results, by_name, rows), [_argument(key, x, rows) for key, x in by_name.items()])
        for rows in placements
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


def _results(name: str, num_results: int, arguments: dict[str, Any], rows: Any) -> list[Any]:
    """The placements of the results for a placement of the rows. A result that is not needed is empty."""
    needs = {key.removeprefix("need_"): needed for key, needed in arguments.items() if key.startswith("need_")}
    if not needs:  # a forward pass
        exists = [True] * num_results
        if name == "rms_norm_forward":
            exists[1] = arguments["residual"] is not None and not arguments["after"]
        elif name == "rope_rotate":
            exists[1] = arguments["k"] is not None
        return [rows if exist else Replicate() for exist in exists]
    weight_gradient = Partial() if isinstance(rows, Shard) else Replicate()
    placements = [weight_gradient if key in WEIGHTS else rows for key in needs]
    return [p if needed else Replicate() for p, needed in zip(placements, needs.values(), strict=True)]
