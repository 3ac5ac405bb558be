"""Plain decoding: the model interface, the prefill, and a step of one new token per sequence."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.generation.routing import RoutingBuffer
from ligermodels.generation.sampling import greedy
from ligermodels.generation.state import DecodingState
from ligermodels.layers.modules import modules_of
from ligermodels.layers.rope import RotaryEmbedding
from ligermodels.layers.sharding import ModuleLike


class DecodingModel(ModuleLike, Protocol):
    """The interface of models that generate, such as `CausalLM`: its `forward` takes a `state`."""

    @property
    def config(self) -> Any:
        """Config with a `vocab_size`."""

    def __call__(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        """Tokens (B, T) -> `logits` and `last_hidden_state` of all tokens, or of `token_indices`."""

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """Logits (..., V) of states (..., H) after the final norm."""

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state on the model's device."""


Process = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits (B, V), text long (B, W), lengths long (B,)) -> logits. Sequence b is text[b, :lengths[b]]."""


class Step:
    """A step of plain decoding for all sequences of a batch. Finished sequences do not change.

    A step works on tensors of fixed shapes and does not synchronise with the device, so a CUDA graph can record it. The
    root of a sequence is its newest token, not yet in the state.

    If rotary frequencies switch at a length (`layers.rope.ContextThresholds`), the keys in the state must be computed
    again: call `prefill_again` instead of a step.

    Args:
        model: the model.
        state: empty state with room for the prompts, all new tokens but one, and the other tokens of a step's pass.
        max_new_tokens: most new tokens of a sequence.
        eos_ids: tokens that end a sequence.
        choose: logits (B, V) -> next tokens, long (B,).
        process: changes the logits before `choose`; None for unchanged logits.
        places: most tokens that a sequence gains in a step.
        routing: gives the experts of each token, or takes them; None: the routers choose, and they are not kept.
    """

    def __init__(
        self,
        model: DecodingModel,
        state: DecodingState,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        choose: Callable[[Tensor], Tensor] = greedy,
        process: Process | None = None,
        places: int = 1,
        routing: RoutingBuffer | None = None,
    ) -> None:
        self.model, self.state, self.max_new_tokens, self.choose = model, state, max_new_tokens, choose
        self.process, self.places, self.thresholds = process, places, rope_thresholds(model)
        self.routing = routing
        self.eos = torch.tensor(list(eos_ids), dtype=torch.long, device=state.device)
        root = torch.zeros(1, dtype=torch.long, device=state.device)
        self._root_alone = ops.Paths(root, root, root[:, None])

    def start(self, ids: Tensor, real: Tensor) -> ops.Sequences:
        """Prefill: ids long (B, T), padded on the left; `real`, bool (B, T), is True on tokens and False on padding."""
        ids, start = aligned(ids, real)
        hidden, logits = self._prefill(ids, start)
        text = F.pad(ids, (0, self.max_new_tokens + self.places))
        root = self.choose(logits if self.process is None else self.process(logits, text, start))
        text = text.scatter(1, start[:, None], root[:, None])
        # `torch.isin` may sort, which synchronises
        done = (root[:, None] == self.eos).any(dim=1) | (self.max_new_tokens == 1)
        lengths = start.clone()
        # From here on `accept_path` advances the lengths.
        self.state.cache_seqlens, self.state.advances = lengths, False
        return ops.Sequences(text, start, torch.ones_like(root), lengths, root, hidden, done, torch.zeros_like(root))

    def _prefill(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Prefill prompts (B, T), padded on the right: hidden states (B, H) and logits (B, V) of their last tokens."""
        prefilled = prefill(self.model, ids, lengths, self.state, routing=self.routing)
        return prefilled.hidden, prefilled.logits

    def run(self, sequences: ops.Sequences) -> tuple[Tensor, Tensor]:
        """Run the roots: their hidden states (B, H) and logits (B, V)."""
        options = {} if self.routing is None else self.routing.of_step(sequences.cache_seqlens)
        out = self.model(
            sequences.root[:, None], state=self.state, return_logits=True, return_last_hidden_state=True, **options
        )
        if self.routing is not None:
            self.routing.write(sequences.cache_seqlens, out.routing)
        return out.last_hidden_state[:, 0], out.logits[:, 0]

    def accept(self, sequences: ops.Sequences, hidden: Tensor, logits: Tensor) -> Tensor:
        """Count the root of each sequence as in the state, and choose the next root.

        Args:
            sequences: the sequences, changed in place.
            hidden: hidden states of the roots, (B, H).
            logits: logits of the roots, (B, V).

        Returns:
            Slots of the roots in the state, long (B, 1).
        """
        if self.process is not None:
            logits = self.process(logits, sequences.text, sequences.start + sequences.count)
        root, slot = sequences.root[:, None], sequences.cache_seqlens[:, None]
        candidates = root, slot, self.choose(logits)[:, None], hidden[:, None]
        return ops.accept_path(sequences, self._root_alone, *candidates, self.eos, self.max_new_tokens)

    def __call__(self, sequences: ops.Sequences) -> None:
        """Take a step."""
        self.accept(sequences, *self.run(sequences))

    def prefill_again(self, sequences: ops.Sequences, longest: int) -> None:
        """Take a step by a prefill of all tokens; `longest` is the most tokens of a sequence in the state."""
        found = self._prefill(sequences.text[:, : longest + 1], sequences.cache_seqlens + 1)
        self.state.cache_seqlens = sequences.cache_seqlens
        self.accept(sequences, *found)


def aligned(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Move the padding of prompts (B, T) from the left to the right: their ids (B, T) and lengths (B,).

    A token's slot in the state is then its position, and causal attention never sees the padding.
    """
    lengths = real.sum(dim=1)
    slots = torch.arange(ids.shape[1], device=ids.device)
    # Padding may have any id, even one outside the vocabulary.
    return ids.masked_fill(~real, 0).gather(1, (slots + ids.shape[1] - lengths[:, None]) % ids.shape[1]), lengths


class Prefilled(NamedTuple):
    """Results of a prefill: `hidden` states (B, H) and `logits` (B, V) of the last tokens, and `states`, the hidden
    states of all tokens (B, T, H) with `every_state`, else of the last tokens (B, 1, H); with K `boundaries` the
    residual streams of all tokens at them, (B, T, K * H)."""

    hidden: Tensor
    logits: Tensor
    states: Tensor


def prefill(
    model: DecodingModel,
    ids: Tensor,
    lengths: Tensor,
    state: DecodingState,
    *,
    every_state: bool = False,
    boundaries: Sequence[int] = (),
    routing: RoutingBuffer | None = None,
) -> Prefilled:
    """Empty the state and run prompts into it.

    Args:
        model: the model.
        ids: long (B, T), padded on the right.
        lengths: long (B,), tokens of each prompt.
        state: a state for B sequences.
        every_state: return the hidden states of all tokens, not only of the last tokens.
        boundaries: return the residual streams at these boundaries between blocks instead, of all tokens.
        routing: gives the experts of all tokens, or takes them; None: the routers choose, and they are not kept.

    Returns:
        Hidden states and logits.
    """
    state.reset()
    batch, length = ids.shape
    mask = torch.arange(length, device=ids.device) < lengths[:, None]
    last = torch.arange(batch, device=ids.device) * length + lengths - 1
    if every_state and not boundaries:
        states = model(ids, attention_mask=mask, state=state, return_last_hidden_state=True).last_hidden_state
        hidden = states.flatten(0, 1)[last]
        return Prefilled(hidden, model.logits(hidden), states)
    options: dict[str, Any] = {} if routing is None else routing.of_prefill(length)
    if boundaries:
        options = {"return_hidden_states": boundaries}
    out = model(
        ids,
        attention_mask=mask,
        state=state,
        token_indices=last,
        return_logits=True,
        return_last_hidden_state=True,
        **options,
    )
    if routing is not None:
        routing.fill(out.routing)
    states = torch.cat(out.hidden_states, dim=-1) if boundaries else out.last_hidden_state.transpose(0, 1)
    return Prefilled(out.last_hidden_state[0], out.logits[0], states)


class RopeThresholds(NamedTuple):
    """Context lengths after which rotary frequencies change: once (`switches`), or with each token (the lowest
    `moving`). See `layers.rope.ContextThresholds`."""

    switches: frozenset[int]
    moving: int | None

    def __bool__(self) -> bool:
        """Whether frequencies change at any length."""
        return bool(self.switches) or self.moving is not None


def rope_thresholds(model: DecodingModel) -> RopeThresholds:
    """The thresholds of all rotary embeddings in `model`. At a switch the keys in the state must be computed again."""
    scalings = [rope.config.scaling for rope in modules_of(model, RotaryEmbedding)]
    thresholds = [scaling.context_thresholds for scaling in scalings if scaling is not None]
    switches = frozenset(threshold.switch for threshold in thresholds if threshold.switch is not None)
    moving = [threshold.moving for threshold in thresholds if threshold.moving is not None]
    return RopeThresholds(switches, min(moving, default=None))


def new_tokens(text: Tensor, start: Tensor, count: Tensor, pad_id: int | None) -> Tensor:
    """New tokens of each sequence, padded on the right.

    Args:
        text: long (B, W), prompts and new tokens.
        start: long (B,), position of the first new token.
        count: long (B,), number of new tokens.
        pad_id: the padding token; None if all counts are equal.

    Returns:
        Long (B, highest count).
    """
    offset = torch.arange(int(count.max()), device=text.device)
    return text.gather(1, start[:, None] + offset).masked_fill(offset >= count[:, None], pad_id or 0)
