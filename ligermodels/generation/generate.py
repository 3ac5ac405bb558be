"""Plain autoregressive generation, greedy or sampled, over any model that follows the `DecodingModel` protocol."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_token_id
from ligermodels.errors import InputError
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.host import LogitsProcessor, Processors, Stopping, StoppingCriterion, TokenStreamer
from ligermodels.generation.prompts import TokenIds, prepare_prompts
from ligermodels.generation.sampling import check_sampling, check_values, greedy, penalise_repetition, sample
from ligermodels.generation.step import DecodingModel, Process, Step, new_tokens
from ligermodels.layers.memory import memory_for
from ligermodels.layers.packing import check_plain
from ligermodels.layers.sharding import (
    ModuleLike,
    chosen_together,
    end_of_decoding,
    is_sharded,
    require_same_on_ranks,
    reshard,
)

DEFAULT_NEW_TOKENS = 64


@torch.no_grad()  # not inference_mode: the ids that come out must be fit to train on
def generate(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    on_token: Callable[[Tensor], bool | None] | None = None,
    streamer: TokenStreamer | None = None,
    **options: Any,
) -> Tensor:
    """Continue each prompt until it meets an EOS token or another end, or has max_new_tokens new tokens.

    Args:
        on_token: called after each step with the tokens (B,) just added (pad for finished rows); generation stops when
            it returns True.
        streamer: as transformers' `TextStreamer`: `put` is called with the prompts (B, T) and then with the tokens (B,)
            of each step, on the CPU; `end` at the end.
        options: the other arguments, and the errors, are those of `Decoding`.

    Returns:
        Long (B, T + n) on the model's device: the prompts, padded on the left, then the n <= max_new_tokens new tokens
        of the row that ran longest. The model's training flags are left as they were.
    """
    check_values(on_token=on_token)
    if streamer is not None and (isinstance(streamer, type) or not isinstance(streamer, TokenStreamer)):
        raise InputError(f"streamer: must be an object with put(tokens) and end(), got {type(streamer).__name__}")
    decoding = Decoding(model, input_ids, max_new_tokens, **options)
    if streamer is not None:
        streamer.put(decoding.prompts.ids.cpu())
    streamed = on_token is not None or streamer is not None
    with closing(decoding.steps(streamed=streamed)) as steps:
        for count in steps:
            if streamer is not None:
                streamer.put(decoding.tokens(count).cpu())
            if on_token is not None and on_token(decoding.tokens(count)):
                break
    if streamer is not None:
        streamer.end()
    return decoding.result()


def stream(
    model: DecodingModel, input_ids: TokenIds, max_new_tokens: int | None = None, **options: Any
) -> Iterator[Tensor]:
    """The new tokens of `generate`, each step's as soon as they are there: long (B,), pad for finished rows.

    Options and errors are those of `Decoding`; bad ones raise at the call. Until the iterator is exhausted or closed
    the model is in eval mode.
    """
    decoding = Decoding(model, input_ids, max_new_tokens, **options)
    return (decoding.tokens(count) for count in decoding.steps(streamed=True))


class Decoding:
    """One call of `generate` or `stream`: its options, checked, and its steps.

    Args:
        input_ids: long (B, T) or (T,), one list of ids, or a list of such lists, whose lengths may differ.
        max_new_tokens: at least 1; by default what `max_length` leaves, or 64.
        max_length: the longest prompt, padding included, and the new tokens together; `max_new_tokens` goes before it.
        attention_mask: (B, T), 1 on real tokens and 0 on padding, which may stand on either side and is never seen by
            the model. Only with a tensor of ids; lists need none.
        do_sample: draw from the distribution that temperature, top_k, top_p and min_p shape (see `sampling.warp`)
            instead of taking the most probable token. Without it those options are not used.
        num_return_sequences: samples of each prompt, in adjacent rows of the batch; above 1 only with `do_sample`.
        repetition_penalty: above 0; logits of tokens that the text has are divided by it, or multiplied where they are
            negative (Keskar et al., 2019).
        logits_processor: a list of functions (ids (B, T + n), fp32 scores (B, V)) -> scores (B, V), as transformers'
            `LogitsProcessorList`: run after the repetition penalty and before temperature and the filters.
        eos_token_id: token or tokens that end a row; the row keeps the one it met. None: no row ends early.
        stop_strings: a text or several that end a row once it has one, which may begin in the prompt; with `tokenizer`.
        tokenizer: has `decode(ids, skip_special_tokens=False)`: `ligermodels.Tokenizer`, or one of transformers.
        stopping_criteria: a list of functions (ids (B, T + n), None) -> bool, or bool (B,), the rows that end, as
            transformers' `StoppingCriteriaList`.
        pad_token_id: fills lists of different lengths on the left and finished rows on the right. Default: the first
            EOS token.
        generator: source of randomness, on the model's device.
        cuda_graph: on a GPU, record a step once and replay it; not done where parameters are sharded. Then all ranks
            call this with the same max_new_tokens, and decode until the sequences of all ranks are done. Sampling and
            `logits_processor` run between replays. With and without a graph other kernels may compute the linear
            layers: in 16-bit dtypes, of logits that are equal but for rounding, another may be the largest.

    Raises:
        InputError: an empty prompt, a token id outside the vocabulary, a mask that does not fit the ids, an option out
            of its range, rows that may differ in length with neither pad_token_id nor eos_token_id, or stop_strings
            without a tokenizer.
    """

    def __init__(
        self,
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
        num_return_sequences: int = 1,
        repetition_penalty: float = 1.0,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool = True,
    ) -> None:
        check_values(do_sample=do_sample, cuda_graph=cuda_graph, generator=generator)
        check_values(repetition_penalty=repetition_penalty, num_return_sequences=num_return_sequences)
        self.model, self.eos_ids = model, as_eos_ids(eos_token_id)
        self.pad_id = as_pad_id(pad_token_id, self.eos_ids)
        self.prompts = prepare_prompts(input_ids, attention_mask, self.pad_id, model.config.vocab_size)
        self.max_new_tokens = resolve_max_new_tokens(max_new_tokens, max_length, self.prompts.ids.shape[1])
        check_values(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if do_sample:
            check_sampling(temperature, top_k, top_p, min_p)
        elif num_return_sequences > 1:
            raise InputError(f"num_return_sequences above 1 needs do_sample=True: got {num_return_sequences}")
        with memory_for(f"num_return_sequences = {num_return_sequences}", self.prompts.ids.device):
            self.prompts = self.prompts.repeated(num_return_sequences)
        self.penalty, self.cuda_graph, self.samples = float(repetition_penalty), cuda_graph, do_sample
        self.generator = generator
        self.choose: Callable[[Tensor], Tensor] = greedy
        if do_sample:
            shape = {"temperature": float(temperature), "top_k": top_k, "top_p": top_p, "min_p": min_p}
            self.choose = partial(sample, **shape, generator=generator)  # type: ignore[arg-type]
        self.processors = Processors(logits_processor, self.prompts, self.pad_id)
        self.stopping = Stopping(stopping_criteria, stop_strings, tokenizer, self.prompts)
        if self.stopping and self.pad_id is None and len(self.prompts.ids) > 1:
            raise InputError("sequences may end at different lengths: give pad_token_id (or eos_token_id)")

    @torch.no_grad()
    def steps(self, *, streamed: bool) -> Generator[int, None, None]:
        """Decode, and give the number of new tokens, of rows that are not done, after each step.

        streamed: `tokens` is asked for between steps.
        """
        model, length = self.model, self.prompts.ids.shape[1]
        before = self.prompts.mask.sum(dim=1).tolist()
        advice = "give all the same max_new_tokens; max_length leaves prompts of other lengths another number"
        with evaluating(model):
            require_same_on_ranks(model, "max_new_tokens", self.max_new_tokens, advice)
            state = model.new_state(len(before), max(1, length + self.max_new_tokens - 1))
            if self.samples and self.generator is not None and self.generator.device.type != state.device.type:
                raise InputError(f"generator: is on {self.generator.device}, and the model on {state.device}")
            self.prompts = self.prompts.to(state.device)
            choose = chosen_together(model, self.choose)
            step = Step(model, state, self.max_new_tokens, self.eos_ids, choose, self._process())
            sequences = self._sequences = step.start(*self.prompts)
            # A graph would draw the same random numbers again and again, and cannot hold what runs on the host: then it
            # ends before the choice.
            on_host = self.samples or bool(self.processors)
            cuda_graph, finish = self.cuda_graph and not is_sharded(model), end_of_decoding(model)
            run = Graphed(partial(step.run, sequences), state.device, cuda_graph and on_host)
            take = Graphed(lambda: step.accept(sequences, *run()), state.device, cuda_graph and not on_host)
            switches = step.thresholds.switches
            # A step too many must not be seen, by a caller, by what runs on the host, nor by the source of randomness.
            finished = Finished(state.device, not (streamed or on_host or self.stopping))
            for count in range(1, self.max_new_tokens + 1):
                if self.stopping:
                    # In place: a graph reads it. What is done gains no more tokens.
                    sequences.done.logical_or_(self.stopping(self.result(), sequences.done))
                yield count
                ends = bool(self.eos_ids or self.stopping) and finished(finish(sequences.done)) is not None
                if ends or count == self.max_new_tokens:
                    break
                if switches and any(prompt + count - 1 in switches for prompt in before):
                    step.prefill_again(sequences, length + count - 1)
                else:
                    take()

    def _process(self) -> Process | None:
        penalise = None if self.penalty == 1.0 else partial(penalise_repetition, penalty=self.penalty)
        if not self.processors:
            return penalise
        if penalise is None:
            return self.processors
        return lambda logits, text, lengths: self.processors(penalise(logits, text, lengths), text, lengths)

    def tokens(self, count: int) -> Tensor:
        """Tokens (B,): the count-th new one of each row, pad where it has fewer."""
        sequences = self._sequences
        tokens = sequences.text.gather(1, (sequences.start + count - 1)[:, None])[:, 0]
        return tokens.masked_fill(sequences.count < count, self.pad_id or 0)

    def result(self) -> Tensor:
        """Long (B, T + n): the prompts and the new tokens so far."""
        sequences = self._sequences
        new = new_tokens(sequences.text, sequences.start, sequences.count, self.pad_id)
        return torch.cat([self.prompts.ids, new], dim=1)


def as_eos_ids(eos_token_id: int | Sequence[int] | Tensor | None) -> list[int]:
    """EOS tokens as a list, empty for None; InputError for what is no token's id."""
    found = _values("eos_token_id", eos_token_id)
    ids = list(found) if isinstance(found, Sequence) and not isinstance(found, str | bytes) else [found]
    return [] if found is None else [check_token_id("eos_token_id", each) for each in ids]


def as_pad_id(pad_token_id: int | None, eos_ids: Sequence[int]) -> int | None:
    """What fills rows: by default the first EOS token; InputError for what is no token's id."""
    found = _values("pad_token_id", pad_token_id)
    found = found[0] if isinstance(pad_token_id, Tensor) and isinstance(found, list) and len(found) == 1 else found
    return next(iter(eos_ids), None) if found is None else check_token_id("pad_token_id", found)


def _values(name: str, given: Any) -> Any:
    """What a tensor holds; anything else as it is."""
    if not isinstance(given, Tensor):
        return given
    check_plain(name, given)
    if given.is_meta:
        raise InputError(f"{name}: has no values, on the meta device")
    return given.tolist()


def resolve_max_new_tokens(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """How many tokens to generate at most; InputError unless that is at least 1."""
    check_values(max_new_tokens=max_new_tokens, max_length=max_length)
    if max_new_tokens is not None:
        return int(max_new_tokens)  # of numpy too
    left = DEFAULT_NEW_TOKENS if max_length is None else int(max_length) - prompt_length
    if left < 1:
        raise InputError(f"max_length {max_length} leaves nothing to generate after {prompt_length} prompt tokens")
    return left


@dataclass
class _Entered:
    """How many are within `evaluating` of a model, and its modules that were in training mode before."""

    count: int = 0
    training: list[Any] = field(default_factory=list)


_LOCK = threading.Lock()
_ENTERED: dict[int, _Entered] = {}
"""By the id of the model, which lives as long as somebody is within."""


@contextmanager
def evaluating(model: ModuleLike) -> Iterator[None]:
    """Put a model in eval mode; afterwards each module gets its own training flag back, and FSDP2 its parameters.

    Where several threads do so at once, the first to enter saves the flags, and the last to leave restores them.
    """
    with _LOCK:
        entered = _ENTERED.setdefault(id(model), _Entered())
        if not entered.count:
            reshard(model)
            entered.training = [module for module in model.modules() if module.training]
            if entered.training:
                model.eval()
        entered.count += 1
    try:
        yield
    finally:
        with _LOCK:
            entered.count -= 1
            if not entered.count:
                del _ENTERED[id(model)]
                reshard(model)
                for module in entered.training:
                    module.training = True


def until_eos(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """The new tokens of a row up to its first EOS, which it keeps: what follows is padding."""
    end = next((place for place, token in enumerate(tokens, start=1) if token in eos_ids), len(tokens))
    return list(tokens[:end])
