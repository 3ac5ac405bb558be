"""Cross entropy of several Medusa heads over the same hidden states, in one op.

Head k is y = blocks_k(x), a chain of ResBlocks x + SiLU(x W^T + b) (Medusa, https://arxiv.org/abs/2401.10774), then a
language model head: its own, or one that all heads share. A row is a pair of a head and a token. Rows are taken head by
head in chunks; those of a chunk are transformed, and from there on it is `linear_cross_entropy` (one GEMM for the
logits, the loss whose gradient takes their place, one GEMM for each gradient needed), then back through the blocks. So
neither logits nor transformed hidden states ever exist whole. Where the heads share the language model head a chunk
holds rows of several of them; where each has its own the chunks end with the head.
"""

from collections.abc import Sequence
from itertools import accumulate as running_sum
from itertools import zip_longest
from typing import Any

import torch
from torch.nn.functional import linear, silu

from ligermodels.errors import InputError
from ligermodels.ops.gradient_sum import GradientSum
from ligermodels.ops.library import as_rows, once_differentiable, opaque_op
from ligermodels.ops.linear_cross_entropy import COLUMN_MULTIPLE, SKIP_BELOW, chunk_rows, loss_in_place
from ligermodels.ops.token_losses import LossOptions, check_loss, check_targets, row_coefficients, row_losses_reference
from ligermodels.ops.token_losses_kernels import scale_
from ligermodels.ops.weigh_rows import weigh_rows

Block = tuple[torch.Tensor, torch.Tensor | None]
OneOrEach = torch.Tensor | Sequence[torch.Tensor]


def multi_head_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: OneOrEach,
    targets: torch.Tensor,
    blocks: Sequence[Sequence[Block]] | None = None,
    bias: OneOrEach | None = None,
    *,
    head_weights: torch.Tensor | Sequence[float] | None = None,
    normalizer: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    token_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    memory_budget: int = 3 * 2**28,
    num_targets: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over K heads of head_weights[k] * CE_k, the CE_k and the ranks, from one pass; exact, gradients included.

    hidden: (..., H), any floating dtype and strides; the dtype of all parameters (under autocast all are cast).
    weight: (V, H), shared by the heads, or K of them; bias likewise (V,).
    targets: (K, ...), int64, head by head as `layers.shift_labels` makes them: the op knows nothing of sequences and
        documents, and targets are small beside a single row of hidden states each.
    blocks: for each head as many pairs of weight (H, H) and bias (H,) as any other has, all biases there or all None.
    head_weights: (K,), by default all 1; they get no gradient.
    normalizer: what CE_k, a sum over rows, is divided by: a number or (K,); by default the number of head k's targets,
        or the sum of their token_weights. Where it is 0 the loss is 0.
    token_weights: (K, ...), multiplied into each row's loss. The other options: as in `cross_entropy`.
    memory_budget: bytes for a chunk: its logits, transformed hidden states and what is computed with them, whatever K
        is. On top come the gradients themselves; in 16 bits and several chunks as much as those of one head once more,
        for they are summed in float32 (`GradientSum`); and with K > 1 the float32 sum of hidden's gradient. Where it
        makes no difference to the peak a chunk takes more: with own lm_heads, what the gradients of the heads still to
        come will take; and all of a head's rows at once, what its sum would.
    num_targets: how many targets of each head are not ignored, if the caller knows: the other rows then take no part in
        the GEMMs. On the CPU they are counted; on CUDA that would be a wait for the device, so none is skipped without.

    Returns the loss, a scalar, and (K,) CE_k, undecayed and without a gradient, in float32 (float64 for float64); and
    the ranks, (K, ...) int64 as in `cross_entropy`, empty unless return_rank.
    A gradient is computed exactly if its own operand requires it. When: as in `linear_cross_entropy`.
    Raises InputError if shapes, dtypes, devices or options do not fit, or, on the CPU, for a target out of range. On
    CUDA such a target fails a device-side assertion, as a wrong count does.
    """
    weights, biases, block_weights, block_biases = _listed(weight, bias, blocks)
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    operands = [hidden, *weights, *biases, *block_weights, *block_biases]
    if torch.is_autocast_enabled(hidden.device.type):
        operands = [t.to(torch.get_autocast_dtype(hidden.device.type)) for t in operands]
    sizes = tuple(map(len, (weights, biases, block_weights, block_biases)))
    K, N = _check(operands, targets, sizes, token_weights, memory_budget, options)
    V = operands[1].shape[0]
    targets, row_weights = weigh_rows(targets, V, ignore_index, "sum", token_weights, operands[0].dtype)
    coefficient, head_weights = _coefficients(row_weights, head_weights, normalizer)
    if num_targets is None:
        counted = not (targets.is_cuda or torch.compiler.is_compiling())
        num_targets = (targets != ignore_index).view(K, -1).sum(1).tolist() if counted else [N] * K
    elif len(num_targets) != K or not all(0 <= n <= N for n in num_targets):
        raise InputError(f"{OP}: num_targets must be {K} numbers from 0 to {N}, got {list(num_targets)}")
    # Asked here, because inside autograd.Function.forward gradients are off and nothing tells what requires them.
    needs = tuple(torch.is_grad_enabled() and t.requires_grad for t in operands)
    settings = (options, memory_budget, tuple(num_targets))
    return _MultiHeadLinearCrossEntropy.apply(targets, coefficient, head_weights, settings, sizes, needs, *operands)


def multi_head_linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: OneOrEach,
    targets: torch.Tensor,
    blocks: Sequence[Sequence[Block]] | None = None,
    bias: OneOrEach | None = None,
    *,
    head_weights: torch.Tensor | Sequence[float] | None = None,
    normalizer: torch.Tensor | float | None = None,
    token_weights: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification of `multi_head_linear_cross_entropy`, in plain torch, with all the logits; same arguments."""
    for name in ("memory_budget", "num_targets"):
        options.pop(name, None)
    chosen, losses, ranks = LossOptions(**options), [], []
    for k, target in enumerate(targets):
        x = hidden
        for w, b in blocks[k] if blocks else ():
            x = x + silu(linear(x, w, b))
        w = weight if isinstance(weight, torch.Tensor) else weight[k]
        b = bias if bias is None or isinstance(bias, torch.Tensor) else bias[k]
        check_targets(target, w.shape[0], chosen.ignore_index)
        loss, rank = row_losses_reference(linear(x, w, b), target, chosen)
        losses.append(loss)
        ranks.append(rank)
    row_weights = row_coefficients(targets, chosen.ignore_index, "sum", token_weights, hidden.dtype)
    coefficient, head_weights = _coefficients(row_weights, head_weights, normalizer)
    head_losses = (torch.stack(losses) * coefficient).flatten(1).sum(1)
    rank = torch.stack(ranks) if chosen.return_rank else targets.new_empty(0)
    return (head_losses * head_weights).sum(), head_losses.detach(), rank


OP = "multi_head_linear_cross_entropy"


def _listed(
    weight: OneOrEach, bias: OneOrEach | None, blocks: Sequence[Sequence[Block]] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Weights and biases of the language model heads (one or K, or none) and of the blocks (K * L, or none)."""

    def each(x: OneOrEach | None) -> list[torch.Tensor]:
        return [] if x is None else [x] if isinstance(x, torch.Tensor) else list(x)

    blocks = blocks or ()
    if len({len(chain) for chain in blocks}) > 1:
        raise InputError(f"{OP}: every head must have as many blocks; they have {[len(chain) for chain in blocks]}")
    flat = [block for chain in blocks for block in chain]
    block_biases = [b for _, b in flat if b is not None]
    if len(block_biases) not in (0, len(flat)):
        raise InputError(f"{OP}: {len(block_biases)} of {len(flat)} blocks have a bias; either all must or none")
    return each(weight), each(bias), [w for w, _ in flat], block_biases


def _check(
    operands: Sequence[torch.Tensor],
    targets: torch.Tensor,
    sizes: tuple[int, ...],
    token_weights: torch.Tensor | None,
    memory_budget: int,
    options: LossOptions,
) -> tuple[int, int]:
    """K and the number of tokens. Raises InputError unless everything fits."""
    hidden = operands[0]
    if targets.dim() == 0 or targets.shape[0] == 0:
        raise InputError(f"{OP}: targets must be (K, ...) with K > 0, got {tuple(targets.shape)}")
    K = targets.shape[0]
    check_loss(OP, hidden.expand(K, *hidden.shape), "hidden for each head", targets, token_weights, "sum", options)
    H, (heads, biases, blocks, _) = hidden.shape[-1], sizes
    if heads not in (1, K) or biases not in (0, heads) or blocks % K:
        raise InputError(
            f"{OP}: for targets of {K} heads there must be 1 or {K} weights, no bias or as many, and blocks for {K} "
            f"heads or none; got {heads} weights, {biases} biases and {blocks} blocks in all"
        )
    V = operands[1].shape[0] if operands[1].dim() else 0
    names = ["weight", "bias", "a block's weight", "a block's bias"]
    kinds = [kind for kind, size in enumerate(sizes) for _ in range(size)]
    for kind, t in zip(kinds, operands[1:], strict=True):
        shape = [(V, H), (V,), (H, H), (H,)][kind]
        if t.shape != shape or V == 0:
            raise InputError(f"{OP}: {names[kind]} must be {shape} with all dimensions > 0, got {tuple(t.shape)}")
        if t.dtype != hidden.dtype or t.device != hidden.device:
            raise InputError(
                f"{OP}: {names[kind]} must be {hidden.dtype} on {hidden.device}, as hidden is; "
                f"got {t.dtype} on {t.device}"
            )
    if memory_budget <= 0:
        raise InputError(f"{OP}: memory_budget must be a positive number of bytes, got {memory_budget}")
    return K, hidden.shape[:-1].numel()


def _coefficients(
    weights: torch.Tensor, head_weights: torch.Tensor | Sequence[float] | None, normalizer: torch.Tensor | float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(K, ...) what a row's loss counts in its head's, given what rows weigh, and (K,) what the head's counts in the
    whole."""
    K = weights.shape[0]

    def for_each_head(name: str, x: torch.Tensor | Sequence[float] | float) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            x = x.detach().to(weights.device, weights.dtype)
        elif isinstance(x, Sequence):  # by fills: a copy from the host would wait for the device
            x = torch.stack([weights.new_full((), value) for value in x])
        else:
            x = weights.new_full((), x)
        if x.shape not in ((), (K,)):
            raise InputError(f"{OP}: {name} must be ({K},), got {tuple(x.shape)}")
        return x.expand(K)

    total = weights.flatten(1).sum(1) if normalizer is None else for_each_head("normalizer", normalizer)
    total = total.view(K, *[1] * (weights.dim() - 1))
    head_weights = for_each_head("head_weights", 1.0 if head_weights is None else head_weights)
    return torch.where(total != 0, weights / total, 0.0), head_weights


def _fake(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    coefficient: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    block_weights: list[torch.Tensor],
    block_biases: list[torch.Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
    memory_budget: int,
    num_targets: list[int],
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    operands = [hidden, *weights, *biases, *block_weights, *block_biases]
    return (
        coefficient.new_empty(targets.shape),
        targets.new_empty(targets.shape if return_rank else (0,)),
        [t.new_empty(t.shape if need else (0,)) for t, need in zip(operands, needs, strict=True)],
    )


@opaque_op(_fake)
def _multi_head_linear_cross_entropy(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    coefficient: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    block_weights: list[torch.Tensor],
    block_biases: list[torch.Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    return_rank: bool,
    memory_budget: int,
    num_targets: list[int],
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Each row's loss and rank, and the gradients of sum(coefficient * loss) by the operands; empty if not needed.
    Targets have been checked."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, return_rank)
    (V, H), K, rows = weights[0].shape, targets.shape[0], as_rows(hidden)
    N, L, need_hidden = rows.shape[0], len(block_weights) // K, needs[0]
    flat, coefficients = targets.reshape(-1), coefficient.reshape(-1)  # row k * N + t is token t for head k
    losses = torch.zeros_like(coefficients)
    ranks = flat.new_full((K * N if return_rank else 0,), -1)
    dx_dtype = coefficient.dtype if K > 1 else hidden.dtype
    dx = torch.zeros((N, H) if need_hidden else (0,), dtype=dx_dtype, device=hidden.device)

    counts, chosen = [N] * K, None
    if sum(num_targets) < SKIP_BELOW * K * N:
        valid, counts = flat != ignore_index, num_targets
        right = [found == n for found, n in zip(valid.view(K, N).sum(1), counts, strict=True)]
        torch._assert_async(torch.stack(right).all(), "num_targets is not the number of targets not ignored")
        chosen = valid.argsort(descending=True, stable=True)[: sum(counts)]
    ends = list(running_sum(counts))
    starts = [end - count for end, count in zip(ends, counts, strict=True)]  # head k's rows, among the chosen ones

    parameters, trained = [*weights, *biases, *block_weights, *block_biases], needs[1:]
    of_blocks = len(weights) + len(biases)  # from here on parameters has their K * L weights, then their biases
    sums: dict[int, GradientSum] = {}
    gradients: dict[int, torch.Tensor] = {}

    def add(i: int, g: torch.Tensor, x: torch.Tensor | None, *, first: bool, last: bool) -> None:
        """A chunk of the gradient of parameter i, if that needs one."""
        if trained[i]:
            if first:
                sums[i] = GradientSum(parameters[i], several=not last)
            sums[i].add(g, x)
            if last:
                gradients[i] = sums.pop(i).close()

    bent = [any(trained[of_blocks + i :: K * L]) for i in range(K * L)]  # blocks of which something is trained
    lowest = [0 if need_hidden else next((i for i in range(L) if bent[k * L + i]), L) for k in range(K)]

    groups = [(starts[0], ends[-1])] if len(weights) == 1 else list(zip(starts, ends, strict=True))
    wide = coefficient.dtype.itemsize if need_hidden else 0
    transformed = H * ((2 * L + 3) * hidden.dtype.itemsize + wide)  # bytes for a row, at the most
    columns = -(-V // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if hidden.is_cuda else V  # as in linear_cross_entropy
    for group, (start, end) in enumerate(groups):
        chunk: dict[str, Any] = {"extra": transformed, "to_come": sum(trained[group + 1 : len(weights)])}
        size = chunk_rows(end - start, V, H, hidden, options, memory_budget, accumulates=trained[group], **chunk)
        workspace = hidden.new_empty(size, columns)[:, :V]
        for a in range(start, end, size):
            b = min(a + size, end)
            at = slice(a, b) if chosen is None else chosen[a:b]
            pieces = [(k, max(a, starts[k]), min(b, ends[k])) for k in range(K)]
            pieces = [(k, i, j) for k, i, j in pieces if i < j]
            tokens, outputs, states = [], [], []
            for k, i, j in pieces:
                tokens.append(slice(i - k * N, j - k * N) if chosen is None else chosen[i:j] - k * N)
                chain = slice(k * L, (k + 1) * L)
                y, seen = _transform(rows[tokens[-1]].contiguous(), block_weights[chain], block_biases[chain])
                outputs.append(y)
                states.append(seen)
            y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            del outputs

            logits = workspace[: b - a]
            if biases:
                torch.addmm(biases[group], y, weights[group].t(), out=logits)
            else:
                torch.mm(y, weights[group].t(), out=logits)
            loss, rank = losses.new_empty(b - a), ranks.new_empty(b - a if return_rank else 0)
            loss_in_place(logits, flat[at], loss, rank, coefficients[at] if any(needs) else None, options)
            losses[at] = loss
            if return_rank:
                ranks[at] = rank

            whole = {"first": a == start, "last": b == end}
            add(group, logits, y, **whole)
            if biases:
                add(len(weights) + group, logits, None, **whole)
            del y
            if not any(need_hidden or lowest[k] < L for k, _, _ in pieces):
                continue
            dy_of_all = logits @ weights[group]
            for (k, i, j), token, seen in zip(pieces, tokens, states, strict=True):
                dy, whole = dy_of_all[i - a : j - a], {"first": i == starts[k], "last": j == ends[k]}
                for layer in reversed(range(lowest[k], L)):
                    (x, z), block, goes_on = seen[layer], k * L + layer, need_hidden or layer > lowest[k]
                    dz = torch.empty_like(z) if goes_on else dy
                    torch.ops.aten.silu_backward.grad_input(dy, z, grad_input=dz)
                    for place, given in ((block, x), (K * L + block, None))[: 2 if block_biases else 1]:
                        add(of_blocks + place, dz, given, **whole)
                    if goes_on:
                        dy = torch.addmm(dy, dz, block_weights[block])
                if need_hidden:
                    dx[token] += dy
        logits = workspace = hidden.new_empty(0)  # frees the chunk before the next group's is made
    found = [dx.view(hidden.shape if need_hidden else (0,)).to(hidden.dtype)]
    for i, (p, need) in enumerate(zip(parameters, trained, strict=True)):  # zeros for a head without rows
        found.append(gradients[i] if i in gradients else p.new_zeros(p.shape if need else (0,)))
    return losses.view(targets.shape), ranks.view(targets.shape if return_rank else (0,)), found


def _transform(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """x (M, H) through a chain of ResBlocks, and each block's input and what its SiLU is given."""
    seen = []
    for weight, bias in zip_longest(weights, biases):
        z = linear(x, weight, bias)
        seen.append((x, z))
        x = x + silu(z)
    return x, seen


class _MultiHeadLinearCrossEntropy(torch.autograd.Function):
    """The loss, each head's and the ranks. The gradients' coming and going is `_LinearCrossEntropy`'s."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: torch.Tensor,
        coefficient: torch.Tensor,
        head_weights: torch.Tensor,
        settings: tuple[LossOptions, int, tuple[int, ...]],
        sizes: tuple[int, ...],
        needs: tuple[bool, ...],
        *operands: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        now = needs if operands[0].dtype != torch.float16 else (False,) * len(needs)
        weighted = coefficient * head_weights.view(-1, *[1] * (targets.dim() - 1))
        losses, ranks, gradients = _call(operands, sizes, targets, weighted, settings, now)
        head_losses = (losses * coefficient).flatten(1).sum(1)
        ctx.mark_non_differentiable(head_losses, ranks)
        options, *rest = settings
        ctx.settings, ctx.sizes = (options._replace(return_rank=False), *rest), sizes
        ctx.functional = any(now) and torch.compiler.is_compiling()
        if ctx.functional:
            ctx.save_for_backward(*gradients)
        else:
            ctx.save_for_backward(targets, weighted, *operands)
            ctx.gradients = gradients if any(now) else None
        return (head_losses * head_weights).sum(), head_losses, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[6:]
        if ctx.functional:
            gradients = [g * grad if need else g for g, need in zip(ctx.saved_tensors, needs, strict=True)]
        elif ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients, None
            for g in gradients:
                scale_(g, grad)
        else:
            targets, weighted, *saved = ctx.saved_tensors
            gradients = _call(saved, ctx.sizes, targets, weighted * grad, ctx.settings, needs)[2]
        return *[None] * 6, *(g if need else None for g, need in zip(gradients, needs, strict=True))


def _call(
    operands: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
    targets: torch.Tensor,
    coefficient: torch.Tensor,
    settings: tuple[LossOptions, int, tuple[int, ...]],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The opaque op, whose parameters come in lists of these sizes."""
    (hidden, *rest), (options, memory_budget, num_targets) = operands, settings
    lists = [rest[end - size : end] for size, end in zip(sizes, running_sum(sizes), strict=True)]
    return _multi_head_linear_cross_entropy(
        hidden, targets, coefficient, *lists, *options, memory_budget, list(num_targets), list(needs)
    )
