"""Speculative decoding: a tree of candidates is checked in one forward pass, for all rows of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.generation.generate import as_eos_ids, as_pad_id, evaluating, resolve_max_new_tokens
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.prompts import TokenIds, prepare_prompts
from ligermodels.generation.sampling import check_values
from ligermodels.generation.state import DecodingState
from ligermodels.generation.step import DecodingModel, Step, new_tokens, prefill
from ligermodels.layers import TreeTokens
from ligermodels.layers.sharding import end_of_decoding, is_sharded
from ligermodels.speculative.acceptance import Typical
from ligermodels.speculative.drafting import Drafter, HeadsDrafter, Propose
from ligermodels.speculative.tree import Tree


@dataclass(frozen=True)
class SpeculativeOutput:
    """What `speculative_generate` returns.

    sequences: long (B, T + n), as `generate` returns them.
    steps: steps that the rows took, added up: a forward pass counts once for each row that was not done.
    new_tokens: tokens generated over all sequences, EOS included, padding not.
    passes: forward passes after the prefill, each for all sequences.
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
def speculative_generate(
    model: DecodingModel,
    drafter: Drafter,
    input_ids: TokenIds,
    *,
    tree: Tree,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    temperature: float = 0.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    cuda_graph: bool = True,
    on_tokens: Callable[[list[list[int]]], object] | None = None,
) -> SpeculativeOutput:
    """`generate` in fewer forward passes.

    A step runs the model over all nodes of the tree at once, each seeing the text so far and its own ancestors, accepts
    a path of them, and takes the model's likeliest token after its last node as the next root. Rows of a batch accept
    paths of different lengths in the same step.

    With temperature 0 it is lossless: the path is the one on which every token is the model's own greedy choice, so the
    tokens are exactly those of greedy `generate`, whatever the candidates, up to the rounding of forward passes of
    different shapes, which may decide between two logits that are equal but for it.

    With a temperature above 0 acceptance is typical (see `acceptance.Typical`): a candidate needs a probability above
    min(epsilon, delta * exp(-entropy)) in the model's softmax at that temperature; the longest such path is taken, of
    several the likeliest. This draws no random numbers, and is *not* a sample from the model's distribution: the first
    token of every step is the greedy one, the others are candidates that are likely enough, so the text is fixed by the
    prompt, the drafter and the tree. A higher temperature flattens the distribution, which lowers the
    threshold and lets more tokens other than the greedy one through. For samples use `generate`.

    Args:
        drafter: proposes the tokens of the tree.
        tree: the candidates to try.
        temperature, epsilon, delta: how to accept, as above.
        on_tokens: called after the prefill and after each step with the tokens that each row has gained, B lists of
            any length.
        The others are those of `generate`.

    Raises:
        InputError: as `generate`; the tree needs more candidates than the drafter gives; temperature is below 0;
            epsilon or delta is not above it.
    """
    eos_ids = as_eos_ids(eos_token_id)
    pad_id = as_pad_id(pad_token_id, eos_ids)
    prompts = prepare_prompts(input_ids, attention_mask, pad_id, model.config.vocab_size)
    check_values(temperature=temperature, epsilon=epsilon, delta=delta, cuda_graph=cuda_graph, on_tokens=on_tokens)
    typical = Typical(float(temperature), epsilon, delta) if temperature else None
    batch, length = prompts.ids.shape
    max_new_tokens = resolve_max_new_tokens(max_new_tokens, max_length, length)
    with evaluating(model):
        state = model.new_state(batch, length + max_new_tokens + len(tree))
        ids, real = prompts.to(state.device)
        step = TreeStep(model, drafter, state, tree, max_new_tokens, eos_ids, typical)
        sequences = step.start(ids, real)
        cuda_graph, finish = cuda_graph and not is_sharded(model), end_of_decoding(model)
        take = Graphed(partial(step, sequences), state.device, cuda_graph)
        passes = 0
        switches = bool(step.thresholds.switches)
        finished, gained = Finished(state.device, not (switches or on_tokens)), _Gained(sequences)
        while True:
            if on_tokens is not None:
                on_tokens(gained())
            if (ago := finished(finish(sequences.done))) is not None:
                break
            if switches and bool(step.needs_prefill(sequences).any()):
                step.prefill_again(sequences, int(sequences.cache_seqlens.max()))
            else:
                take()
            passes += 1
        passes -= ago
    tokens = torch.cat([ids, new_tokens(sequences.text, sequences.start, sequences.count, pad_id)], dim=1)
    return SpeculativeOutput(tokens, int(sequences.steps.sum()), int(sequences.count.sum()), passes)


class _Gained:
    """A function that gives the new tokens of each row since the call before, B lists. It waits for the device."""

    def __init__(self, sequences: ops.Sequences) -> None:
        self._sequences, self._seen = sequences, [0] * len(sequences.text)

    def __call__(self) -> list[list[int]]:
        starts, counts = self._sequences.start.tolist(), self._sequences.count.tolist()
        before, self._seen = self._seen, counts
        rows = zip(self._sequences.text, starts, before, counts, strict=True)
        return [text[start + old : start + new].tolist() for text, start, old, new in rows]


def medusa_generate(model: DecodingModel, propose: Propose, input_ids: TokenIds, **options: Any) -> SpeculativeOutput:
    """`speculative_generate` with heads that all read the last hidden state: head k of `propose` speaks of the token
    k + 2 places after the one whose state it is given. The tree is at most K deep."""
    return speculative_generate(model, HeadsDrafter(propose), input_ids, **options)


class TreeStep(Step):
    """A step of tree decoding.

    Where rotary frequencies change with the length of a sequence (`layers.rope.ContextThresholds`), no path goes past
    the change; for the token after it, sequences that `needs_prefill` names take `prefill_again` in place of a step,
    unless frequencies change with each token: then a step adds one, as plain decoding does.

    Args:
        model: runs on the device of the state, which is empty, and long enough for the prompts, max_new_tokens new
            tokens and the tree.
        drafter: proposes the tokens of the tree; it begins here.
        typical: how to accept; None for greedy.
        The others are those of `speculative_generate`.
    """

    def __init__(
        self,
        model: DecodingModel,
        drafter: Drafter,
        state: DecodingState,
        tree: Tree,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        typical: Typical | None = None,
    ) -> None:
        super().__init__(model, state, max_new_tokens, eos_ids, places=tree.max_depth + 1)
        drafter.begin(state.batch_size, state.max_length, tree)
        self.drafter, self.tree, self.typical = drafter, tree, typical
        self.paths = ops.Paths(*(tensor.to(state.device) for tensor in (tree.parent, tree.depth, tree.route)))
        self.rank = tree.rank.to(state.device)
        self.tokens = TreeTokens(tree.mask.to(state.device), self.paths.parent, self.paths.depth)
        switches, moving = self.thresholds
        stops = [*switches, *(() if moving is None else (moving,))]
        self.stops = torch.tensor(stops, dtype=torch.long, device=state.device)

    def start(self, ids: Tensor, real: Tensor) -> ops.Sequences:
        sequences = super().start(ids, real)
        self.drafter.start(sequences, self._prompt_states)
        del self._prompt_states
        return sequences

    def _prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        found = prefill(self.model, ids, lengths, self.state, every_state=self.drafter.reads_states)
        self._prompt_states = found.states
        return found.hidden, found.logits

    def accept(self, sequences: ops.Sequences, hidden: Tensor, logits: Tensor) -> Tensor:
        slots = super().accept(sequences, hidden, logits)
        self.drafter.follow(sequences, slots, hidden[:, None])
        return slots

    def needs_prefill(self, sequences: ops.Sequences) -> Tensor:
        """Bool (B,): sequences whose keys in the state have to be computed again before their root can be run."""
        stale = torch.zeros_like(sequences.done)
        for switch in self.thresholds.switches:
            stale |= sequences.cache_seqlens == switch
        return stale & ~sequences.done

    def __call__(self, sequences: ops.Sequences) -> None:
        """Take a step."""
        tokens, positions = ops.tree_inputs(
            self.drafter.draft(sequences),
            sequences.root,
            sequences.cache_seqlens,
            self.paths.depth,
            self.rank,
            self.stops,
            self.thresholds.moving,
        )
        out = self.model(
            tokens,
            position_ids=positions,
            state=self.state,
            tree=self.tokens,
            return_logits=True,
            return_last_hidden_state=True,
        )
        accepted = (
            (None, None) if self.typical is None else self.typical.accept_mask(out.logits, tokens, self.paths.parent)
        )
        given = tokens, positions, self.choose(out.logits), out.last_hidden_state
        slots = ops.accept_path(sequences, self.paths, *given, self.eos, self.max_new_tokens, *accepted)
        self.state.commit(slots)
        self.drafter.follow(sequences, slots, out.last_hidden_state)
