"""The grouped product of experts with frozen, quantised weights.

Weights are dequantised piece by piece, so that memory holds the codes and one piece of PIECE elements, in the forward
and in the backward pass. Few rows read the codes of their own experts alone. Nothing waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.glu.glu import GLUOptions, check_options, gated_activation
from ligermodels.ops.moe.experts import group_of_rows, grouped_mm
from ligermodels.ops.moe.few_tokens import few_tokens
from ligermodels.ops.moe.mix import by_expert, require_grouped_mm, takes_few_tokens
from ligermodels.ops.quantized.dequantize import dequantize_rows, dequantize_weight_reference
from ligermodels.ops.quantized.expert_rows import ExpertRows, expert_rows, expert_rows_refuse
from ligermodels.ops.quantized.weights import GROUP, QuantizedWeight, check_quantized, columns_of, pieces
from ligermodels.ops.runtime.checks import Signature, check_chosen, check_tensor
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable, reject_dtensors
from ligermodels.ops.runtime.tensors import under_autocast

PIECE = 2**26
"""Elements of the weights of all experts that are dequantised at a time."""
_MIX = Signature(x="N H+", weights="N k+", experts="N k int64 int32")
FEW_ROWS = 16
"""Up to this number of rows, each row dequantises the weight of its expert, where there is no kernel for it."""


def quantized_grouped_mm(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, biases: Tensor | None = None
) -> Tensor:
    """Rows of x times the quantised weight of their group, as `grouped_mm` of the dequantised weights.

    x and biases have gradients; codes and scales are constants.

    Args:
        x: (R, K), any floating dtype; under autocast it is cast to autocast's dtype.
        codes: codes of a weight (E * M, K), the weights of the E groups one below the other, from `quantize_weight`.
        scales: scales of the weight, from `quantize_weight`.
        offsets: int32 (E,), the end of each group; they do not decrease, and the last is R.
        biases: (E, M), cast to the dtype of x: biases[e] is added to the rows of group e; None for none.

    Returns:
        (R, M), dtype of x.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or an operand is a DTensor.
    """
    refuse_batch_invariant("quantized_grouped_mm")
    (x,) = under_autocast(x)
    name = "quantized_grouped_mm"
    if x.ndim != 2 or not x.is_floating_point():
        raise InputError(f"{name}: x must be floating, of shape (R, K); got {x.dtype} {tuple(x.shape)}")
    reject_dtensors(name, x, codes, scales, offsets, biases)
    check_quantized(name, codes, scales, x.shape[1], x.device)
    check_tensor(name, "offsets", offsets, ("E",), x.device, torch.int32)
    if codes.shape[0] % len(offsets):
        raise InputError(f"{name}: codes have {codes.shape[0]} rows, which {len(offsets)} groups do not divide evenly")
    y: Tensor = _QuantizedGroupedMM.apply(x, codes, scales, offsets)
    if biases is None:
        return y
    check_tensor(name, "biases", biases, (len(offsets), y.shape[1]), x.device)
    return y + _of_rows(biases.to(x.dtype), y, offsets)


def quantized_mix_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, num_experts: int,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, *, activation: GLUOptions,
) -> Tensor:  # fmt: skip
    """`mix_experts` of quantised weights, which are constants. Without gradients, few tokens read the codes of their
    experts once, in two kernels.

    Args:
        x: tokens (N, H), any floating dtype; under autocast it is cast to autocast's dtype.
        weights: (N, k), weights of the chosen experts, floating.
        experts: (N, k), integers in [0, E), the chosen experts.
        gate_up: codes and scales of a weight (E * 2 * I, H): pairs of gate and up rows, one expert below the other.
        down: codes and scales of a weight (E * H, I).
        num_experts: number E of experts.
        gate_up_bias: (E, 2 * I), cast to the dtype of x; None for none.
        down_bias: (E, H), cast to the dtype of x; None for none.
        activation: the gated activation of the pairs.

    Returns:
        (N, H), dtype of x.

    Raises:
        InputError: shapes, dtypes or devices do not fit, an operand is a DTensor, or an expert is not in [0, E), where
            values are read on the host: see `set_host_checks`.
        BackendError: `set_experts_backend` names a backend that cannot serve this call.
    """
    refuse_batch_invariant("quantized_mix_experts")
    (x,) = under_autocast(x)
    name = "quantized_mix_experts"
    reject_dtensors(name, x, *gate_up, *down)
    _MIX.check(name, x, weights, experts)
    rows = gate_up.codes.shape[0], down.codes.shape[0]
    if num_experts < 1 or rows[0] % (2 * num_experts) or rows[1] != num_experts * x.shape[1]:
        raise InputError(
            f"{name}: the codes of {num_experts} experts of {x.shape[1]} channels have E * 2 * I and E * H rows; got "
            f"{rows[0]} of gate_up and {rows[1]} of down"
        )
    size = rows[0] // (2 * num_experts)
    for each, bias, width in (("gate_up_bias", gate_up_bias, 2 * size), ("down_bias", down_bias, x.shape[1])):
        if bias is not None:
            check_tensor(name, each, bias, (num_experts, width), x.device)
    check_quantized(name, *gate_up, x.shape[1], x.device)
    check_quantized(name, *down, size, x.device)
    check_options(name, activation)
    check_chosen(name, experts, num_experts)
    biases = [None if bias is None else bias.to(x.dtype) for bias in (gate_up_bias, down_bias)]
    with_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weights, *biases))
    reason = "it has no gradients" if with_gradients else None
    if takes_few_tokens(reason or expert_rows_refuse(x, weights.numel(), num_experts, gate_up.codes, down.codes)):
        return few_tokens(x, weights, experts, gate_up, down, num_experts, *biases, activation=activation)

    require_grouped_mm("experts in 4 or 8 bits, beside few_tokens,")

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        rows = gated_activation(quantized_grouped_mm(rows, *gate_up, offsets, biases[0]), activation)
        return quantized_grouped_mm(rows, *down, offsets, biases[1])

    return by_expert(x, weights, experts, num_experts, compute)


def quantized_grouped_mm_reference(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, biases: Tensor | None = None
) -> Tensor:
    """The specification of `quantized_grouped_mm`, in plain torch, with the same arguments.

    Args:
        x: (R, K), sorted by expert.
        codes: codes of the weights.
        scales: their scales.
        offsets: int32 (E,), where the rows of each expert end.
        biases: (E, N) or None.
    """
    weight = dequantize_weight_reference(codes, scales, x.shape[1], x.dtype)
    return grouped_mm(x, weight.unflatten(0, (len(offsets), -1)), offsets, biases)


def _of_rows(biases: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """biases (E, M) -> those of the groups of the rows of y (R, M), as a grouped product of an aligned width."""
    columns = F.pad(biases[..., None], (0, 7))
    return grouped_mm(y.new_ones(y.shape[0], 8), columns, offsets)


@custom_op()
def _quantized_grouped_forward(x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """x (R, K) -> (R, M)."""
    experts, width = offsets.shape[0], x.shape[1]
    outputs = codes.shape[0] // experts
    y = x.new_empty(x.shape[0], outputs)
    if is_fake(x):
        return y
    if expert_rows_refuse(x, x.shape[0], experts, codes) is None:
        rows_of = ExpertRows.of(group_of_rows(x, offsets)[:, None], experts)
        return expert_rows(x, rows_of, codes, scales, None, experts)
    codes, scales = (tensor.unflatten(0, (experts, outputs)) for tensor in (codes, scales))
    if x.shape[0] <= FEW_ROWS:
        own = group_of_rows(x, offsets)
        weight = dequantize_rows(codes[own], scales[own], width, x.dtype)
        return torch.bmm(weight, x[..., None])[..., 0]
    for rows in pieces(outputs, experts * width, 8, PIECE):
        weight = dequantize_rows(codes[:, rows], scales[:, rows], width, x.dtype)
        y[:, rows] = grouped_mm(x, weight, offsets)
    return y


@custom_op()
def _quantized_grouped_backward(dy: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, in_features: int) -> Tensor:
    """dy (R, M) -> dx (R, K). Weights are dequantised by columns, so that each element of dx is one sum."""
    dx = dy.new_empty(dy.shape[0], in_features)
    if is_fake(dy):
        return dx
    for columns in pieces(in_features, codes.shape[0], GROUP, PIECE):
        own = columns_of(codes, scales, columns)
        weight = dequantize_rows(*own, columns.stop - columns.start, dy.dtype).unflatten(0, (len(offsets), -1))
        dx[:, columns] = grouped_mm(dy, weight.transpose(1, 2), offsets)
    return dx


class _QuantizedGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales, offsets)
        ctx.in_features = x.shape[1]
        return _quantized_grouped_forward(x, codes, scales, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        codes, scales, offsets = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return _quantized_grouped_backward(dy, codes, scales, offsets, ctx.in_features), None, None, None
