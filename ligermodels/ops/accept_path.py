"""The end of a step of decoding: which of a tree's candidates to accept, and where each row stands after them. In
plain torch these are some forty tiny operations, each of which takes a GPU longer to begin than to do."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import opaque_op

TILE = 16384  # nodes times places that a program holds; the reference serves larger trees
CHANNELS = 4096  # of the hidden state that a program copies at once


@dataclass(frozen=True)
class Rows:
    """Where each row of a batch stands between two steps. A step changes the tensors in place: addresses stay fixed.

    text: long (B, W), each token at its position; W at least start + max_new_tokens + P, of `Paths`.
    start, count: long (B,), the prompt's length, and how many tokens after it are new.
    lengths: long (B,), tokens in the cache, in slots [0, length), each in the slot of its position.
    root: long (B,), the last new token, which is certain but not in the cache yet.
    hidden: (B, H), the state that chose it.
    done, steps: bool and long (B,), whether it has ended, and the steps it took until then.
    """

    text: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    lengths: torch.Tensor
    root: torch.Tensor
    hidden: torch.Tensor
    done: torch.Tensor
    steps: torch.Tensor


class Paths(NamedTuple):
    """A tree of N nodes, node 0 being the root: what its paths are followed by.

    parent, depth: long (N,), each node's parent (the root's is itself), and its distance from the root.
    route: long (N, P), the nodes from the root down to each node, which is repeated to the end; P > depth.
    """

    parent: torch.Tensor
    depth: torch.Tensor
    route: torch.Tensor


def accept_path(
    rows: Rows,
    tree: Paths,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    states: torch.Tensor,
    eos: torch.Tensor,
    max_new_tokens: int,
    judged: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Accept a path of a tree of N candidates in each row, and move the row on by it and the token chosen after it.

    The path leads to the deepest node that is right with all its ancestors. A node is right if its token is the model's
    own choice after its parent, or if it is `judged` so, and if its position is the row's length plus its depth; the
    root, node 0, always is. Of several deepest nodes it is that of the highest score, added up along the path, then the
    first. A row ends with the first EOS token that it gains, and with its max_new_tokens-th token; rows that are done
    stay as they are, but for what their text holds past their end.

    rows: changed in place, all but `start`; its tensors contiguous.
    tokens, positions, choices: long (B, N), each node's token and position, and the model's choice after it.
    states: (B, N, H), from which it chose.
    eos: long (E,).
    judged: bool (B, N), whether a node's token is right, and float32 (B, N), its score, a number where it is right.

    Returns long (B, P), the accepted path's slots in the cache, node n's being lengths + n; `move_slots` moves them to
    the front of these.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    given = tokens, positions, choices, states
    _check(rows, tree, *given, eos, judged)
    nodes, places = map(power_of_2_above, tree.route.shape)
    if not use_kernels(states, rows.hidden) or nodes * places > TILE:
        return accept_path_reference(rows, tree, *given, eos, max_new_tokens, judged)
    state = rows.text, rows.start, rows.count, rows.lengths, rows.root, rows.hidden, rows.done, rows.steps
    return _accept_path(*given, *tree, eos, *(judged or (None, None)), *state, max_new_tokens)


def _check(
    rows: Rows,
    tree: Paths,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    states: torch.Tensor,
    eos: torch.Tensor,
    judged: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    B, N, P, integer, device = rows.root.numel(), tree.depth.numel(), tree.route.shape[-1], torch.long, rows.root.device
    changed = [
        ("rows.text", rows.text, integer, (B, rows.text.shape[-1])),
        ("rows.start", rows.start, integer, (B,)),
        ("rows.count", rows.count, integer, (B,)),
        ("rows.lengths", rows.lengths, integer, (B,)),
        ("rows.root", rows.root, integer, (B,)),
        ("rows.hidden", rows.hidden, rows.hidden.dtype, (B, rows.hidden.shape[-1])),
        ("rows.done", rows.done, torch.bool, (B,)),
        ("rows.steps", rows.steps, integer, (B,)),
    ]
    others = [
        ("tree.parent", tree.parent, integer, (N,)),
        ("tree.depth", tree.depth, integer, (N,)),
        ("tree.route", tree.route, integer, (N, P)),
        ("tokens", tokens, integer, (B, N)),
        ("positions", positions, integer, (B, N)),
        ("choices", choices, integer, (B, N)),
        ("states", states, states.dtype, (B, N, rows.hidden.shape[-1])),
        ("eos", eos, integer, (eos.numel(),)),
    ]
    if judged is not None:
        others += [("judged[0]", judged[0], torch.bool, (B, N)), ("judged[1]", judged[1], torch.float32, (B, N))]
    for name, x, dtype, shape in changed + others:
        if x.shape != shape or x.dtype != dtype or x.device != device:
            raise InputError(
                f"accept_path: {name} must be {dtype} of shape {shape} on {device}, "
                f"got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    for name, x, *_ in changed:
        if not x.is_contiguous():
            raise InputError(f"accept_path: {name} must be contiguous, it is changed in place: call .contiguous()")


def accept_path_reference(
    rows: Rows,
    tree: Paths,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    states: torch.Tensor,
    eos: torch.Tensor,
    max_new_tokens: int,
    judged: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The specification of `accept_path`, in plain torch; the same arguments."""
    last = _furthest(rows.lengths, tree, tokens, positions, choices, judged)
    each, place = (torch.arange(size, device=last.device) for size in (len(last), tree.route.shape[1]))
    path, level = tree.route[last], tree.depth[last]
    choice, hidden, slots = choices[each, last], states[each, last], rows.lengths[:, None] + path

    new = tokens.gather(1, path.roll(-1, dims=1)).scatter(1, level[:, None], choice[:, None])  # then whatever
    met = (new[..., None] == eos).any(dim=-1)  # `torch.isin` may sort, and then waits for the device
    end = torch.where(met, place, len(place)).amin(dim=1)
    taken = torch.minimum(torch.minimum(level, end) + 1, max_new_tokens - rows.count).masked_fill(rows.done, 0)
    rows.steps.add_(~rows.done)
    # What is written past the tokens taken is overwritten by the next step, or never read.
    rows.text.scatter_(1, (rows.start + rows.count)[:, None] + place, new)
    rows.count.add_(taken)
    rows.done.logical_or_((end < taken) | (rows.count == max_new_tokens))
    rows.lengths.add_((level + 1).masked_fill(rows.done, 0))
    rows.root.copy_(torch.where(rows.done, rows.root, choice))
    rows.hidden.copy_(torch.where(rows.done[:, None], rows.hidden, hidden))
    return slots


def _furthest(
    lengths: torch.Tensor,
    tree: Paths,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    judged: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Long (B,): the deepest node that is right with all its ancestors; of several, that of the highest path score."""
    if len(tree.depth) == 1:
        return torch.zeros_like(lengths)
    right, score = (tokens == choices[:, tree.parent], None) if judged is None else judged
    right = right & (positions == lengths[:, None] + tree.depth)
    inside = (right | (tree.depth == 0))[:, tree.route].all(dim=-1)
    reached = inside * (tree.depth + 1)
    if score is None:
        return reached.argmax(dim=1)
    total = torch.zeros_like(score)
    for place in range(1, tree.route.shape[1]):  # from the root down: in the order in which the kernel adds
        total = total + torch.where(place <= tree.depth, score[:, tree.route[:, place]], 0)
    return total.masked_fill(reached < reached.amax(dim=1, keepdim=True), -math.inf).argmax(dim=1)


@kernel
def _accept_path_kernel(
    tokens, positions, choices, states, parent, depth, route, eos, right, score,
    text, start, count, lengths, root, hidden, done, steps, slots, N, P, H, W, eos_count, max_new_tokens,
    JUDGED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes a row. It reads all that it changes before any of its threads writes."""
    after_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    n, place = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    length, old = tl.load(lengths + row), tl.load(count + row)
    first, was_done, step = tl.load(start + row) + old, tl.load(done + row), tl.load(steps + row)

    above = tl.load(  # the nodes on the way to each node
        route + n[:, None] * P + place[None, :], mask=(n < N)[:, None] & (place < P)[None, :], other=0
    )
    here = row * N + above
    if JUDGED:
        fits = tl.load(right + here) != 0
    else:
        fits = tl.load(tokens + here) == tl.load(choices + row * N + tl.load(parent + above))
    fits = (fits & (tl.load(positions + here) == length + tl.load(depth + above))) | (above == 0)
    inside = (tl.min(fits.to(tl.int32), axis=1) > 0) & (n < N)
    level_of = tl.load(depth + n, mask=n < N, other=0)
    reached = tl.where(inside, level_of, -1)
    best = reached == tl.max(reached, axis=0)
    if JUDGED:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for at in range(1, P):
            node = tl.load(route + n * P + at, mask=n < N, other=0)
            total += tl.where(at <= level_of, tl.load(score + row * N + node), 0.0)
        total = tl.where(best, total, float("-inf"))
        best = best & (total == tl.max(total, axis=0))
    last = tl.min(tl.where(best, n, N - 1), axis=0)

    level, choice = tl.load(depth + last), tl.load(choices + row * N + last)
    path = tl.load(route + last * P + place, mask=place < P, other=0)
    following = tl.load(route + last * P + (place + 1) % P, mask=place < P, other=0)
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
        tl.store(lengths + row, length + level + 1)
        tl.store(root + row, choice)
        for begin in range(0, H, BLOCK):
            channel = begin + tl.arange(0, BLOCK)
            state = tl.load(states + (row * N + last) * H + channel, mask=channel < H)
            tl.store(hidden + row * H + channel, state, mask=channel < H)


def _fake(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    states: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    route: torch.Tensor,
    *others: Any,
) -> torch.Tensor:
    return tokens.new_empty(tokens.shape[0], route.shape[1])


@opaque_op(_fake, mutates=("text", "count", "lengths", "root", "hidden", "done", "steps"))
def _accept_path(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
    states: torch.Tensor,
    parent: torch.Tensor,
    depth: torch.Tensor,
    route: torch.Tensor,
    eos: torch.Tensor,
    right: torch.Tensor | None,
    score: torch.Tensor | None,
    text: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    lengths: torch.Tensor,
    root: torch.Tensor,
    hidden: torch.Tensor,
    done: torch.Tensor,
    steps: torch.Tensor,
    max_new_tokens: int,
) -> torch.Tensor:
    (N, P), (B, H) = route.shape, hidden.shape
    slots = tokens.new_empty(B, P)
    inputs = [x.contiguous() for x in (tokens, positions, choices, states, parent, depth, route, eos)]
    judged = (
        [None, None] if right is None or score is None else [right.contiguous().view(torch.uint8), score.contiguous()]
    )
    if B:
        _accept_path_kernel[(B,)](
            *inputs, *judged, text, start, count, lengths, root, hidden, done.view(torch.uint8), steps, slots,
            N, P, H, text.shape[1], len(eos), max_new_tokens, JUDGED=right is not None,
            BLOCK_N=power_of_2_above(N), BLOCK_P=power_of_2_above(P), BLOCK=min(power_of_2_above(H), CHANNELS),
            num_warps=4,
        )  # fmt: skip
    return slots
