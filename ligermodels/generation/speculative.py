"""Medusa decoding: a tree of the heads' candidates is checked in one forward pass, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.acceptance import Typical, exact, furthest
from ligermodels.generation.cache import KVCache
from ligermodels.generation.generate import (
    Decoder,
    TokenIds,
    aligned,
    as_eos_ids,
    check_max_new_tokens,
    evaluating,
    is_eos,
    prefill,
    prepare_prompts,
    rope_limits,
)
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.sampling import greedy
from ligermodels.generation.tree import Tree

Propose = Callable[[Tensor], Tensor]
"""Hidden states (B, H) -> logits (B, K, V) of the K heads."""


@dataclass(frozen=True)
class SpeculativeOutput:
    """What `medusa_generate` returns.

    sequences: long (B, T + n), as `generate` returns them.
    steps: steps that the rows took, added up: a forward pass counts once for each row that was not done.
    new_tokens: tokens generated over all rows, EOS included, padding not.
    passes: forward passes after the prefill, each for all rows.
    tokens_per_step: tokens that a row gained in a step: (new_tokens - B) / steps, as the prefill gives the first token
        of each. Plain decoding has exactly 1; nan when there was no step.
    """

    sequences: Tensor
    steps: int
    new_tokens: int
    passes: int

    @property
    def tokens_per_step(self) -> float:
        return (self.new_tokens - len(self.sequences)) / self.steps if self.steps else float("nan")


@torch.no_grad()
def medusa_generate(
    model: Decoder,
    propose: Propose,
    input_ids: TokenIds,
    *,
    tree: Tree,
    max_new_tokens: int,
    temperature: float = 0.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    eos_token_ids: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    cuda_graph: bool = True,
) -> SpeculativeOutput:
    """`generate` in fewer forward passes.

    A step runs the model over all nodes of the tree at once, each seeing the text so far and its own ancestors, accepts
    a path of them, and takes the model's likeliest token after its last node as the next root. Rows of a batch accept
    paths of different lengths in the same step.

    With temperature 0 it is lossless: the path is the one on which every token is the model's own greedy choice, so the
    tokens are exactly those of greedy `generate`, whatever the heads propose, up to the rounding of forward passes of
    different shapes, which may decide between two logits that are equal but for it.

    With a temperature above 0 acceptance is typical (see `acceptance.Typical`): a candidate needs a probability above
    min(epsilon, delta * exp(-entropy)) in the model's softmax at that temperature; the longest such path is taken, of
    several the likeliest. This draws no random numbers, and is *not* a sample from the model's distribution: the first
    token of every step is the greedy one, the others are the heads' candidates that are likely enough, so the text is
    fixed by the prompt, the heads and the tree. A higher temperature flattens the distribution, which lowers the
    threshold and lets more tokens other than the greedy one through. For samples use `generate`.

    Args:
        propose: head k speaks of the token k + 2 places after the one whose hidden state it is given.
        tree: the candidates to try; at most K deep.
        temperature, epsilon, delta: how to accept, as above.
        The others are those of `generate`.

    Raises:
        InputError: as `generate`; the tree needs more heads or candidates than propose gives; temperature is below 0;
            epsilon or delta is not above it.
    """
    eos_ids = as_eos_ids(eos_token_ids)
    pad_id = pad_token_id if pad_token_id is not None else (eos_ids[0] if eos_ids else None)
    prompts = prepare_prompts(input_ids, attention_mask, pad_id, model.config.vocab_size)
    check_max_new_tokens(max_new_tokens)
    typical = Typical(temperature, epsilon, delta) if temperature else None
    batch, length = prompts.ids.shape
    with evaluating(model):
        cache = model.new_cache(batch, length + max_new_tokens + len(tree))
        ids, real = prompts.ids.to(cache.device), prompts.mask.to(cache.device)
        step = TreeStep(model, propose, cache, tree, max_new_tokens, eos_ids, typical)
        rows = step.start(ids, real)
        take = Graphed(partial(step, rows), cache.device, cuda_graph)
        passes = 0
        renews = bool(step.limits.switches)
        finished = Finished(cache.device, not renews)
        while (ago := finished(rows.done.all())) is None:
            if renews and bool(step.is_stale(rows).any()):
                step.renew(rows, int(rows.lengths.max()))
            else:
                take()
            passes += 1
        passes -= ago
    counts = rows.count.tolist()
    place = torch.arange(max(counts), device=cache.device)
    new = rows.text.gather(1, rows.start[:, None] + place)
    # Rows differ in length only when one met EOS, and then pad_id is known.
    new = new.masked_fill(place >= rows.count[:, None], pad_id or 0)
    return SpeculativeOutput(torch.cat([ids, new], dim=1), int(rows.steps.sum()), sum(counts), passes)


@dataclass(frozen=True)
class Rows:
    """Where each row of a batch stands between two steps. A step changes the tensors in place: addresses stay fixed.

    text: long (B, the longest prompt + max_new_tokens + the tree's depth + 1), each token at its position.
    start, count: long (B,), the prompt's length, and how many tokens after it are new.
    lengths: long (B,), tokens in the cache, in slots [0, length), each in the slot of its position.
    root: long (B,), the last new token, which is certain but not in the cache yet.
    hidden: (B, H), the state that chose it.
    done, steps: bool and long (B,), whether it has ended, and the steps it took until then.
    """

    text: Tensor
    start: Tensor
    count: Tensor
    lengths: Tensor
    root: Tensor
    hidden: Tensor
    done: Tensor
    steps: Tensor


class TreeStep:
    """A step of tree decoding for all rows of a batch: a function of tensors of fixed shapes, without a wait for the
    device, so that a CUDA graph can hold it. Rows that are done stay as they are.

    Where rotary frequencies change with the length of a row (`layers.rope.Limits`), no path goes past the change; for
    the token after it, `is_stale` rows need `renew` in place of a step, unless frequencies change with each token: then
    a step gives the row one, as plain decoding does.

    Args:
        cache: of B rows, with room for the longest prompt, max_new_tokens and the tree.
        typical: how to accept; None for greedy.
        The others are those of `medusa_generate`.
    """

    def __init__(
        self,
        model: Decoder,
        propose: Propose,
        cache: KVCache,
        tree: Tree,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        typical: Typical | None = None,
    ) -> None:
        self.model, self.propose, self.cache, self.tree, self.typical = model, propose, cache, tree, typical
        self.max_new_tokens = max_new_tokens
        self.eos = torch.tensor(list(eos_ids), dtype=torch.long, device=cache.device)
        self.mask, self.depth, self.parent, self.route = (
            tensor.to(cache.device) for tensor in (tree.mask, tree.depth, tree.parent, tree.route)
        )
        self.head, self.rank = tree.head[1:].to(cache.device), tree.rank[1:].to(cache.device)
        self.place = torch.arange(tree.max_depth + 1, device=cache.device)
        self.limits = rope_limits(model)

    def start(self, ids: Tensor, real: Tensor) -> Rows:
        """Run the prompts: ids long (B, T), whose tokens, not the padding on their left, are `real`, bool (B, T)."""
        ids, start = aligned(ids, real)
        hidden = prefill(self.model, ids, start, self.cache)
        root = greedy(self.model.head(hidden))
        text = F.pad(ids, (0, self.max_new_tokens + len(self.place))).scatter(1, start[:, None], root[:, None])
        done = is_eos(root, self.eos) | (self.max_new_tokens == 1)
        one = torch.ones_like(root)
        return Rows(text, start, one, start.clone(), root, hidden, done, torch.zeros_like(root))

    def is_stale(self, rows: Rows) -> Tensor:
        """Bool (B,): rows whose keys in the cache have to be computed anew before their root can be run."""
        stale = torch.zeros_like(rows.done)
        for switch in self.limits.switches:
            stale |= rows.lengths == switch
        return stale & ~rows.done

    def renew(self, rows: Rows, longest: int) -> None:
        """Run all rows from their start, of which none has more than `longest` in the cache: each gains one token."""
        hidden = prefill(self.model, rows.text[:, : longest + 1], rows.lengths + 1, self.cache)
        choice = greedy(self.model.head(hidden))
        self._advance(rows, choice[:, None].expand(-1, len(self.place)), torch.zeros_like(choice), choice, hidden)

    def __call__(self, rows: Rows) -> None:
        """Take a step."""
        tokens = torch.cat([rows.root[:, None], self._candidates(rows.hidden)], dim=1)  # (B, N)
        limit = self._limit(rows.lengths)[:, None]
        positions = rows.lengths[:, None] + self.depth
        with self.cache.rows(rows.lengths):
            states = self.model.hidden_states(  # (B, N, H)
                tokens, position_ids=torch.minimum(positions, limit), cache=self.cache, tree_mask=self.mask
            )
        logits = self.model.head(states)
        choices = greedy(logits)
        if self.typical is None:
            right, score = exact(choices, tokens, self.parent), None
        else:
            right, score = self.typical.judge(logits, tokens, self.parent)
        last = furthest(right & (positions <= limit), score, self.mask, self.depth)  # (B,)
        path = self.route[last]  # (B, P), P being the tree's depth plus 1
        self.cache.compact(rows.lengths, path)
        each = torch.arange(len(last), device=last.device)
        self._advance(rows, tokens.gather(1, path), self.depth[last], choices[each, last], states[each, last])

    def _limit(self, lengths: Tensor) -> Tensor:
        """Long (B,): the last position that a path may reach."""
        limit, (switches, moving) = lengths + self.tree.max_depth, self.limits
        for length in (*switches, *(() if moving is None else (moving,))):
            limit = torch.where(lengths < length, limit.clamp(max=length - 1), limit)
        return limit if moving is None else torch.where(lengths < moving, limit, lengths)

    def _candidates(self, hidden: Tensor) -> Tensor:
        """Tokens (B, N - 1) of the nodes below the root: the heads' best."""
        logits, tree = self.propose(hidden), self.tree
        if logits.ndim != 3 or len(logits) != len(hidden):
            raise InputError(
                f"propose must give logits of shape ({len(hidden)}, heads, vocabulary), got {tuple(logits.shape)}"
            )
        _, heads, vocabulary = logits.shape
        if heads < tree.max_depth or vocabulary < tree.width:
            needs = f"the tree needs {tree.max_depth} heads and {tree.width} candidates of each"
            raise InputError(f"{needs}, propose gives {heads} heads over a vocabulary of {vocabulary}")
        best = ops.largest(logits[:, : tree.max_depth], tree.width)
        return best[:, self.head, self.rank]

    def _advance(self, rows: Rows, path: Tensor, depth: Tensor, choice: Tensor, hidden: Tensor) -> None:
        """Move each row on by its root, `depth` (B,) tokens of `path` (B, P) after it, and the model's `choice` (B,),
        which `hidden` (B, H) led to."""
        new = path.roll(-1, dims=1).scatter(1, depth[:, None], choice[:, None])  # what follows does not count
        end = torch.where(is_eos(new, self.eos), self.place, len(self.place)).amin(dim=1)
        taken = torch.minimum(torch.minimum(depth, end) + 1, self.max_new_tokens - rows.count)
        taken = taken.masked_fill(rows.done, 0)
        rows.steps.add_(~rows.done)
        # What is written past the tokens taken is overwritten by the next step, or never read.
        rows.text.scatter_(1, (rows.start + rows.count)[:, None] + self.place, new)
        rows.count.add_(taken)
        rows.done.logical_or_((end < taken) | (rows.count == self.max_new_tokens))
        rows.lengths.add_((depth + 1).masked_fill(rows.done, 0))
        rows.root.copy_(torch.where(rows.done, rows.root, choice))
        rows.hidden.copy_(torch.where(rows.done[:, None], rows.hidden, hidden))
