"""Speculative decoding: one forward pass checks a tree of candidate tokens for every sequence of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.context_length import GenerationLimit
from ligermodels.generation.eval_mode import evaluating
from ligermodels.generation.generate import as_eos_ids, as_pad_id, resolve_max_new_tokens
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.prompts import TokenIds, prepare_prompts
from ligermodels.generation.sampling import check_values
from ligermodels.generation.state import DecodingState
from ligermodels.generation.step import DecodingModel, Step, new_tokens, prefill
from ligermodels.layers.sharding import end_of_decoding, is_sharded
from ligermodels.speculative.drafting import Drafter, TopDrafts
from ligermodels.speculative.layout import Layout
from ligermodels.speculative.rules import GREEDY, Rule, rule_of, shaping_of, typical_of
from ligermodels.speculative.tree import DynamicTree, Tree


@dataclass(frozen=True)
class SpeculativeOutput:
    """The result of `speculative_generate`.

    sequences: long (B, T + n), the prompts, padded on the left, and the new tokens, padded on the right.
    steps: sum of the steps of all sequences. A forward pass counts once for each sequence that was not finished.
    new_tokens: number of tokens generated in all sequences, with EOS, without padding.
    passes: number of forward passes after the prefill, each for the whole batch.
    """

    sequences: Tensor
    steps: int
    new_tokens: int
    passes: int

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that a sequence gains in a step; 1 for plain decoding, nan without a step.

        (new_tokens - B) / steps, as the prefill gives the first token of each sequence.
        """
        return (self.new_tokens - len(self.sequences)) / self.steps if self.steps else float("nan")


@torch.no_grad()
def speculative_generate(
    model: DecodingModel,
    drafter: Drafter,
    input_ids: TokenIds,
    *,
    tree: Tree | DynamicTree,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    num_return_sequences: int = 1,
    generator: torch.Generator | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
    cuda_graph: bool = True,
    on_tokens: Callable[[list[list[int]]], object] | None = None,
) -> SpeculativeOutput:
    """Generate with tree decoding, in fewer forward passes than `generate`.

    A step runs the model over all nodes of the tree at once; each node attends to the text so far and to its own
    ancestors. The step accepts a path of nodes, and takes the model's most probable token after the last accepted node
    as the next root. Sequences of a batch may accept paths of different lengths in the same step.

    By default decoding is greedy and lossless: a node is accepted if its token is the model's greedy choice, so the
    tokens are the tokens of greedy `generate` for any drafter and tree. Rounding may differ between forward passes of
    different shapes, and may decide between two logits that are equal apart from rounding.

    With `do_sample` the tokens are samples of the same distribution as in `generate`, for any drafter and tree: see
    `sampling`. The drafts of a chain are sampled too, and accepted with probability min(1, p / q); a tree has the most
    probable candidates. The samples differ from the samples of `generate` with the same seed.

    With a temperature above 0 and without `do_sample` acceptance is typical (see `acceptance.Typical`): a token is
    accepted if its probability in the model's softmax at that temperature exceeds min(epsilon, delta * exp(-entropy)).
    The longest accepted path is taken; among paths of equal length, the most probable. No random numbers are drawn, and
    the result is *not* a sample of the model's distribution: the first token of every step is the greedy token, the
    others are candidates that are probable enough, so the prompt, the drafter and the tree determine the text. A higher
    temperature flattens the distribution, which lowers the threshold and accepts more tokens other than the greedy
    token.

    Args:
        model: the model.
        drafter: proposes the tokens of the tree.
        input_ids: token ids of one prompt or several, long (B, T) or lists of any lengths.
        tree: the candidates to check in each step; a `DynamicTree` needs a `TreeDrafter`.
        max_new_tokens: largest number of new tokens per sequence, at least 1; by default the number that `max_length`
            allows, or 64.
        max_length: number of tokens of the longest prompt and of the new tokens together; ignored if `max_new_tokens`
            is given.
        do_sample: sample. The options up to `generator` apply only then, except for `temperature`.
        temperature: with `do_sample`, logits are divided by it, 1 by default, and 0 is greedy decoding. Without, above
            0 for typical acceptance, 0 by default.
        top_k: sample from the k most probable tokens; None or 0: from all.
        top_p: in [0, 1]; sample from the fewest tokens with a total probability of at least top_p. Default: 1.
        min_p: in [0, 1]; drop tokens below min_p times the highest probability. Default: none.
        num_return_sequences: samples per prompt, in adjacent rows. Default: 1.
        generator: `torch.Generator` on the model's device; by default torch's own.
        epsilon: upper limit of the threshold of typical acceptance, above 0; only with it. Default: 0.09.
        delta: factor of exp(-entropy) in the threshold of typical acceptance, above 0; only with it. Default: 0.3.
        eos_token_id: token or tokens that end a sequence. None: no sequence ends early.
        pad_token_id: pads shorter prompts on the left and finished sequences on the right; by default the first EOS
            token.
        attention_mask: (B, T), 1 on tokens and 0 on padding, on either side; only with a tensor of ids. Default: 0 on
            tokens of a tensor that equal `pad_token_id`, unless it is an EOS token too.
        cuda_graph: on a GPU, replay steps from a CUDA graph.
        on_tokens: called after the prefill and after each step with the tokens that each sequence gained, B lists of
            any length.

    Returns:
        The sequences, with the numbers of steps and tokens.

    Raises:
        InputError: the prompts or an option are invalid, or the tree needs more candidates than the drafter gives.
    """
    if getattr(model, "batch_invariant", False) or ops.set_batch_invariant.value:
        raise InputError("batch_invariant: speculative decoding has no such form; generate without draft")
    eos_ids = as_eos_ids(eos_token_id)
    pad_id = as_pad_id(pad_token_id, eos_ids)
    prompts = prepare_prompts(input_ids, attention_mask, pad_id, eos_ids, model.config.vocab_size)
    check_values(cuda_graph=cuda_graph, on_tokens=on_tokens)
    shaping = shaping_of(do_sample, generator, temperature, top_k, top_p, min_p)
    typical = typical_of(bool(shaping) and not do_sample, epsilon=epsilon, delta=delta)
    check_values(num_return_sequences=num_return_sequences)
    prompts = prompts.for_samples(num_return_sequences or 1, do_sample)
    batch, length = prompts.ids.shape
    max_new_tokens = resolve_max_new_tokens(max_new_tokens, max_length, length)
    with evaluating(model):
        state = model.new_state(batch, length + max_new_tokens + len(tree))
        ids, attention = prompts.to(state.device)
        rule = rule_of(model, tree, batch, state.device, do_sample, shaping, typical, generator)
        step = TreeStep(model, drafter, state, tree, max_new_tokens, eos_ids, rule)
        sequences = step.start(ids, attention)
        cuda_graph = cuda_graph is not False and not is_sharded(model)
        all_done = end_of_decoding(model)
        take_step = Graphed(partial(step, sequences), state.device, cuda_graph)
        passes = 0
        switches = bool(step.thresholds.switches)
        # A superfluous step must not reach the caller or the random generator.
        finished = Finished(state.device, not (switches or on_tokens or rule.renew))
        new_tokens_of = _NewTokens(sequences)
        while True:
            if on_tokens is not None:
                on_tokens(new_tokens_of())
            if (superfluous := finished(all_done(sequences.done))) is not None:
                break
            if switches and bool(step.needs_prefill(sequences).any()):
                step.prefill_again(sequences, int(sequences.cache_seqlens.max()))
            else:
                if rule.renew is not None:
                    rule.renew()
                take_step()
            passes += 1
        passes -= superfluous
        GenerationLimit(model)(int(sequences.cache_seqlens.max()))
    tokens = torch.cat([ids, new_tokens(sequences.text, sequences.start, sequences.count, pad_id)], dim=1)
    return SpeculativeOutput(tokens, int(sequences.steps.sum()), int(sequences.count.sum()), passes)


class _NewTokens:
    """The new tokens of each sequence since the previous call, B lists. A call waits for the device."""

    def __init__(self, sequences: ops.Sequences) -> None:
        self._sequences, self._counts = sequences, [0] * len(sequences.text)

    def __call__(self) -> list[list[int]]:
        starts, counts = self._sequences.start.tolist(), self._sequences.count.tolist()
        previous, self._counts = self._counts, counts
        rows = zip(self._sequences.text, starts, previous, counts, strict=True)
        return [text[start + old : start + new].tolist() for text, start, old, new in rows]


class TreeStep(Step):
    """A step of tree decoding.

    If rotary frequencies change at a certain length of a sequence (`layers.rope.ContextThresholds`), no path crosses
    that length: a sequence that reaches it (`needs_prefill`) takes `prefill_again` instead of a step. If frequencies
    change with every token, a step adds one token, as in plain decoding.

    Args:
        model: the model, on the device of `state`.
        drafter: proposes the tokens of the tree; its `begin` is called here.
        state: an empty decoding state with room for the prompts, max_new_tokens new tokens and the tree.
        tree: the candidates to check in each step.
        max_new_tokens: largest number of new tokens per sequence.
        eos_ids: tokens that end a sequence.
        rule: the rule that chooses drafts and accepts tokens.
    """

    def __init__(
        self,
        model: DecodingModel,
        drafter: Drafter,
        state: DecodingState,
        tree: Tree | DynamicTree,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        rule: Rule = GREEDY,
    ) -> None:
        super().__init__(model, state, max_new_tokens, eos_ids, rule.choose, places=tree.max_depth + 1)
        drafter.begin(state.batch_size, state.max_length, tree, rule.drafts or TopDrafts(tree.width))
        self.drafter, self.tree, self.rule = drafter, tree, rule
        self.layout = None if isinstance(tree, DynamicTree) else Layout.of(tree, state.device)
        switches, moving = self.thresholds
        stops = [*switches, *(() if moving is None else (moving,))]
        self.stops = torch.tensor(stops, dtype=torch.long, device=state.device)

    def start(self, ids: Tensor, real: Tensor) -> ops.Sequences:
        sequences = super().start(ids, real)
        self.drafter.start(sequences, self._states)
        del self._states
        return sequences

    def _prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        drafter = self.drafter
        options: dict[str, Any] = {"every_state": drafter.reads_states, "boundaries": drafter.boundaries}
        hidden, logits, self._states = prefill(self.model, ids, lengths, self.state, **options)
        return hidden, logits

    def accept(self, sequences: ops.Sequences, hidden: Tensor, logits: Tensor) -> Tensor:
        slots = super().accept(sequences, hidden, logits)
        last = slots.clamp(max=self._states.shape[1] - 1)[..., None]
        self.drafter.follow(sequences, slots, self._states.gather(1, last.expand(-1, -1, self._states.shape[2])))
        return slots

    def needs_prefill(self, sequences: ops.Sequences) -> Tensor:
        """Bool (B,): True for sequences that need `prefill_again` before the next step, as their cached keys have
        outdated rotary frequencies."""
        outdated = torch.zeros_like(sequences.done)
        for switch in self.thresholds.switches:
            outdated |= sequences.cache_seqlens == switch
        return outdated & ~sequences.done

    def __call__(self, sequences: ops.Sequences) -> None:
        """Take a step; changes `sequences` in place."""
        candidates = self.drafter.draft(sequences)
        layout = cast(Layout, self.drafter.layout) if self.layout is None else self.layout
        tokens, positions = ops.tree_inputs(
            candidates,
            sequences.root,
            sequences.cache_seqlens,
            layout.paths.depth,
            layout.rank,
            self.stops,
            self.thresholds.moving,
        )
        if (deepest := self.drafter.max_depth) is not None:  # `accept_path` accepts no node off its own position
            positions = torch.minimum(positions, (sequences.cache_seqlens + deepest)[:, None])
        boundaries = self.drafter.boundaries
        reads: dict[str, Any] = {"return_hidden_states": boundaries} if boundaries else {}
        out = self.model(
            tokens,
            position_ids=positions,
            state=self.state,
            tree=layout.tokens,
            return_logits=True,
            return_last_hidden_state=True,
            **reads,
        )
        choices, *accepted = self.rule.accept(out.logits, tokens, layout.paths.parent)
        nodes = tokens, positions, choices, out.last_hidden_state
        slots = ops.accept_path(sequences, layout.paths, *nodes, self.eos, self.max_new_tokens, *accepted)
        self.state.commit(slots)
        states = torch.cat(out.hidden_states, dim=-1) if boundaries else out.last_hidden_state
        self.drafter.follow(sequences, slots, states)
