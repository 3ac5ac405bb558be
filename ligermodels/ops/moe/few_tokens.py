"""Experts for the few tokens of a decoding step, with plain or quantised weights."""

from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.ops.moe.fused import combine
from ligermodels.ops.quantized.expert_rows import expert_rows

Weight = tuple[Tensor, Tensor | None]
"""A plain weight (E * M, K) and None; or codes and scales of a quantised one."""


def few_tokens(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, num_experts: int,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, *, activation: GLUOptions,
) -> Tensor:  # fmt: skip
    """`mix_experts` of few tokens, without gradients: each weight of an active expert is read once.

    Args:
        x: (N, H), tokens that `expert_rows_refuse` does not refuse.
        weights: (N, k), weights of the chosen experts.
        experts: integers (N, k), the chosen experts.
        gate_up: the weight (E * 2 * I, H): pairs of gate and up rows of each expert.
        down: the weight (E * H, I).
        num_experts: number E of experts.
        gate_up_bias: (E, 2 * I), of x's dtype, or None.
        down_bias: (E, H), of x's dtype, or None.
        activation: the gated activation.

    Returns:
        (N, H), of x's dtype.
    """
    rows = experts.flatten()
    h = expert_rows(x, rows, *gate_up, gate_up_bias, num_experts, x.shape[0], activation)
    y = expert_rows(h, rows, *down, down_bias, num_experts, x.shape[0])
    return combine(y, weights.float(), experts.shape[1])
