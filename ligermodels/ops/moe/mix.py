"""Experts of a mixture: gated feed-forward layers for rows that are sorted by expert, or for tokens and their choices.

"few_tokens" is for decoding; "grouped_mm" is torch's grouped GEMM between gathers and serves every call.
"""

import os
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.glu.glu import GLUOptions, check_options, check_pairs, gated_activation
from ligermodels.ops.moe.chosen_rows import ChosenRows, sum_rows, take_rows
from ligermodels.ops.moe.experts import grouped_mm, sort_by_expert
from ligermodels.ops.moe.few_tokens import few_tokens
from ligermodels.ops.quantized.expert_rows import expert_rows_refuse
from ligermodels.ops.runtime.checks import Signature, check_chosen
from ligermodels.ops.runtime.dispatch import Setting, set_batch_invariant
from ligermodels.ops.runtime.tensors import autocast_dtype

Activation = GLUOptions | Callable[[Tensor], Tensor]
"""A gated activation of pairs of channels; or any function (R, M) -> (R, I), which "grouped_mm" alone takes."""
BACKENDS = "few_tokens", "grouped_mm"
"""In order of preference: the first one that can serve a call does, unless another is named."""


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

    Raises:
        InputError: an expert is not in [0, num_experts), where values are read on the host: see `set_host_checks`.
    """
    order, inverse, offsets = sort_by_expert(experts, num_experts)
    check_chosen("by_expert", experts, num_experts)
    chosen = ChosenRows(order, inverse.view_as(experts))
    return sum_rows(compute(take_rows(tokens, chosen), offsets), weights, chosen)


# -- backends ----------------------------------------------------------------------------------------------------------


class set_experts_backend(Setting):
    """Chooses the backend of `mix_experts` for calls that name none.

    It takes effect at the call, for the whole process and all threads; as a context manager, it ends with the context.
    The environment variable LIGERMODELS_EXPERTS_BACKEND sets it when ligermodels is imported.

    Args:
        backend: "auto", "few_tokens" or "grouped_mm".

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


def takes_few_tokens(reason: str | None, name: str | None = None) -> bool:
    """Whether a call that "few_tokens" cannot serve for this `reason`, or can (None), runs on it.

    Args:
        reason: why it cannot serve the call.
        name: the backend that the call names. Default: None, as `set_experts_backend` says.

    Raises BackendError if the backend is unknown, or if it is "few_tokens", which cannot serve the call.
    """
    _check_name(name := name or set_experts_backend.value)
    if set_batch_invariant.value:
        reason = "batch_invariant is on, and its sums depend on the number of tokens"
    if name == "few_tokens" and reason is not None:
        raise BackendError(f"experts backend {name!r} cannot serve this call: {reason}")
    return reason is None and name in ("auto", "few_tokens")


def _few_tokens_refuses(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None, activation: Activation
) -> str | None:
    """Why "few_tokens" cannot serve a call of `mix_experts`; None if it can."""
    others = gate_up, down, *biases
    if not isinstance(activation, GLUOptions):
        return "the activation is a function; it takes silu, gelu and gelu_tanh of pairs of channels"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weights, *others)):
        return "it has no gradients"
    if any(t is not None and t.dtype != x.dtype for t in others) or autocast_dtype(x) != x.dtype:
        return "the experts' weights are not of the tokens' dtype"
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        return "the experts' weights are not contiguous"  # it would copy all of them
    return expert_rows_refuse(x, weights.numel(), len(gate_up), gate_up, down)


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
        backend: "auto", "few_tokens" or "grouped_mm". Default: None, as `set_experts_backend` says.

    Returns:
        (N, H), of x's dtype, or of the dtype of autocast.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or an expert is not in [0, E), where values are read on the
            host: see `set_host_checks`.
        BackendError: the named backend is unknown or cannot serve this call.
    """
    _MIX.check("mix_experts", x, weights, experts, gate_up, down, gate_up_bias, down_bias)
    _check_pairs("mix_experts", activation, gate_up, down)
    check_chosen("mix_experts", experts, len(gate_up))
    operands = gate_up, down, gate_up_bias, down_bias
    if takes_few_tokens(_few_tokens_refuses(x, weights, *operands, activation=activation), backend):
        both = (gate_up.flatten(0, 1), None), (down.flatten(0, 1), None)
        options = cast(GLUOptions, activation)
        return few_tokens(x, weights, experts, *both, len(gate_up), gate_up_bias, down_bias, activation=options)

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        return _rows_by_expert(rows, offsets, *operands, activation=activation)

    return by_expert(x, weights, experts, len(gate_up), compute)


def grouped_mlp(
    x: Tensor,
    offsets: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation,
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
        activation: a gated activation of the pairs; or a function (R, 2 * I) -> (R, I).

    Returns:
        (R, H), of x's dtype, or of the dtype of autocast.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
        BackendError: `set_experts_backend` names another backend than "grouped_mm".
    """
    _ROWS.check("grouped_mlp", x, offsets, gate_up, down, gate_up_bias, down_bias)
    _check_pairs("grouped_mlp", activation, gate_up, down)
    require_grouped_mm("rows that are sorted by expert")
    return _rows_by_expert(x, offsets, gate_up, down, gate_up_bias, down_bias, activation=activation)


def _rows_by_expert(
    rows: Tensor, offsets: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, *, activation: Activation,
) -> Tensor:  # fmt: skip
    rows = grouped_mm(rows, gate_up, offsets, gate_up_bias)
    rows = gated_activation(rows, activation) if isinstance(activation, GLUOptions) else activation(rows)
    return grouped_mm(rows, down, offsets, down_bias)


def _check_pairs(op: str, activation: Activation, gate_up: Tensor, down: Tensor) -> None:
    """InputError unless a gated activation is known, gets pairs of channels, and down their results."""
    if isinstance(activation, GLUOptions):
        check_options(op, activation)
        check_pairs(op, gate_up.shape[1])
        if gate_up.shape[1] != 2 * down.shape[2]:
            raise InputError(
                f"{op}: gate_up has {gate_up.shape[1]} rows for each expert, twice the {down.shape[2]} columns of down "
                f"are {2 * down.shape[2]}"
            )
