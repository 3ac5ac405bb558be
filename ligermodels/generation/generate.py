"""Plain autoregressive generation, greedy or sampled, over any model that follows the `DecodingModel` protocol."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.sampling import check_sampling, greedy, penalise_repetition, sample
from ligermodels.generation.step import DecodingModel, Step, new_tokens
from ligermodels.layers.sharding import ModuleLike, end_of_decoding, is_sharded, reshard

DEFAULT_NEW_TOKENS = 64

TokenIds: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Prompts(NamedTuple):
    """Prompts of a batch, padded on the left: `ids` long (B, T), `mask` bool (B, T), True on real tokens."""

    ids: Tensor
    mask: Tensor


@torch.no_grad()  # not inference_mode: the ids that come out must be fit to train on
def generate(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    max_length: int | None = None,
    attention_mask: Tensor | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], bool | None] | None = None,
    cuda_graph: bool = True,
) -> Tensor:
    """Continue each prompt until it meets an EOS token or has max_new_tokens new tokens.

    Args:
        input_ids: long (B, T) or (T,), one list of ids, or a list of such lists, whose lengths may differ.
        max_new_tokens: at least 1; by default what `max_length` leaves, or 64.
        max_length: the longest prompt, padding included, and the new tokens together; `max_new_tokens` goes before it.
        attention_mask: (B, T), 1 on real tokens and 0 on padding, which may stand on either side and is never seen by
            the model. Only with a tensor of ids; lists need none.
        do_sample: draw from the distribution that temperature, top_k, top_p and min_p shape (see `sampling.warp`)
            instead of taking the most probable token. Without it those options are not used.
        repetition_penalty: above 0; logits of tokens that the text has are divided by it, or multiplied where they are
            negative (Keskar et al., 2019).
        eos_token_id: token or tokens that end a row; the row keeps the one it met. None: no row ends early.
        pad_token_id: fills lists of different lengths on the left and finished rows on the right. Default: the first
            EOS token.
        generator: source of randomness, on the model's device.
        on_token: called after each step with the tokens (B,) just added (pad for finished rows); generation stops when
            it returns True.
        cuda_graph: on a GPU, record a step once and replay it; not done where parameters are sharded. Then all ranks
            call this with the same max_new_tokens, and decode until the sequences of all ranks are done.

    Returns:
        Long (B, T + n) on the model's device: the prompts, padded on the left, then the n <= max_new_tokens new tokens
        of the row that ran longest. The model's training flags are left as they were.

    Raises:
        InputError: an empty prompt, a token id outside the vocabulary, a mask that does not fit the ids, an option out
            of its range, or lists of different lengths with neither pad_token_id nor eos_token_id.
    """
    eos_ids = as_eos_ids(eos_token_id)
    pad_id = pad_token_id if pad_token_id is not None else (eos_ids[0] if eos_ids else None)
    prompts = prepare_prompts(input_ids, attention_mask, pad_id, model.config.vocab_size)
    batch, length = prompts.ids.shape
    max_new_tokens = resolve_max_new_tokens(max_new_tokens, max_length, length)
    if do_sample:
        check_sampling(temperature, top_k, top_p, min_p)
    if not (repetition_penalty > 0 and math.isfinite(repetition_penalty)):
        raise InputError(f"repetition_penalty must be above 0, got {repetition_penalty}")
    process = None if repetition_penalty == 1.0 else partial(penalise_repetition, penalty=repetition_penalty)

    def choose(logits: Tensor) -> Tensor:
        if not do_sample:
            return greedy(logits)
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, generator=generator)

    before = prompts.mask.sum(dim=1).tolist()
    with evaluating(model):
        state = model.new_state(batch, max(1, length + max_new_tokens - 1))
        ids, real = prompts.ids.to(state.device), prompts.mask.to(state.device)
        step = Step(model, state, max_new_tokens, eos_ids, choose, process)
        sequences = step.start(ids, real)
        # A graph would draw the same random numbers again and again: it ends before the choice.
        cuda_graph, finish = cuda_graph and not is_sharded(model), end_of_decoding(model)
        run = Graphed(partial(step.run, sequences), state.device, cuda_graph and do_sample)
        take = Graphed(lambda: step.accept(sequences, *run()), state.device, cuda_graph and not do_sample)
        # A step too many must not be seen, by a callback nor by the source of randomness.
        finished = Finished(state.device, on_token is None and not do_sample)
        for count in range(1, max_new_tokens + 1):
            stop = on_token is not None and on_token(_last(sequences, count, pad_id))
            if (eos_ids and finished(finish(sequences.done)) is not None) or count == max_new_tokens or stop:
                break
            if any(prompt + count - 1 in step.thresholds.switches for prompt in before):
                step.prefill_again(sequences, length + count - 1)
            else:
                take()
    return torch.cat([ids, new_tokens(sequences, sequences.count.tolist(), pad_id)], dim=1)


def _last(sequences: ops.Sequences, count: int, pad_id: int | None) -> Tensor:
    """Tokens (B,): the count-th new one of each row, pad_id where it has fewer."""
    tokens = sequences.text.gather(1, (sequences.start + count - 1)[:, None])[:, 0]
    return tokens.masked_fill(sequences.count < count, pad_id or 0)


def prepare_prompts(
    input_ids: TokenIds, attention_mask: Tensor | None, pad_token_id: int | None, vocab_size: int
) -> Prompts:
    """Check the prompts of a `generate` call and pad them on the left (arguments and errors as there)."""
    if isinstance(input_ids, Tensor):
        prompts = _from_tensor(input_ids, attention_mask)
    elif attention_mask is None:
        prompts = _from_lists(input_ids, pad_token_id)
    else:
        raise InputError("attention_mask goes with a tensor of input_ids; lists of ids need none")
    wrong = (((prompts.ids < 0) | (prompts.ids >= vocab_size)) & prompts.mask).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        # counted among the row's real tokens: that is where the caller finds it, however it was padded
        place = int(prompts.mask[row, :column].sum())
        raise InputError(
            f"input_ids: token id {int(prompts.ids[row, column])} (prompt {row}, token {place}) is outside the "
            f"vocabulary of {vocab_size}"
        )
    return prompts


def _from_tensor(ids: Tensor, attention_mask: Tensor | None) -> Prompts:
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise InputError(f"input_ids must be integers, got {ids.dtype}")
    if ids.ndim not in (1, 2):
        raise InputError(f"input_ids must have shape (B, T) or (T,), got {tuple(ids.shape)}")
    if ids.numel() == 0:
        raise InputError(f"input_ids are empty (shape {tuple(ids.shape)}): a prompt needs at least one token")
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}, input_ids have {tuple(ids.shape)}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask may hold only 1 (a token) and 0 (padding)")
    ids, mask = ids.long().reshape(-1, ids.shape[-1]), mask.bool().reshape(-1, ids.shape[-1])
    empty = (~mask.any(dim=1)).nonzero()
    if len(empty):
        raise InputError(f"prompt {int(empty[0])} is empty: its attention_mask has no 1")
    # real tokens to the right end, in their order; left-padded rows stay as they are
    order = mask.int().argsort(dim=1, stable=True)
    return Prompts(ids.gather(1, order), mask.gather(1, order))


def _from_lists(input_ids: Sequence[int] | Sequence[Sequence[int]], pad_token_id: int | None) -> Prompts:
    rows: Sequence[Any] = input_ids
    if rows and all(isinstance(row, int) for row in rows):
        rows = [rows]
    if not rows:
        raise InputError("input_ids are empty: give at least one prompt")
    lengths = []
    for number, row in enumerate(rows):
        if not isinstance(row, Sequence) or not all(isinstance(token, int) for token in row):
            raise InputError(f"input_ids must be a tensor, a list of ids or a list of such lists: see prompt {number}")
        if not row:
            raise InputError(f"prompt {number} is empty: a prompt needs at least one token")
        lengths.append(len(row))
    longest = max(lengths)
    if pad_token_id is None and min(lengths) < longest:
        raise InputError("prompts of different lengths need padding: give pad_token_id (or eos_token_id)")
    ids = torch.tensor([[pad_token_id or 0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return Prompts(ids, mask)


def renamed_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` of a `generate` method with `eos_token_id` under its name; its former one warns."""
    if "eos_token_ids" not in options:
        return options
    warnings.warn("eos_token_ids is now eos_token_id", DeprecationWarning, stacklevel=3)
    return {"eos_token_id": options["eos_token_ids"], **{k: v for k, v in options.items() if k != "eos_token_ids"}}


def as_eos_ids(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """EOS tokens as a list; empty for None."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def resolve_max_new_tokens(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """How many tokens to generate at most; InputError unless that is at least 1."""
    if max_new_tokens is None:
        max_new_tokens = DEFAULT_NEW_TOKENS if max_length is None else max_length - prompt_length
        if max_new_tokens < 1:
            raise InputError(f"max_length {max_length} leaves nothing to generate after {prompt_length} prompt tokens")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return max_new_tokens


@contextmanager
def evaluating(model: ModuleLike) -> Iterator[None]:
    """Put a model in eval mode; afterwards each module gets its own training flag back, and FSDP2 its parameters."""
    reshard(model)
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        reshard(model)
        for module, flag in flags:
            module.training = flag


def until_eos(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """The new tokens of a row up to its first EOS, which it keeps: what follows is padding."""
    end = next((place for place, token in enumerate(tokens, start=1) if token in eos_ids), len(tokens))
    return list(tokens[:end])
