"""The inputs of a forward pass over a tree of candidates."""

import torch
from torch import Tensor

from ligermodels.ops.runtime.checks import check_tensor, check_tensors
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors

NODES = 256  # per program


def tree_inputs(
    best: Tensor,
    root: Tensor,
    cache_seqlens: Tensor,
    depth: Tensor,
    rank: Tensor,
    stops: Tensor,
    moving: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens and positions of the N nodes of a tree, for each of B sequences.

    A node of depth d > 0 and rank r holds the r-th best token of head d - 1; the root, of depth 0, holds the sequence's
    root token. A node's position is cache_seqlens + depth, limited to the last position that the sequence may reach.

    Args:
        best: long (B, D, W), the W best tokens of each of D heads; D is the tree's depth.
        root: long (B,), each sequence's root token.
        cache_seqlens: long (B,), the position of the root token.
        depth: long (N,), or (B, N) where each sequence has a tree of its own, each node's depth, in [0, D].
        rank: long (N,) or (B, N) as depth, each node's rank, in [0, W) below the root.
        stops: long (S,). A sequence shorter than a stop reaches no position at or past the stop.
        moving: a sequence at least this long reaches no position past its root; None for no such limit.

    Returns:
        Tokens and positions, both long (B, N).

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    check_tensors("tree_inputs", best=best, depth=depth)
    reject_dtensors("tree_inputs", best, root)
    B = len(best)
    nodes: tuple[int | str, ...] = ("N",) if depth.dim() == 1 else (B, "N")
    for name, x, shape in (
        ("best", best, (B, "D", "W")),
        ("root", root, (B,)),
        ("cache_seqlens", cache_seqlens, (B,)),
        ("depth", depth, nodes),
        ("rank", rank, depth.shape),
        ("stops", stops, ("S",)),
    ):
        check_tensor("tree_inputs", name, x, shape, best.device, torch.long)
    if not use_kernels(best):
        return tree_inputs_reference(best, root, cache_seqlens, depth, rank, stops, moving)
    return _tree_inputs(best, root, cache_seqlens, depth, rank, stops, moving)


def tree_inputs_reference(
    best: Tensor, root: Tensor, cache_seqlens: Tensor, depth: Tensor, rank: Tensor, stops: Tensor,
    moving: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification of `tree_inputs`, in plain torch, with the same arguments: best, root, cache_seqlens, depth,
    rank, stops and moving."""
    cache_seqlens = cache_seqlens[:, None]
    below = torch.cat([root[:, None], best.flatten(1)], dim=1)
    place = torch.where(depth > 0, (depth - 1) * best.shape[2] + rank + 1, 0)
    tokens = below.gather(1, place.expand(len(best), -1))
    free = torch.full_like(cache_seqlens, torch.iinfo(torch.long).max)
    limit = torch.cat([torch.where(cache_seqlens < stops, stops - 1, free), free], dim=1).amin(dim=1, keepdim=True)
    if moving is not None:
        limit = torch.where(cache_seqlens < moving, limit, cache_seqlens)
    return tokens, torch.minimum(cache_seqlens + depth, limit)


@kernel
def _tree_inputs_kernel(
    best, root, cache_seqlens, depth, rank, tree_batch, stops, tokens, positions, N, width, candidates, stop_count,
    moving, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes some nodes of a sequence."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < N
    length = tl.load(cache_seqlens + row)
    d = tl.load(depth + row * tree_batch + n, mask=there, other=0)
    r = tl.load(rank + row * tree_batch + n, mask=there, other=0)
    position = length + d
    for place in range(0, stop_count):
        stop = tl.load(stops + place)
        position = tl.where(length < stop, tl.minimum(position, stop - 1), position)
    if moving is not None:
        position = tl.where(length < moving, position, length)
    below = tl.load(best + row * candidates + (d - 1) * width + r, mask=there & (d > 0), other=0)
    tl.store(tokens + row * N + n, tl.where(d > 0, below, tl.load(root + row)), mask=there)
    tl.store(positions + row * N + n, position, mask=there)


@custom_op()
def _tree_inputs(
    best: Tensor, root: Tensor, cache_seqlens: Tensor, depth: Tensor, rank: Tensor, stops: Tensor, moving: int | None
) -> tuple[Tensor, Tensor]:
    (B, D, W), N = best.shape, depth.shape[-1]
    tokens, positions = best.new_empty(B, N), best.new_empty(B, N)
    if is_fake(tokens):
        return tokens, positions
    inputs = [x.contiguous() for x in (best, root, cache_seqlens, depth, rank)]
    tree_batch = N if depth.dim() == 2 else 0
    block = min(power_of_2_above(N), NODES)
    if B * N:
        _tree_inputs_kernel[(B, -(-N // block))](
            *inputs,
            tree_batch,
            stops.contiguous(),
            tokens,
            positions,
            N,
            W,
            D * W,
            len(stops),
            moving,
            BLOCK=block,
            num_warps=4,
        )
    return tokens, positions
