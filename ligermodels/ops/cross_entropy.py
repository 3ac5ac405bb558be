"""Cross entropy over given logits, and the rows, coefficients and kernels that `linear_cross_entropy` shares.

For a row of logits l and its target y, with effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), and lse = log sum exp x:

    loss = lse - (1 - label_smoothing) * x_y - label_smoothing * mean(x) + z_loss * lse^2

(label smoothing as torch and https://arxiv.org/abs/1512.00567, z-loss as PaLM, https://arxiv.org/abs/2204.02311).
"""

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, triton, use_kernels
from ligermodels.ops.library import as_rows, opaque_op

Reduction = Literal["mean", "sum", "none"]
TILES = 4


class LossOptions(NamedTuple):
    """What makes a row's loss out of its logits and target, in the order in which the opaque ops take it."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    return_rank: bool = False


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    token_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    in_place: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of logits against class indices (the formula is at the head of this module).

    logits: (..., V), any floating dtype and strides. target: (...), int64, in [0, V) or ignore_index: such rows have no
        loss and a gradient of exact zeros.
    token_weights: (...), floating, not negative, multiplied into each row's loss; they get no gradient.
    reduction: "none" gives a loss for each row, (...); "sum" their sum; "mean" their sum over the number of rows not
        ignored, or over the sum of those rows' token_weights if given. With nothing to count the loss is 0 (where
        torch gives nan) and so are the gradients.
    return_rank: also return (...) int64, how many classes stand before the target: those of a greater logit, and those
        of an equal logit and a smaller index; -1 for ignored rows. So rank < k is top-k accuracy.
    in_place: with "mean" or "sum", the gradient may take the place of the logits, whose values are lost then: no memory
        of its own, and one pass over the logits less. Whoever else saved them for a backward pass fails in it; this one
        runs once.
    Returns the loss in float32 (float64 for float64 logits), or (loss, rank).
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range. On
    CUDA such a target fails a device-side assertion (no wait for the device), and is never read through.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    check_loss("cross_entropy", logits, "logits", target, token_weights, reduction, options)
    coefficient = row_coefficients(target, ignore_index, reduction, token_weights, logits.dtype)
    if in_place and _can_overwrite(logits, reduction):
        loss, rank = _CrossEntropyInPlace.apply(logits, target, coefficient, options)
        return (loss, rank) if return_rank else loss
    if use_kernels(logits):
        losses, rank = _CrossEntropy.apply(logits, target, options)
    else:
        losses, rank = row_losses_reference(logits, target, options)
    loss = losses * coefficient if reduction == "none" else (losses * coefficient).sum()
    return (loss, rank) if return_rank else loss


def _can_overwrite(logits: torch.Tensor, reduction: Reduction) -> bool:
    """Whether the gradient can be computed in the forward pass, and in the logits' place. Raises InputError for logits
    that are a parameter."""
    if reduction == "none" or not (torch.is_grad_enabled() and logits.requires_grad):
        return False
    if logits.is_leaf:
        raise InputError("cross_entropy: in_place would overwrite logits that are a leaf of the graph; pass a copy")
    # float16 may not hold the gradient before the loss scale, which comes with the backward pass, is multiplied in.
    held = logits.dtype != torch.float16 and logits.is_contiguous() and logits.numel() > 0
    return held and use_kernels(logits) and not torch.compiler.is_compiling()


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: Reduction = "mean",
    token_weights: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The specification of `cross_entropy`, in plain torch; the same arguments."""
    chosen = LossOptions(**options)
    losses, rank = row_losses_reference(logits, target, chosen)
    losses = losses * row_coefficients(target, chosen.ignore_index, reduction, token_weights, logits.dtype)
    loss = losses if reduction == "none" else losses.sum()
    return (loss, rank) if chosen.return_rank else loss


def row_losses_reference(
    logits: torch.Tensor, target: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss, 0 for ignored rows, and its rank (empty unless asked for), in plain torch."""
    check_targets(target, logits.shape[-1], options.ignore_index)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) * options.logit_scale
    if options.softcap is not None:
        x = options.softcap * torch.tanh(x / options.softcap)
    valid = target != options.ignore_index
    x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # what an ignored row holds, NaN included, has no bearing
    y = torch.where(valid, target, 0).unsqueeze(-1)
    log_p = torch.log_softmax(x, dim=-1)
    losses = -(1 - options.label_smoothing) * log_p.gather(-1, y).squeeze(-1)
    if options.label_smoothing:
        losses = losses - options.label_smoothing * log_p.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * torch.logsumexp(x, dim=-1).square()
    rank = target.new_empty(0)
    if options.return_rank:
        at_y = logits.gather(-1, y)
        before = (logits > at_y) | ((logits == at_y) & (torch.arange(logits.shape[-1], device=y.device) < y))
        rank = torch.where(valid, before.sum(-1), -1)
    return torch.where(valid, losses, 0.0), rank


def row_coefficients(
    target: torch.Tensor,
    ignore_index: int,
    reduction: Reduction,
    token_weights: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What each row's loss is multiplied by: the reduced loss is the sum of losses times coefficients.

    float32 (float64 for float64), of target's shape; 0 for ignored rows, and for all rows if they weigh nothing.
    """
    weights = (target != ignore_index).to(torch.promote_types(dtype, torch.float32))
    if token_weights is not None:
        weights = torch.where(weights > 0, token_weights.detach().to(weights.dtype), 0.0)
    if reduction != "mean":
        return weights
    total = weights.sum()
    return torch.where(total != 0, weights / total, 0.0)


def check_loss(
    op: str,
    scores: torch.Tensor,
    scores_name: str,
    target: torch.Tensor,
    token_weights: torch.Tensor | None,
    reduction: str,
    options: LossOptions,
) -> None:
    """Raises InputError unless scores (..., N), target, weights and options fit one another."""
    if scores.dim() == 0 or scores.shape[-1] == 0 or not scores.is_floating_point():
        raise InputError(
            f"{op}: {scores_name} must be floating, of shape (..., N) with N > 0; "
            f"got {scores.dtype} {tuple(scores.shape)}"
        )
    if target.dtype != torch.int64 or target.shape != scores.shape[:-1] or target.device != scores.device:
        raise InputError(
            f"{op}: target must be int64 {tuple(scores.shape[:-1])} on {scores.device}; "
            f"got {target.dtype} {tuple(target.shape)} on {target.device}"
        )
    if token_weights is not None:
        if token_weights.shape != target.shape or not token_weights.is_floating_point():
            raise InputError(
                f"{op}: token_weights must be floating {tuple(target.shape)}; "
                f"got {token_weights.dtype} {tuple(token_weights.shape)}"
            )
        if token_weights.device != scores.device:
            raise InputError(f"{op}: token_weights are on {token_weights.device}, {scores_name} on {scores.device}")
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not 0 <= options.label_smoothing <= 1:
        raise InputError(f"{op}: label_smoothing must be in [0, 1], got {options.label_smoothing}")
    if options.softcap is not None and not options.softcap > 0:
        raise InputError(f"{op}: softcap must be positive or None, got {options.softcap}")
    if not options.logit_scale > 0:
        raise InputError(f"{op}: logit_scale must be positive, got {options.logit_scale}")


def check_targets(target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises InputError for a target that is no class and not ignored; on CUDA and in a compiled graph, an assertion
    of the device's own, without waiting for it."""
    bad = (target != ignore_index) & ((target < 0) | (target >= num_classes))
    if target.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(~bad.any(), f"a target is neither in [0, {num_classes}) nor ignore_index ({ignore_index})")
    elif bad.any():
        index = bad.nonzero()[0].tolist()
        raise InputError(
            f"target{index} is {target[tuple(index)].item()}, which is neither in [0, {num_classes}) nor the "
            f"ignore_index ({ignore_index}); {int(bad.sum())} such in all"
        )


@triton.jit
def _effective(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Effective logits of given ones, in float32; scale is logit_scale, over softcap if there is one.

    tanh is an odd polynomial near 0, where the formula in exp would cancel (a least-squares fit of relative error
    3e-9 up to 0.6), so that no value is off by more than a few units in the last place."""
    x = x.to(tl.float32)
    if SCALED or CAPPED:
        x = x * scale
    if CAPPED:
        z = x * x
        near = -0.00590587 * z + 0.02080538
        near = near * z - 0.05378668
        near = near * z + 0.13331958
        near = near * z - 0.33333299
        near = x + x * z * near
        far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
        far = tl.where(x < 0, -far, far)
        x = softcap * tl.where(tl.abs(x) < 0.6, near, far)
    return x


@triton.jit
def _exp(x):
    """exp(x); tl.exp itself costs three instructions more, which keep results below 1e-38."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _observe(
    start, col, V, y, at_y, top, total, plain, before, scale, softcap,
    MASKED: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Takes a tile (TILES, BLOCK) of a row's logits into what its BLOCK lanes have seen so far: their maxima, sums of
    exp(x - maximum), plain sums, and counts of logits that stand before the target's. KEEP is the cache's policy."""
    inside = col < V
    if MASKED:
        given = tl.load(start + col, mask=inside, other=0.0, eviction_policy=KEEP)
        x = tl.where(inside, _effective(given, scale, softcap, SCALED, CAPPED), float("-inf"))
    else:
        given = tl.load(start + col, eviction_policy=KEEP)
        x = _effective(given, scale, softcap, SCALED, CAPPED)
    higher = tl.maximum(top, tl.max(x, axis=0))
    total = total * _exp(top - higher) + tl.sum(_exp(x - higher[None, :]), axis=0)
    if SMOOTHED:
        plain += tl.sum(tl.where(inside, x, 0.0), axis=0)
    if RANK:
        before += tl.sum((inside & ((given > at_y) | ((given == at_y) & (col < y)))).to(tl.int32), axis=0)
    return higher, total, plain, before


@triton.jit
def _gradient(
    given, col, y, maximum, log_sum, coefficient, V, scale, softcap, logit_scale, smoothing, z_loss, near_target,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Gradient of coefficient * loss by given logits of columns col; near_target: the target may be among them."""
    c = coefficient * logit_scale
    x = _effective(given, scale, softcap, SCALED, CAPPED)
    g = _exp((x - maximum) - log_sum) * (c * (1.0 + 2.0 * z_loss * (maximum + log_sum)))
    if SMOOTHED:
        g = g - c * smoothing / V
    if near_target:
        g = tl.where(col == y, g - c * (1.0 - smoothing), g)
    if CAPPED:  # times 1 - tanh^2, which is 4 e / (1 + e)^2 with e = exp(-2 |x|): exact where tanh is near 1
        e = tl.exp(-2.0 * tl.abs(given.to(tl.float32) * scale))
        g = g * (4.0 * e / ((1.0 + e) * (1.0 + e)))
    return g


@triton.jit
def _cross_entropy_row_kernel(
    logits, stride, target, losses, maxima, log_sums, ranks, coefficients,
    V, ignore_index, scale, softcap, logit_scale, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, RANK: tl.constexpr, GRADIENT: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program reads one row: its loss, max and log of the sum of exp(x - max), and its rank. With GRADIENT it
    reads the row again, while that is in cache, and puts in its place the gradient of coefficient * loss.

    BLOCK lanes go through the row, TILES logits each at a time, and meet once at the end: little more than one exp for
    each logit, and no barrier in the loop."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, TILES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = logits + row * stride
    whole = V // (TILES * BLOCK) * (TILES * BLOCK)
    KEEP: tl.constexpr = "evict_last" if GRADIENT else ""
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        at_y = tl.load(start + y)
        top = tl.full((BLOCK,), -3.4028234663852886e38, dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        plain = tl.zeros((BLOCK,), dtype=tl.float32)
        before = tl.zeros((BLOCK,), dtype=tl.int32)
        for first in range(0, whole, TILES * BLOCK):
            top, total, plain, before = _observe(
                start, first + col, V, y, at_y, top, total, plain, before, scale, softcap,
                False, SCALED, CAPPED, SMOOTHED, RANK, KEEP,
            )  # fmt: skip
        if whole < V:
            top, total, plain, before = _observe(
                start, whole + col, V, y, at_y, top, total, plain, before, scale, softcap,
                True, SCALED, CAPPED, SMOOTHED, RANK, KEEP,
            )  # fmt: skip
        maximum = tl.max(top, axis=0)
        log_sum = tl.log(tl.sum(total * _exp(top - maximum), axis=0))
        # x_y - max and log_sum stay apart: their sum would lose what logits of great size leave of the loss.
        loss = (1.0 - smoothing) * (log_sum - (_effective(at_y, scale, softcap, SCALED, CAPPED) - maximum))
        if SMOOTHED:
            loss += smoothing * (log_sum - (tl.sum(plain, axis=0) / V - maximum))
        loss += z_loss * (maximum + log_sum) * (maximum + log_sum)
        tl.store(losses + row, loss)
        tl.store(maxima + row, maximum)
        tl.store(log_sums + row, log_sum)
        if RANK:
            tl.store(ranks + row, tl.sum(before, axis=0).to(tl.int64))
        if GRADIENT:
            c = tl.load(coefficients + row)
            if whole < V:
                inside = whole + col < V
                g = _gradient(
                    tl.load(start + whole + col, mask=inside, other=0.0), whole + col, y, maximum, log_sum, c,
                    V, scale, softcap, logit_scale, smoothing, z_loss, True, SCALED, CAPPED, SMOOTHED,
                )  # fmt: skip
                tl.store(start + whole + col, g.to(logits.dtype.element_ty), mask=inside)
            for done in range(0, whole, TILES * BLOCK):  # backwards: what was read last is still in the cache
                first = whole - TILES * BLOCK - done
                near = (y >= first) & (y < first + TILES * BLOCK)
                g = _gradient(
                    tl.load(start + first + col, eviction_policy="evict_first"), first + col, y, maximum, log_sum, c,
                    V, scale, softcap, logit_scale, smoothing, z_loss, near, SCALED, CAPPED, SMOOTHED,
                )  # fmt: skip
                tl.store(start + first + col, g.to(logits.dtype.element_ty), eviction_policy="evict_first")
    else:
        tl.store(losses + row, 0.0)
        tl.store(maxima + row, 0.0)
        tl.store(log_sums + row, 0.0)
        if RANK:
            tl.store(ranks + row, -1)
        if GRADIENT:
            for first in range(0, V, TILES * BLOCK):
                zero = tl.zeros((TILES, BLOCK), dtype=logits.dtype.element_ty)
                tl.store(start + first + col, zero, mask=first + col < V)


@triton.jit
def _cross_entropy_gradient_kernel(
    logits, stride, gradient, target, maxima, log_sums, coefficients,
    V, blocks, ignore_index, scale, softcap, logit_scale, smoothing, z_loss,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of one row of the gradient, from the saved max and log-sum."""
    row = tl.program_id(0).to(tl.int64) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    col = first + tl.arange(0, BLOCK)
    out = gradient + row * V + col
    y = tl.load(target + row)
    if (y != ignore_index) & (y >= 0) & (y < V):
        g = _gradient(
            tl.load(logits + row * stride + col, mask=col < V, other=0.0), col, y,
            tl.load(maxima + row), tl.load(log_sums + row), tl.load(coefficients + row),
            V, scale, softcap, logit_scale, smoothing, z_loss, (y >= first) & (y < first + BLOCK),
            SCALED, CAPPED, SMOOTHED,
        )  # fmt: skip
        tl.store(out, g.to(gradient.dtype.element_ty), mask=col < V)
    else:
        tl.store(out, tl.zeros((BLOCK,), dtype=tl.float32).to(gradient.dtype.element_ty), mask=col < V)


def _numbers(options: LossOptions) -> tuple[float, ...]:
    """scale, softcap, logit_scale, smoothing and z_loss as the kernels take them."""
    softcap = 1.0 if options.softcap is None else options.softcap
    return options.logit_scale / softcap, softcap, options.logit_scale, options.label_smoothing, options.z_loss


def _flags(options: LossOptions) -> dict[str, bool]:
    """Which parts of the formula the kernels need."""
    return {
        "SCALED": options.logit_scale != 1,
        "CAPPED": options.softcap is not None,
        "SMOOTHED": options.label_smoothing != 0,
    }


def _row_blocks(V: int, gradient: bool) -> tuple[int, int, int]:
    """Lanes, logits a lane takes at a time, and warps, for rows of V logits: 16-byte loads of bfloat16. With a gradient
    fewer and so larger programs, whose rows then fit in the cache."""
    lanes = min(max(power_of_2_above(-(-V // (4 * TILES))), 256), 4096 if gradient else 2048)
    return lanes, min(power_of_2_above(-(-V // lanes)), TILES), lanes // 256


def launch_rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    losses: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ranks: torch.Tensor,
    coefficients: torch.Tensor | None,
    options: LossOptions,
) -> None:
    """Runs the kernel over the rows of logits (M, V) whose last dimension is contiguous; fills the other tensors (M,).

    With coefficients (M,), the gradient of coefficient * loss takes the place of the logits."""
    M, V = logits.shape
    block, tiles, warps = _row_blocks(V, coefficients is not None)
    _cross_entropy_row_kernel[(M,)](
        logits, logits.stride(0), target, losses, maxima, log_sums, ranks, coefficients,
        V, options.ignore_index, *_numbers(options), **_flags(options), RANK=options.return_rank,
        GRADIENT=coefficients is not None, TILES=tiles, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _forward_fake(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    losses, maxima, log_sums = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    return losses, maxima, log_sums, target.new_empty(target.shape if return_rank else (0,))


@opaque_op(_forward_fake)
def _cross_entropy_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's loss, max, log of the sum of exp(x - max), and rank."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    check_targets(target, logits.shape[-1], ignore_index)
    outputs = _forward_fake(logits, target, *options)
    launch_rows(as_rows(logits), target.contiguous(), *outputs, None, options)
    return outputs


def _backward_fake(
    coefficient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


@opaque_op(_backward_fake)
def _cross_entropy_backward(
    coefficient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    maxima: torch.Tensor,
    log_sums: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
) -> torch.Tensor:
    """The gradient of the logits, given that of each row's loss."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    rows, gradient = as_rows(logits), logits.new_empty(logits.shape)
    M, V = rows.shape
    block = min(power_of_2_above(V), 4096)
    blocks = -(-V // block)
    _cross_entropy_gradient_kernel[(M * blocks,)](
        rows, rows.stride(0), gradient, target.contiguous(), maxima, log_sums, coefficient.contiguous(),
        V, blocks, ignore_index, *_numbers(options), **_flags(options),
        BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """Each row's loss and rank."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses, maxima, log_sums, rank = _cross_entropy_forward(logits, target, *options)
        ctx.save_for_backward(logits, target, maxima, log_sums)
        ctx.options = options
        ctx.mark_non_differentiable(rank)
        return losses, rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, coefficient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _cross_entropy_backward(coefficient, *ctx.saved_tensors, *ctx.options), None, None


@triton.jit
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x *= factor; where the factor turns out to be 1, as it mostly is, without touching x."""
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) * f
        tl.store(x + i, value.to(x.dtype.element_ty), mask=i < n)


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """x *= factor in place, x contiguous, without a wait for the device."""
    if use_kernels(x):
        block = 8192
        with torch.cuda.device_of(x):
            _scale_kernel[(-(-x.numel() // block),)](x, factor, x.numel(), BLOCK=block, num_warps=8)
    elif x.is_cuda or factor != 1:
        x.mul_(factor)


class _CrossEntropyInPlace(torch.autograd.Function):
    """The reduced loss, and the ranks; the logits become the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, coefficient: torch.Tensor, options: LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_targets(target, logits.shape[-1], options.ignore_index)
        losses, maxima, log_sums, rank = _forward_fake(logits, target, *options)
        ctx.gradient = logits.detach()
        torch.autograd.graph.increment_version(logits)
        with torch.cuda.device_of(logits):
            rows = as_rows(ctx.gradient)
            launch_rows(rows, target.contiguous(), losses, maxima, log_sums, rank, coefficient.contiguous(), options)
        ctx.mark_non_differentiable(rank)
        return (losses * coefficient).sum(), rank

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("cross_entropy: the backward pass of an in-place loss runs once")
        gradient, ctx.gradient = ctx.gradient, None
        scale_(gradient, grad)
        return gradient, None, None, None
