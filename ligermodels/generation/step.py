"""Steps of decoding: what they need of a model, where they begin, and the plain one, which adds a token to each row."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.generation.cache import KVCache
from ligermodels.generation.sampling import greedy
from ligermodels.layers.rope import RotaryEmbedding


class DecoderSize(Protocol):
    """The part of a model's config that generation reads."""

    @property
    def vocab_size(self) -> int: ...


class Evaluable(Protocol):
    """What `evaluating` needs; every nn.Module is one."""

    def eval(self) -> Any: ...

    def modules(self) -> Iterator[nn.Module]: ...


class Decoder(Evaluable, Protocol):
    """What generation needs of a model; CausalLM is one."""

    @property
    def config(self) -> DecoderSize: ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Hidden states (..., H) -> logits (..., V)."""

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        tree_mask: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, T) -> hidden states (B, T, H) after the final norm.

        The new tokens take the next T slots of the cache, which is advanced by T; within `cache.rows` those after each
        row's last. Attention is causal by slot, but for a tree_mask, bool (T, T): then a new token sees all slots
        before the new ones, and of these those that its row of the mask names. Positions are slots unless given.
        """

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache on the model's device."""


class Step:
    """A step of plain decoding for all rows of a batch: a function of tensors of fixed shapes, without a wait for the
    device, so that a CUDA graph can hold it. Rows that are done stay as they are.

    Where rotary frequencies change for good with the length of a row (`layers.rope.Limits`), its keys in the cache have
    to be computed anew: then it needs `renew` in place of a step.

    Args:
        cache: empty; as long as the prompts, the new tokens but one, and what a step runs beside the root.
        choose: logits (B, V) -> long (B,), the next tokens.
        places: how many tokens a row may gain in a step.
        The others are those of `generate`.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        max_new_tokens: int,
        eos_ids: Sequence[int],
        choose: Callable[[Tensor], Tensor] = greedy,
        places: int = 1,
    ) -> None:
        self.model, self.cache, self.max_new_tokens, self.choose = model, cache, max_new_tokens, choose
        self.places, self.limits = places, rope_limits(model)
        self.eos = torch.tensor(list(eos_ids), dtype=torch.long, device=cache.device)
        root = torch.zeros(1, dtype=torch.long, device=cache.device)
        self._root_alone = ops.Paths(root, root, root[:, None])

    def start(self, ids: Tensor, real: Tensor) -> ops.Rows:
        """Run the prompts: ids long (B, T), whose tokens, not the padding on their left, are `real`, bool (B, T)."""
        ids, start = aligned(ids, real)
        hidden = prefill(self.model, ids, start, self.cache)
        root = self.choose(self.model.head(hidden))
        text = F.pad(ids, (0, self.max_new_tokens + self.places)).scatter(1, start[:, None], root[:, None])
        # `torch.isin` may sort, and then waits for the device
        done = (root[:, None] == self.eos).any(dim=1) | (self.max_new_tokens == 1)
        return ops.Rows(text, start, torch.ones_like(root), start.clone(), root, hidden, done, torch.zeros_like(root))

    def run(self, rows: ops.Rows) -> tuple[Tensor, Tensor]:
        """Run the roots: their states (B, H) and logits (B, V)."""
        with self.cache.rows(rows.lengths):
            states = self.model.hidden_states(rows.root[:, None], position_ids=rows.lengths[:, None], cache=self.cache)
        hidden = states[:, 0]
        return hidden, self.model.head(hidden)

    def gain(self, rows: ops.Rows, hidden: Tensor, logits: Tensor) -> None:
        """Move each row on by its root, which led to `hidden` (B, H) and `logits` (B, V), and choose the next."""
        inputs = rows.root[:, None], rows.lengths[:, None], self.choose(logits)[:, None], hidden[:, None]
        ops.accept_path(rows, self._root_alone, *inputs, self.eos, self.max_new_tokens)

    def __call__(self, rows: ops.Rows) -> None:
        """Take a step."""
        self.gain(rows, *self.run(rows))

    def renew(self, rows: ops.Rows, longest: int) -> None:
        """Run all rows from their start, of which none has more than `longest` in the cache: each gains one token."""
        hidden = prefill(self.model, rows.text[:, : longest + 1], rows.lengths + 1, self.cache)
        self.gain(rows, hidden, self.model.head(hidden))


def aligned(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (B, T) padded on the left, whose tokens are `real`, moved to the left end, and their lengths (B,): a
    token's slot is then its position, and what follows, being causal, never sees the padding."""
    lengths = real.sum(dim=1)
    slots = torch.arange(ids.shape[1], device=ids.device)
    # padding may hold any id, even one that the embedding does not have
    return ids.masked_fill(~real, 0).gather(1, (slots + ids.shape[1] - lengths[:, None]) % ids.shape[1]), lengths


def prefill(model: Decoder, ids: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
    """Run tokens (B, T), of which each row has the first `lengths` (B,), into a cleared cache: the last one's states
    (B, H)."""
    cache.clear()
    positions = torch.minimum(torch.arange(ids.shape[1], device=ids.device), lengths[:, None] - 1)
    states = model.hidden_states(ids, position_ids=positions, cache=cache)
    return states[torch.arange(len(ids), device=ids.device), lengths - 1]


class RopeLimits(NamedTuple):
    """Lengths past which a model's rotary frequencies change, for good or with each token: see `layers.rope.Limits`."""

    switches: frozenset[int]
    moving: int | None


def rope_limits(model: Evaluable) -> RopeLimits:
    """Those of all rotary embeddings in `model`. At a switch the keys in a cache have to be computed anew."""
    scalings = [module.config.scaling for module in model.modules() if isinstance(module, RotaryEmbedding)]
    limits = [scaling.limits for scaling in scalings if scaling is not None]
    switches = frozenset(each.switch for each in limits if each.switch is not None)
    return RopeLimits(switches, min((each.moving for each in limits if each.moving is not None), default=None))


def new_tokens(rows: ops.Rows, counts: Sequence[int], pad_id: int | None) -> Tensor:
    """Long (B, the highest count): what each row gained, filled up with pad_id. counts: `rows.count` as a list."""
    place = torch.arange(max(counts), device=rows.text.device)
    new = rows.text.gather(1, rows.start[:, None] + place)
    # Rows differ in length only when one met EOS, and then pad_id is known.
    return new.masked_fill(place >= rows.count[:, None], pad_id or 0)
