"""Experts of a mixture: gated feed-forward layers for rows that are sorted by expert, or for tokens and their choices.

`BACKENDS` lists the implementations in order of preference; the first one that can serve a call does, unless another is
named. "few_tokens" is for decoding, "grouped_mm" is torch's grouped GEMM between gathers and serves every call,
"triton" is `fused`.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.glu.glu import GLUOptions, check_pairs, gated_activation
from ligermodels.ops.moe.chosen_rows import ChosenRows, sum_rows, take_rows
from ligermodels.ops.moe.experts import expert_order, grouped_mm, sort_by_expert
from ligermodels.ops.moe.few_tokens import few_tokens
from ligermodels.ops.moe.fused import Rows, fused_experts
from ligermodels.ops.quantized.expert_rows import expert_rows_refuse
from ligermodels.ops.runtime.devices import gpu_of
from ligermodels.ops.runtime.dispatch import HAS_TRITON, Setting, set_backend, use_kernels
from ligermodels.ops.runtime.signature import Signature
from ligermodels.ops.runtime.tensors import autocast_dtype, under_autocast

Activation = GLUOptions | Callable[[Tensor], Tensor]
"""A gated activation of pairs of channels; or any function (R, M) -> (R, I), which "grouped_mm" alone takes."""
MAX_EXPERTS = 1024
"""Most experts whose rows a program of "triton" finds in its registers."""


class _Operands(NamedTuple):
    """x (N, H); routing weights (N, k), or None; weights and biases of the experts, see `mix_experts`."""

    x: Tensor
    weights: Tensor | None
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class _Backend(NamedTuple):
    """An implementation.

    refuses: why it cannot serve a call; None if it can.
    mix: computes `mix_experts` from the operands, `experts` and the activation.
    rows: computes `grouped_mlp` from the operands, `offsets` and the activation; None if it cannot.
    """

    refuses: Callable[[_Operands, Activation], str | None]
    mix: Callable[[_Operands, Tensor, Activation], Tensor]
    rows: Callable[[_Operands, Tensor, Activation], Tensor] | None


# -- through grouped_mm ------------------------------------------------------------------------------------------------


def by_expert(
    tokens: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The weighted sum of `compute` over the choices of each token; `compute` gets rows sorted by expert.

    Args:
        tokens: (N, H).
        weights: (N, k), weights of the choices.
        experts: long (N, k) in [0, num_experts), the chosen experts.
        num_experts: number E of experts.
        compute: rows (N * k, H), sorted by expert, and int32 offsets (E,) where the rows of each expert end ->
            (N * k, M).

    Returns:
        (N, M), of the dtype that `compute` returns; the sum is in float32 (float64 for weights in float64).
    """
    order, inverse, offsets = sort_by_expert(experts, num_experts)
    chosen = ChosenRows(order, inverse.view_as(experts))
    return sum_rows(compute(take_rows(tokens, chosen), offsets), weights, chosen)


def _mix_by_grouped_mm(operands: _Operands, experts: Tensor, activation: Activation) -> Tensor:
    tokens, weights, gate_up = operands[:3]
    assert weights is not None

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        return _rows_by_grouped_mm(operands._replace(x=rows), offsets, activation)

    return by_expert(tokens, weights, experts, len(gate_up), compute)


def _rows_by_grouped_mm(operands: _Operands, offsets: Tensor, activation: Activation) -> Tensor:
    rows, _, gate_up, down, gate_up_bias, down_bias = operands
    rows = grouped_mm(rows, gate_up, offsets, gate_up_bias)
    rows = gated_activation(rows, activation) if isinstance(activation, GLUOptions) else activation(rows)
    return grouped_mm(rows, down, offsets, down_bias)


# -- in Triton kernels -------------------------------------------------------------------------------------------------


def _triton_refuses(operands: _Operands, activation: Activation) -> str | None:
    x = operands.x
    gpu = gpu_of(x.device)
    if not isinstance(activation, GLUOptions):
        return "the activation is a function; it takes silu, gelu and gelu_tanh of pairs of channels"
    if x.dtype == torch.float64:
        return "it computes in float32, not in float64"
    if set_backend.value == "reference" or not (HAS_TRITON and use_kernels(*operands)):
        return "its kernels need triton and CUDA tensors"
    if autocast_dtype(x) == torch.bfloat16 and gpu is not None and not gpu.has_bfloat16:
        return f"{gpu.name} has no tensor cores for bfloat16"
    if len(operands.gate_up) > MAX_EXPERTS:
        return f"{len(operands.gate_up)} experts are more than {MAX_EXPERTS}"
    return None


def _mix_by_triton(operands: _Operands, experts: Tensor, activation: Activation) -> Tensor:
    x, weights, *others = _cast(operands)
    assert weights is not None and isinstance(activation, GLUOptions)
    order, offsets = expert_order(experts, len(operands.gate_up))
    copies = experts.shape[1]
    rows = Rows(offsets, (order // copies).int(), order, copies)
    return fused_experts(x, weights.float(), rows, activation, *others)


def _rows_by_triton(operands: _Operands, offsets: Tensor, activation: Activation) -> Tensor:
    x, _, *others = _cast(operands)
    assert isinstance(activation, GLUOptions)
    return fused_experts(x, None, Rows(offsets), activation, *others)


def _cast(operands: _Operands) -> list[Any]:
    """The operands, without the routing weights in the dtype of autocast; InputError if their dtypes differ."""
    x, *others = under_autocast(operands.x, *operands[2:])
    for name, weight in zip(_Operands._fields[2:], others, strict=True):
        if weight is not None and weight.dtype != x.dtype:
            raise InputError(f"experts: {name} must be of x's dtype {x.dtype}, got {weight.dtype}")
    return [x, operands.weights, *others]


# -- few tokens --------------------------------------------------------------------------------------------------------


def _few_tokens_refuses(operands: _Operands, activation: Activation) -> str | None:
    x, weights, *others = operands
    if not isinstance(activation, GLUOptions):
        return "the activation is a function; it takes silu, gelu and gelu_tanh of pairs of channels"
    if weights is None:
        return "rows are sorted by expert already"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return "it has no gradients"
    if any(t is not None and t.dtype != x.dtype for t in others) or autocast_dtype(x) not in (None, x.dtype):
        return "the experts' weights are not of the tokens' dtype"
    if not (operands.gate_up.is_contiguous() and operands.down.is_contiguous()):
        return "the experts' weights are not contiguous"  # it would copy all of them
    return expert_rows_refuse(x, weights.numel(), len(operands.gate_up), operands.gate_up, operands.down)


def _mix_by_few_tokens(operands: _Operands, experts: Tensor, activation: Activation) -> Tensor:
    x, weights, gate_up, down, *biases = operands
    assert weights is not None and isinstance(activation, GLUOptions)
    both = (gate_up.flatten(0, 1), None), (down.flatten(0, 1), None)
    return few_tokens(x, weights, experts, *both, len(gate_up), *biases, activation=activation)


BACKENDS = {
    "few_tokens": _Backend(_few_tokens_refuses, _mix_by_few_tokens, None),
    "grouped_mm": _Backend(lambda operands, activation: None, _mix_by_grouped_mm, _rows_by_grouped_mm),
    "triton": _Backend(_triton_refuses, _mix_by_triton, _rows_by_triton),
}
"""Name -> backend, in order of preference."""


class set_experts_backend(Setting):
    """Chooses the backend of `mix_experts` and `grouped_mlp` for calls that name none.

    It takes effect at the call, for the whole process and all threads; as a context manager, it ends with the context.
    The environment variable LIGERMODELS_EXPERTS_BACKEND sets it when ligermodels is imported.

    Args:
        backend: "auto", "few_tokens", "grouped_mm" or "triton".

    Raises:
        BackendError: `backend` is something else.
    """

    value: str = os.environ.get("LIGERMODELS_EXPERTS_BACKEND", "") or "auto"

    def __init__(self, backend: str) -> None:
        _check_name(backend)
        super().__init__(backend)


def _check_name(name: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise BackendError(f"experts backend {name!r} is unknown; there are: auto, {', '.join(BACKENDS)}")


def require_grouped_mm(experts: str) -> None:
    """Raise BackendError if the setting is a backend that cannot compute these `experts`, which need "grouped_mm"."""
    _check_name(name := set_experts_backend.value)
    if name not in ("auto", "grouped_mm"):
        raise BackendError(f"experts backend {name!r} cannot serve this call: {experts} run on grouped_mm alone")


def takes_few_tokens(reason: str | None) -> bool:
    """Whether a call that "few_tokens" cannot serve for this `reason`, or can (None), runs on it by the setting.

    Raises BackendError if the setting is "few_tokens", and it cannot serve the call.
    """
    _check_name(name := set_experts_backend.value)
    if name == "few_tokens" and reason is not None:
        raise BackendError(f"experts backend {name!r} cannot serve this call: {reason}")
    return reason is None and name in ("auto", "few_tokens")


def _choose(name: str | None, operands: _Operands, activation: Activation) -> _Backend:
    """The backend of a call: the named one, or the first one that can serve it."""
    name = name or set_experts_backend.value
    _check_name(name)
    if name == "auto":
        return next(b for b in BACKENDS.values() if b.refuses(operands, activation) is None)
    if reason := BACKENDS[name].refuses(operands, activation):
        raise BackendError(f"experts backend {name!r} cannot serve this call: {reason}")
    return BACKENDS[name]


# -- public ------------------------------------------------------------------------------------------------------------

_MIX = Signature(
    x="N H+", weights="N k+", experts="N k int64 int32", gate_up="E+ M+ H", down="E H I+",
    gate_up_bias="E M =gate_up ?", down_bias="E H =gate_up ?",
)  # fmt: skip
_ROWS = Signature(
    x="R H+", offsets="E+ int32", gate_up="E M+ H", down="E H I+", gate_up_bias="E M =gate_up ?",
    down_bias="E H =gate_up ?",
)  # fmt: skip


def mix_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation,
    backend: str | None = None,
) -> Tensor:
    """The weighted sum of down_e(activation(gate_up_e(x))) over the chosen experts e of each token x.

    Args:
        x: tokens (N, H), floating.
        weights: (N, k), weights of the chosen experts, floating.
        experts: (N, k), integers in [0, E), the chosen experts.
        gate_up: (E, 2 * I, H), of x's dtype: pairs of a gate and an up row. Under autocast x, the experts' weights and
            biases are cast to the dtype of autocast.
        down: (E, H, I), of x's dtype.
        gate_up_bias: (E, 2 * I), of x's dtype; None for none.
        down_bias: (E, H), of x's dtype; None for none.
        activation: a gated activation of the pairs; or a function (R, 2 * I) -> (R, I), for backend "grouped_mm".
        backend: "auto", "few_tokens", "grouped_mm" or "triton". Default: None, as `set_experts_backend` says.

    Returns:
        (N, H), of x's dtype, or of the dtype of autocast.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
        BackendError: the named backend is unknown or cannot serve this call.
    """
    _MIX.check("mix_experts", x, weights, experts, gate_up, down, gate_up_bias, down_bias)
    operands = _operands("mix_experts", activation, x, weights, gate_up, down, gate_up_bias, down_bias)
    return _choose(backend, operands, activation).mix(operands, experts, activation)


def grouped_mlp(
    x: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation,
    backend: str | None = None,
) -> Tensor:
    """down_e(activation(gate_up_e(x))) for rows x that are sorted by their expert e.

    Args:
        x: (R, H), floating.
        offsets: int32 (E,), the end of each expert's rows; they do not decrease, and the last is R.
        gate_up: (E, 2 * I, H), of x's dtype: pairs of a gate and an up row. Under autocast x, the experts' weights and
            biases are cast to the dtype of autocast.
        down: (E, H, I), of x's dtype.
        gate_up_bias: (E, 2 * I), of x's dtype; None for none.
        down_bias: (E, H), of x's dtype; None for none.
        activation: a gated activation of the pairs; or a function (R, 2 * I) -> (R, I), for backend "grouped_mm".
        backend: "auto", "few_tokens", "grouped_mm" or "triton". Default: None, as `set_experts_backend` says.

    Returns:
        (R, H), of x's dtype, or of the dtype of autocast.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
        BackendError: the named backend is unknown or cannot serve this call.
    """
    _ROWS.check("grouped_mlp", x, offsets, gate_up, down, gate_up_bias, down_bias)
    operands = _operands("grouped_mlp", activation, x, None, gate_up, down, gate_up_bias, down_bias)
    rows = _choose(backend, operands, activation).rows
    assert rows is not None, "a backend without it refuses sorted rows"
    return rows(operands, offsets, activation)


def _operands(op: str, activation: Activation, x: Tensor, weights: Tensor | None, *others: Any) -> _Operands:
    operands = _Operands(x, weights, *others)
    gate_up, down = operands.gate_up, operands.down
    if isinstance(activation, GLUOptions):
        check_pairs(op, gate_up.shape[1])
        if gate_up.shape[1] != 2 * down.shape[2]:
            raise InputError(
                f"{op}: gate_up has {gate_up.shape[1]} rows for each expert, twice the {down.shape[2]} columns of down "
                f"are {2 * down.shape[2]}"
            )
    return operands
