"""Steps of decoding: what they need of a model, where they begin, and the plain one: one new token a sequence."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.generation.sampling import greedy
from ligermodels.generation.state import DecodingState
from ligermodels.layers.rope import RotaryEmbedding
from ligermodels.layers.sharding import ModuleLike


class DecodingModel(ModuleLike, Protocol):
    """What generation needs of a model; CausalLM is one. It is called as `CausalLM.forward`, with a `state`."""

    @property
    def config(self) -> Any:
        """Has the `vocab_size`."""

    def __call__(self, input_ids: Tensor | None = None, **options: Any) -> Any:
        """Tokens (B, T) -> `logits` and `last_hidden_state` of all of them, or of `token_indices`."""

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """Logits (..., V) of states (..., H) after the final norm."""

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state on the model's device."""


Process = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits (B, V), text long (B, W), lengths long (B,), of which `text` has the first as tokens so far) -> logits."""


class Step:
    """A step of plain decoding for all sequences of a batch: a function of tensors of fixed shapes that does not
    synchronise with the device, so that a CUDA graph can hold it. Sequences that are done stay as they are.

    Where rotary frequencies change for good at some length (`layers.rope.ContextThresholds`), the keys in the state
    have to be computed again: then `prefill_again` takes the place of a step.

    Args:
        state: empty; as long as the prompts, the new tokens but one, and what a step runs beside the root.
        choose: logits (B, V) -> long (B,), the next tokens.
        process: applied to the logits before.
        places: how many tokens a sequence may gain in a step.
        The others are those of `generate`.
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
    ) -> None:
        self.model, self.state, self.max_new_tokens, self.choose = model, state, max_new_tokens, choose
        self.process, self.places, self.thresholds = process, places, rope_thresholds(model)
        self.eos = torch.tensor(list(eos_ids), dtype=torch.long, device=state.device)
        root = torch.zeros(1, dtype=torch.long, device=state.device)
        self._root_alone = ops.Paths(root, root, root[:, None])

    def start(self, ids: Tensor, real: Tensor) -> ops.Sequences:
        """Run the prompts: ids long (B, T), whose tokens, not the padding on their left, are `real`, bool (B, T)."""
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
        """Run the prompts, as `prefill`: their last tokens' states (B, H) and logits (B, V)."""
        found = prefill(self.model, ids, lengths, self.state)
        return found.hidden, found.logits

    def run(self, sequences: ops.Sequences) -> tuple[Tensor, Tensor]:
        """Run the roots: their states (B, H) and logits (B, V)."""
        out = self.model(sequences.root[:, None], state=self.state, return_logits=True, return_last_hidden_state=True)
        return out.last_hidden_state[:, 0], out.logits[:, 0]

    def accept(self, sequences: ops.Sequences, hidden: Tensor, logits: Tensor) -> Tensor:
        """Add the root, which led to `hidden` (B, H) and `logits` (B, V), to each sequence, and choose the next one.

        Returns long (B, 1), the slots of the roots."""
        if self.process is not None:
            logits = self.process(logits, sequences.text, sequences.start + sequences.count)
        root, place = sequences.root[:, None], sequences.cache_seqlens[:, None]
        given = root, place, self.choose(logits)[:, None], hidden[:, None]
        return ops.accept_path(sequences, self._root_alone, *given, self.eos, self.max_new_tokens)

    def __call__(self, sequences: ops.Sequences) -> None:
        """Take a step."""
        self.accept(sequences, *self.run(sequences))

    def prefill_again(self, sequences: ops.Sequences, longest: int) -> None:
        """Run all sequences from their start, none of which has more than `longest` tokens in the state: each gains one
        token."""
        found = prefill(self.model, sequences.text[:, : longest + 1], sequences.cache_seqlens + 1, self.state)
        self.state.cache_seqlens = sequences.cache_seqlens
        self.accept(sequences, found.hidden, found.logits)


def aligned(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (B, T) padded on the left, whose tokens are `real`, moved to the left end, and their lengths (B,): a
    token's slot is then its position, and what follows, being causal, never sees the padding."""
    lengths = real.sum(dim=1)
    slots = torch.arange(ids.shape[1], device=ids.device)
    # padding may hold any id, even one that the embedding does not have
    return ids.masked_fill(~real, 0).gather(1, (slots + ids.shape[1] - lengths[:, None]) % ids.shape[1]), lengths


class Prefilled(NamedTuple):
    """The last token's `hidden` state (B, H) and `logits` (B, V) of each sequence, and `states` (B, T, H), those of all
    tokens, if they were asked for; else (B, 1, H), those of the last ones."""

    hidden: Tensor
    logits: Tensor
    states: Tensor


def prefill(
    model: DecodingModel, ids: Tensor, lengths: Tensor, state: DecodingState, *, every_state: bool = False
) -> Prefilled:
    """Run tokens (B, T), of which each sequence has the first `lengths` (B,), into the state, emptied first."""
    state.reset()
    batch, length = ids.shape
    mask = torch.arange(length, device=ids.device) < lengths[:, None]
    last = torch.arange(batch, device=ids.device) * length + lengths - 1
    if every_state:
        states = model(ids, attention_mask=mask, state=state, return_last_hidden_state=True).last_hidden_state
        hidden = states.flatten(0, 1)[last]
        return Prefilled(hidden, model.logits(hidden), states)
    out = model(
        ids, attention_mask=mask, state=state, token_indices=last, return_logits=True, return_last_hidden_state=True
    )
    return Prefilled(out.last_hidden_state[0], out.logits[0], out.last_hidden_state.transpose(0, 1))


class RopeThresholds(NamedTuple):
    """Lengths past which a model's rotary frequencies change, for good or with each token: see
    `layers.rope.ContextThresholds`."""

    switches: frozenset[int]
    moving: int | None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.switches) or self.moving is not None


def rope_thresholds(model: DecodingModel) -> RopeThresholds:
    """Those of all rotary embeddings in `model`. At a switch the keys of earlier tokens have to be computed again."""
    scalings = [module.config.scaling for module in model.modules() if isinstance(module, RotaryEmbedding)]
    found = [scaling.context_thresholds for scaling in scalings if scaling is not None]
    switches = frozenset(each.switch for each in found if each.switch is not None)
    return RopeThresholds(switches, min((each.moving for each in found if each.moving is not None), default=None))


def new_tokens(text: Tensor, start: Tensor, count: Tensor, pad_id: int | None) -> Tensor:
    """Long (B, the highest count): the `count` (B,) tokens of each sequence in `text` (B, W) from `start` (B,) on, then
    pad_id."""
    place = torch.arange(int(count.max()), device=text.device)
    # Rows differ in length only when one met EOS, and then pad_id is known.
    return text.gather(1, start[:, None] + place).masked_fill(place >= count[:, None], pad_id or 0)
