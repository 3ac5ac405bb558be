"""The end of a speculative decoding step: accept a path of the candidate tree and advance the sequences by it.

Plain torch needs some forty tiny operations for it, and launching them takes longer than their work.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import Signature, check_tensor
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import contiguous

_NODES = Signature(
    tokens="B N int64", positions="B N int64", choices="B N int64", states="B N H", eos="E int64",
    accept_mask="B N bool ?", scores="B N float32 ?",
)  # fmt: skip
TILE = 16384  # nodes times path positions that a program holds; the reference serves larger trees
CHANNELS = 4096  # channels of the hidden state that a program copies at once


@dataclass(frozen=True)
class Sequences:
    """The state of a batch of B sequences between two decoding steps. Steps change the tensors in place, so that their
    addresses stay fixed.

    text: long (B, W), token ids by position; W is at least start + max_new_tokens + P, with P as in `Paths`.
    start, count: long (B,), the prompt's length and the number of new tokens after it.
    cache_seqlens: long (B,), the number of tokens in the cache. The token at position p is in slot p.
    root: long (B,), the last new token. It is accepted, but not in the cache yet.
    hidden: (B, H), the hidden state that gave the root's logits.
    done, steps: bool and long (B,), whether the sequence has ended, and the number of steps it took.

    Raises InputError unless they are of these shapes and dtypes, contiguous, and on one device: once, not at each step.
    """

    text: Tensor
    start: Tensor
    count: Tensor
    cache_seqlens: Tensor
    root: Tensor
    hidden: Tensor
    done: Tensor
    steps: Tensor

    def __post_init__(self) -> None:
        B, device = self.root.numel(), self.root.device
        shapes: dict[str, tuple[int | str, ...]] = {"text": (B, "W"), "hidden": (B, "H")}
        dtypes = {"hidden": self.hidden.dtype, "done": torch.bool}
        for name, x in vars(self).items():
            check_tensor("Sequences", name, x, shapes.get(name, (B,)), device, dtypes.get(name, torch.long))
            if not x.is_contiguous():
                raise InputError(f"Sequences: {name} must be contiguous, it is changed in place: call .contiguous()")


@dataclass(frozen=True)
class Paths:
    """The paths of a tree of N nodes; node 0 is the root. Where each of B sequences has a tree of its own, all tensors
    begin with a dimension B.

    parent, depth: long (N,), each node's parent (the root's is the root), and its distance from the root.
    retrieve_indices: long (N, P), the nodes from the root to each node, the last one repeated to fill; P > depth.

    Raises InputError unless they are of these shapes and dtypes, and on one device: once, not at each step.
    """

    parent: Tensor
    depth: Tensor
    retrieve_indices: Tensor

    def __post_init__(self) -> None:
        nodes, device = self.depth.shape, self.depth.device
        if len(nodes) not in (1, 2):
            raise InputError(f"Paths: depth must have the shape (N,) or (B, N), got {tuple(nodes)}")
        for name, x in vars(self).items():
            check_tensor("Paths", name, x, (*nodes, "P") if name == "retrieve_indices" else nodes, device, torch.long)


def accept_path(
    sequences: Sequences,
    tree: Paths,
    tokens: Tensor,
    positions: Tensor,
    choices: Tensor,
    states: Tensor,
    eos: Tensor,
    max_new_tokens: int,
    accept_mask: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Accepts a path of a tree of N candidates for each sequence, and advances the sequence by the path's tokens and by
    the token that the model chose after them.

    The path leads to the deepest node that is accepted together with all its ancestors. The root, node 0, is always
    accepted. Another node is accepted if its token equals the model's choice after its parent (or if accept_mask is
    True), and if its position is the sequence's cache length plus its depth. Ties are broken by the greatest sum of
    scores along the path, then by the lowest index. A sequence ends with the first EOS token that it gains, or with its
    max_new_tokens-th token. Sequences that are done do not change, except for text past their end.

    Args:
        sequences: B sequences, updated in place, all tensors but `start`.
        tree: the paths of the tree.
        tokens: long (B, N), each node's token.
        positions: long (B, N), each node's position.
        choices: long (B, N), the model's choice after each node.
        states: (B, N, H), floating, the hidden states that gave these choices.
        eos: long (E,), token ids that end a sequence.
        max_new_tokens: new tokens after which a sequence ends.
        accept_mask: bool (B, N), True for nodes with an acceptable token; None for the greedy rule.
        scores: float32 (B, N), the nodes' scores, not NaN where accept_mask is True; given if accept_mask is.

    Returns:
        long (B, P), the cache slots of the accepted path, for `compact_kv_cache`; node n is in slot cache_seqlens + n.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or only one of accept_mask and scores is given.
    """
    inputs = tokens, positions, choices, states
    _check(sequences, tree, *inputs, eos, accept_mask, scores)
    if not use_kernels(states, sequences.hidden) or _tile(tree) > TILE:
        return accept_path_reference(sequences, tree, *inputs, eos, max_new_tokens, accept_mask, scores)
    paths, state = vars(tree).values(), vars(sequences).values()
    return _accept_path(*inputs, *paths, eos, accept_mask, scores, *state, max_new_tokens)


def _tile(tree: Paths) -> int:
    """Nodes times path positions that a program holds."""
    nodes, length = map(power_of_2_above, tree.retrieve_indices.shape[-2:])
    return nodes * length


def _check(
    sequences: Sequences, tree: Paths, tokens: Tensor, positions: Tensor, choices: Tensor, states: Tensor,
    eos: Tensor, accept_mask: Tensor | None, scores: Tensor | None,
) -> None:  # fmt: skip
    op, device = "accept_path", sequences.root.device
    B, N, H = sequences.root.numel(), tree.depth.shape[-1], sequences.hidden.shape[-1]
    reject_dtensors(op, sequences.hidden)
    if tree.depth.device != device:
        raise InputError(f"{op}: tree must be on {device}, the device of the sequences; it is on {tree.depth.device}")
    if (accept_mask is None) != (scores is None):
        raise InputError(f"{op}: accept_mask and scores must be given together, or neither")
    tensors = tokens, positions, choices, states, eos, accept_mask, scores
    _NODES.check(op, *tensors, B=B, N=N, H=H, device=device)
    if tree.depth.dim() == 2 and len(tree.depth) != B:
        raise InputError(f"{op}: tree has paths of {len(tree.depth)} sequences, there are {B}")


def accept_path_reference(
    sequences: Sequences, tree: Paths, tokens: Tensor, positions: Tensor, choices: Tensor, states: Tensor,
    eos: Tensor, max_new_tokens: int, accept_mask: Tensor | None = None, scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `accept_path`, in plain torch, with the same arguments: sequences, tree, tokens, positions,
    choices, states, eos, max_new_tokens, accept_mask and scores."""
    if tree.depth.shape[-1] == 1 and sequences.root.device.type == "cpu":
        return _accept_root(sequences, choices[:, 0], states[:, 0], eos, max_new_tokens)
    batch = len(sequences.root)
    tree = Paths(*(x.expand(batch, *x.shape[tree.depth.dim() - 1 :]) for x in vars(tree).values()))
    last = _furthest(sequences.cache_seqlens, tree, tokens, positions, choices, accept_mask, scores)
    row, offset = (torch.arange(size, device=last.device) for size in (batch, tree.retrieve_indices.shape[2]))
    path, level = tree.retrieve_indices[row, last], tree.depth[row, last]
    choice, hidden, slots = choices[row, last], states[row, last], sequences.cache_seqlens[:, None] + path

    new = tokens.gather(1, path.roll(-1, dims=1)).scatter(1, level[:, None], choice[:, None])  # then padding
    met = (new[..., None] == eos).any(dim=-1)  # torch.isin may sort, and sorting waits for the device
    end = torch.where(met, offset, len(offset)).amin(dim=1)
    taken = torch.minimum(torch.minimum(level, end) + 1, max_new_tokens - sequences.count)
    taken = taken.masked_fill(sequences.done, 0)
    sequences.steps.add_(~sequences.done)
    # Tokens written past the accepted ones are overwritten by the next step, or never read.
    sequences.text.scatter_(1, (sequences.start + sequences.count)[:, None] + offset, new)
    sequences.count.add_(taken)
    sequences.done.logical_or_((end < taken) | (sequences.count == max_new_tokens))
    sequences.cache_seqlens.add_((level + 1).masked_fill(sequences.done, 0))
    sequences.root.copy_(torch.where(sequences.done, sequences.root, choice))
    sequences.hidden.copy_(torch.where(sequences.done[:, None], sequences.hidden, hidden))
    return slots


def _accept_root(sequences: Sequences, choice: Tensor, hidden: Tensor, eos: Tensor, max_new_tokens: int) -> Tensor:
    """`accept_path` for a tree of the root alone, a step of plain decoding. It takes a third of the operations; on a
    CPU their overhead is larger than their work."""
    slots = sequences.cache_seqlens[:, None].clone()
    going = ~sequences.done
    sequences.steps.add_(going)
    sequences.text.scatter_(1, (sequences.start + sequences.count)[:, None], choice[:, None])
    sequences.count.add_(going)
    sequences.done.logical_or_(sequences.count == max_new_tokens)
    if len(eos):
        sequences.done.logical_or_((choice[:, None] == eos).any(dim=-1) & going)
    going = ~sequences.done
    sequences.cache_seqlens.add_(going)
    torch.where(going, choice, sequences.root, out=sequences.root)
    sequences.hidden.copy_(torch.where(going[:, None], hidden, sequences.hidden))
    return slots


def _furthest(
    cache_seqlens: Tensor, tree: Paths, tokens: Tensor, positions: Tensor, choices: Tensor,
    accept_mask: Tensor | None, scores: Tensor | None,
) -> Tensor:  # fmt: skip
    """Long (B,): the deepest node that is accepted with all its ancestors; among several, the highest path score
    wins. The paths of `tree` begin with a dimension B."""
    if tree.depth.shape[1] == 1:
        return torch.zeros_like(cache_seqlens)
    routes = tree.retrieve_indices
    right = tokens == choices.gather(1, tree.parent) if accept_mask is None else accept_mask
    right = right & (positions == cache_seqlens[:, None] + tree.depth)
    inside = (right | (tree.depth == 0)).gather(1, routes.flatten(1)).view(routes.shape).all(dim=-1)
    reached = inside * (tree.depth + 1)
    if scores is None:
        return reached.argmax(dim=1)
    total = torch.zeros_like(scores)
    for level in range(1, routes.shape[2]):  # from the root down, the order in which the kernel adds
        total = total + torch.where(level <= tree.depth, scores.gather(1, routes[:, :, level]), 0)
    deepest = reached == reached.amax(dim=1, keepdim=True)
    total = total.masked_fill(~deepest, -math.inf)  # a score may be -inf, too
    return (deepest & (total == total.amax(dim=1, keepdim=True))).int().argmax(dim=1)


@kernel
def _accept_path_kernel(
    tokens, positions, choices, states, parent, depth, retrieve_indices, tree_batch, eos, accept_mask, scores,
    text, start, count, cache_seqlens, root, hidden, done, steps, slots, N, P, H, W, eos_count, max_new_tokens,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes a sequence. It reads all values that it changes before any of its threads writes."""
    row = tl.program_id(0).to(tl.int64)
    n, place = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    length, old = tl.load(cache_seqlens + row), tl.load(count + row)
    first, was_done, step = tl.load(start + row) + old, tl.load(done + row), tl.load(steps + row)
    parent += row * tree_batch
    depth += row * tree_batch
    retrieve_indices += row * tree_batch * P

    above = tl.load(  # the nodes on the way to each node
        retrieve_indices + n[:, None] * P + place[None, :], mask=(n < N)[:, None] & (place < P)[None, :], other=0
    )
    here = row * N + above
    if MASKED:
        fits = tl.load(accept_mask + here) != 0
    else:
        fits = tl.load(tokens + here) == tl.load(choices + row * N + tl.load(parent + above))
    fits = (fits & (tl.load(positions + here) == length + tl.load(depth + above))) | (above == 0)
    inside = (tl.min(fits.to(tl.int32), axis=1) > 0) & (n < N)
    level_of = tl.load(depth + n, mask=n < N, other=0)
    reached = tl.where(inside, level_of, -1)
    best = reached == tl.max(reached, axis=0)
    if MASKED:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for at in range(1, P):
            node = tl.load(retrieve_indices + n * P + at, mask=n < N, other=0)
            total += tl.where(at <= level_of, tl.load(scores + row * N + node), 0.0)
        total = tl.where(best, total, float("-inf"))
        best = best & (total == tl.max(total, axis=0))
    last = tl.min(tl.where(best, n, N - 1), axis=0)

    level, choice = tl.load(depth + last), tl.load(choices + row * N + last)
    path = tl.load(retrieve_indices + last * P + place, mask=place < P, other=0)
    following = tl.load(retrieve_indices + last * P + (place + 1) % P, mask=place < P, other=0)
    new = tl.where(place == level, choice, tl.load(tokens + row * N + following))
    met = place >= P
    for at in range(0, eos_count):
        met = met | (new == tl.load(eos + at))
    end = tl.min(tl.where(met, place, P), axis=0)
    taken = tl.minimum(tl.minimum(level, end) + 1, max_new_tokens - old)
    taken = tl.where(was_done != 0, 0, taken)
    now_done = (was_done != 0) | (end < taken) | (old + taken == max_new_tokens)

    tl.debug_barrier()
    tl.store(slots + row * P + place, length + path, mask=place < P)
    tl.store(text + row * W + first + place, new, mask=(place < P) & (first + place < W))
    tl.store(count + row, old + taken)
    tl.store(done + row, now_done.to(tl.uint8))
    tl.store(steps + row, tl.where(was_done != 0, step, step + 1))
    if now_done == 0:
        tl.store(cache_seqlens + row, length + level + 1)
        tl.store(root + row, choice)
        for begin in range(0, H, BLOCK):
            channel = begin + tl.arange(0, BLOCK)
            state = tl.load(states + (row * N + last) * H + channel, mask=channel < H)
            tl.store(hidden + row * H + channel, state, mask=channel < H)


@custom_op(mutates_args=("text", "count", "cache_seqlens", "root", "hidden", "done", "steps"))
def _accept_path(
    tokens: Tensor, positions: Tensor, choices: Tensor, states: Tensor, parent: Tensor, depth: Tensor,
    retrieve_indices: Tensor, eos: Tensor, accept_mask: Tensor | None, scores: Tensor | None, text: Tensor,
    start: Tensor, count: Tensor, cache_seqlens: Tensor, root: Tensor, hidden: Tensor, done: Tensor, steps: Tensor,
    max_new_tokens: int,
) -> Tensor:  # fmt: skip
    (*_, N, P), (B, H) = retrieve_indices.shape, hidden.shape
    slots = tokens.new_empty(B, P)
    if is_fake(slots):
        return slots
    inputs = [x.contiguous() for x in (tokens, positions, choices, states, parent, depth, retrieve_indices)]
    mask = None if accept_mask is None else accept_mask.contiguous().view(torch.uint8)
    if B:
        _accept_path_kernel[(B,)](
            *inputs, N if depth.dim() == 2 else 0, eos.contiguous(), mask, contiguous(scores),
            text, start, count, cache_seqlens, root, hidden, done.view(torch.uint8), steps, slots,
            N, P, H, text.shape[1], len(eos), max_new_tokens, MASKED=mask is not None,
            BLOCK_N=power_of_2_above(N), BLOCK_P=power_of_2_above(P), BLOCK=min(power_of_2_above(H), CHANNELS),
            num_warps=4,
        )  # fmt: skip
    return slots
