"""Experts for the few tokens of a decoding step, with plain or quantised weights."""

from torch import Tensor

from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.ops.quantized.expert_rows import ExpertRows, expert_rows
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import contiguous

BLOCK = 1024
"""Columns that a program of the kernel adds."""
Weight = tuple[Tensor, Tensor | None]
"""A plain weight (E * M, K) and None; or codes and scales of a quantised one."""


def few_tokens(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Weight, down: Weight, num_experts: int,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, *, activation: GLUOptions,
) -> Tensor:  # fmt: skip
    """`mix_experts` of few tokens, without gradients: weights are read as in `expert_rows`.

    Args:
        x: (N, H), tokens that `expert_rows_refuse` does not refuse.
        weights: (N, k), weights of the chosen experts.
        experts: int32 or int64 (N, k), the chosen experts.
        gate_up: the weight (E * 2 * I, H): pairs of gate and up rows of each expert.
        down: the weight (E * H, I).
        num_experts: number E of experts.
        gate_up_bias: (E, 2 * I), of x's dtype, or None.
        down_bias: (E, H), of x's dtype, or None.
        activation: the gated activation.

    Returns:
        (N, H), of x's dtype.
    """
    rows = ExpertRows.of(experts, num_experts)
    h = expert_rows(x, rows, *gate_up, gate_up_bias, num_experts, activation)
    y = expert_rows(h, rows, *down, down_bias, num_experts)
    out: Tensor = _combine(y, weights.float(), experts.shape[1])
    return out


@kernel
def _combine_kernel(rows, weights, out, N, COPIES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """out[n]: the sum of weight * row over the COPIES rows of token n, in their order."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        row = token * COPIES + copy
        total += tl.load(rows + row * N + col, mask=col < N, other=0.0).to(tl.float32) * tl.load(weights + row)
    tl.store(out + token * N + col, total.to(out.dtype.element_ty), mask=col < N)


@custom_op()
def _combine(rows: Tensor, weights: Tensor, copies: int) -> Tensor:
    """The sums (N, H) of the rows (N * copies, H) of each token, by float32 weights (N, copies)."""
    out = rows.new_empty(rows.shape[0] // copies, rows.shape[1])
    if not is_fake(rows) and len(rows):
        _combine_kernel[(out.shape[0], -(-out.shape[1] // BLOCK))](
            rows.contiguous(), contiguous(weights), out, out.shape[1], COPIES=copies, BLOCK=BLOCK, num_warps=4
        )
    return out
