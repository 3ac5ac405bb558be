"""Plain autoregressive generation, greedy or sampled, over any model that follows the `DecodingModel` protocol."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from ligermodels.arguments import check_names, check_token_id, is_sequence, parameter_names
from ligermodels.errors import InputError
from ligermodels.generation.context_length import GenerationLimit
from ligermodels.generation.eval_mode import evaluating
from ligermodels.generation.graph import Finished, Graphed
from ligermodels.generation.host import (
    LogitsProcessor,
    Processors,
    Stopping,
    StoppingCriterion,
    TokenStreamer,
    check_streamer,
)
from ligermodels.generation.prompts import TokenIds, prepare_prompts
from ligermodels.generation.routing import GenerateOutput, RoutingBuffer, check_given
from ligermodels.generation.sampling import check_sampling, check_values, greedy, penalise_repetition, sample
from ligermodels.generation.step import DecodingModel, Process, Step, new_tokens
from ligermodels.layers.sharding import chosen_together, end_of_decoding, is_sharded, require_same_on_ranks
from ligermodels.ops.runtime.checks import check_plain
from ligermodels.ops.runtime.dispatch import batch_invariant_if

DEFAULT_NEW_TOKENS = 64


@overload
def generate(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = ...,
    *,
    return_routing: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def generate(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = ...,
    *,
    return_routing: Literal[True],
    **options: Any,
) -> GenerateOutput: ...


@torch.no_grad()  # Not inference_mode: the returned ids may be used in training.
def generate(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    on_token: Callable[[Tensor], bool | None] | None = None,
    streamer: TokenStreamer | None = None,
    return_routing: bool = False,
    **options: Any,
) -> Tensor | GenerateOutput:
    """Continue each prompt, by default greedily, until it ends or has `max_new_tokens` new tokens.

    An EOS token, a stop string or a stopping criterion ends a sequence. The model is in eval mode during the call; each
    module gets its training flag back. If parameters are sharded, all ranks must pass the same `max_new_tokens`; they
    decode until the sequences of all ranks are finished.

    Args:
        model: the model, for example a `CausalLM`.
        input_ids: long (B, T) or (T,), one list of ids, or a list of such lists, of any lengths.
        max_new_tokens: most new tokens of a sequence, at least 1; by default `max_length` less T, or 64.
        on_token: called after each step with its tokens (B,), `pad_token_id` for finished sequences; generation stops
            when it returns True. If parameters are sharded, it must do so on all ranks after the same step, as ranks
            wait for each other; `stopping_criteria` end sequences of one rank.
        streamer: an object as transformers' `TextStreamer`: `put` is called with the prompts (B, T), then with the
            tokens (B,) of each step, all on the CPU; `end` is called last.
        return_routing: also return the experts of each token, of a mixture of experts: the result is a
            `GenerateOutput`.
        options: any of the following.

            max_length: most tokens of a prompt, padding included, and its continuation; ignored with `max_new_tokens`.
            attention_mask: (B, T), 1 on tokens and 0 on padding, which may be on any side. Only with a tensor of ids.
                Default: as in transformers, 0 on tokens of a tensor that equal `pad_token_id`, unless it is an EOS
                token too; lists of ids are prompts without padding.
            do_sample: sample instead of greedy decoding. Default: False. The next four options apply only then.
            temperature: above 0; logits are divided by it. Default: 1.
            top_k: sample from the k most probable tokens; None or 0: from all.
            top_p: in [0, 1]; sample from the fewest tokens with a total probability of at least top_p. Default: 1.
            min_p: in [0, 1]; drop tokens below min_p times the highest probability. Default: none.
            num_return_sequences: samples per prompt, in adjacent rows. Above 1 only with `do_sample`. Default: 1.
            repetition_penalty: above 0; logits of tokens that are in the sequence are divided by it, or multiplied if
                negative (Keskar et al., 2019). Default: 1.
            logits_processor: list of functions (ids (B, T + n), fp32 scores (B, V)) -> scores (B, V), as transformers'
                `LogitsProcessorList`; called after the repetition penalty, before temperature and filters.
            eos_token_id: token or tokens that end a sequence, which keeps the token. Default: None.
            stop_strings: text or texts that end a sequence once it contains one; the beginning of the text may be in
                the prompt. Needs `tokenizer`.
            tokenizer: has `decode(ids, skip_special_tokens=False)`: a `ligermodels.Tokenizer` or a transformers one.
            stopping_criteria: list of functions (ids (B, T + n), None) -> bool or bool (B,), True where a sequence
                ends, as transformers' `StoppingCriteriaList`.
            pad_token_id: fills shorter prompts on the left and finished sequences on the right. Default: the first
                EOS token.
            generator: `torch.Generator` on the model's device, for sampling.
            routing: the experts of each token, in place of the routers' choice: integers (B, T to T + n, layers with
                experts, experts per token), as a `GenerateOutput` has them, or with all layers; -1 for the router's
                choice, and for tokens beyond the last column. Default: None, the routers choose.
            cuda_graph: on a GPU, record the decode step as a CUDA graph and replay it, except with sharded parameters.
                Sampling and `logits_processor` run between replays. Kernels may differ with and without a graph: in
                16-bit dtypes rounding may then decide between equal logits. Default: True.
            batch_invariant: compute bits of logits that do not depend on the other sequences of the batch, as
                `ops.set_batch_invariant` does. Default: False, as the model and that setting say.

    Returns:
        Long (B, T + n) on the model's device: the prompts, padded on the left, then n <= max_new_tokens new tokens, n
        being the number of the longest sequence. With `return_routing` a `GenerateOutput`, whose `sequences` they are.

    Raises:
        InputError: an empty prompt, a token id outside the vocabulary, a mask or a routing that does not fit, an option
            out of its range, sequences of different lengths with neither `pad_token_id` nor `eos_token_id`, or
            `stop_strings` without a tokenizer.

    Examples:
        >>> model = lm.from_config(CONFIG)
        >>> generate(model, [[3, 1, 4], [7, 9]], max_new_tokens=5, pad_token_id=0).shape
        torch.Size([2, 8])
        >>> generate(model, [3, 1, 4], 5, do_sample=True, top_p=0.9, num_return_sequences=3).shape
        torch.Size([3, 8])
    """
    check_values(on_token=on_token, return_routing=return_routing)
    check_streamer(streamer)
    check_names("generate", options, (*NAMES, "on_token", "streamer", "return_routing"))
    decoding = Decoding(model, input_ids, max_new_tokens, **options)
    decoding.returns_routing = return_routing
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
    return decoding.output() if return_routing else decoding.result()


def stream(
    model: DecodingModel, input_ids: TokenIds, max_new_tokens: int | None = None, **options: Any
) -> Iterator[Tensor]:
    """Yield the new tokens of `generate` step by step.

    The model is in eval mode until the iterator ends or is closed. If parameters are sharded, all ranks must take the
    same number of steps, as ranks wait for each other.

    Args:
        model: the model, for example a `CausalLM`.
        input_ids: long (B, T) or (T,), one list of ids, or a list of such lists, of any lengths.
        max_new_tokens: most new tokens of a sequence, at least 1; by default `max_length` less T, or 64.
        options: the options of `generate` (`do_sample`, `eos_token_id` ...), without `on_token` and `streamer`.

    Returns:
        Iterator of long (B,), the tokens of a step, `pad_token_id` for finished sequences.

    Raises:
        InputError: at the call, for arguments that `generate` refuses.

    Examples:
        >>> model = lm.from_config(CONFIG)
        >>> for tokens in stream(model, [[3, 1, 4], [7, 9]], max_new_tokens=2, pad_token_id=0):
        ...     print(tokens.shape)
        torch.Size([2])
        torch.Size([2])
    """
    check_names("stream", options, NAMES)
    decoding = Decoding(model, input_ids, max_new_tokens, **options)
    return (decoding.tokens(count) for count in decoding.steps(streamed=True))


class Decoding:
    """One call of `generate` or `stream`: its arguments, documented at `generate` and checked here, and its steps."""

    returns_routing = False

    def __init__(
        self,
        model: DecodingModel,
        input_ids: TokenIds,
        max_new_tokens: int | None = None,
        *,
        max_length: int | None = None,
        attention_mask: Tensor | None = None,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        num_return_sequences: int = 1,
        repetition_penalty: float | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        stopping_criteria: Sequence[StoppingCriterion] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        routing: Tensor | None = None,
        cuda_graph: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        check_values(do_sample=do_sample, cuda_graph=cuda_graph, generator=generator, batch_invariant=batch_invariant)
        check_values(repetition_penalty=repetition_penalty, num_return_sequences=num_return_sequences)
        self.model, self.eos_ids = model, as_eos_ids(eos_token_id)
        self.pad_id = as_pad_id(pad_token_id, self.eos_ids)
        self.prompts = prepare_prompts(input_ids, attention_mask, self.pad_id, self.eos_ids, model.config.vocab_size)
        self.max_new_tokens = resolve_max_new_tokens(max_new_tokens, max_length, self.prompts.ids.shape[1])
        check_values(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        temperature = 1.0 if temperature is None else float(temperature)
        if do_sample:
            check_sampling(temperature, top_k, top_p, min_p)
        batch, length = self.prompts.ids.shape
        count = num_return_sequences or 1  # None for the default
        self.prompts = self.prompts.for_samples(count, do_sample)
        self.given_routing = None
        if routing is not None:
            given = check_given(routing, batch, length, self.max_new_tokens)
            self.given_routing = given.repeat_interleave(count, 0)
        self.penalty = 1.0 if repetition_penalty is None else float(repetition_penalty)
        self.cuda_graph, self.samples = cuda_graph is not False, do_sample
        self.generator, self.batch_invariant = generator, batch_invariant
        self.choose: Callable[[Tensor], Tensor] = greedy
        if do_sample:
            filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            self.choose = partial(sample, **filters, generator=generator)  # type: ignore[arg-type]
        self.processors = Processors(logits_processor, self.prompts, self.pad_id)
        self.stopping = Stopping(stopping_criteria, stop_strings, tokenizer, self.prompts)
        if self.stopping and self.pad_id is None and len(self.prompts.ids) > 1:
            raise InputError("sequences may end at different lengths: give pad_token_id (or eos_token_id)")

    @torch.no_grad()
    def steps(self, *, streamed: bool) -> Generator[int, None, None]:
        """Decode. After each step, yield the number of new tokens of the sequences that are not finished.

        `streamed`: the caller reads `tokens` between steps, so none may run ahead.
        """
        prompt_lengths = self.prompts.mask.sum(dim=1).tolist()
        with evaluating(self.model):
            step = self._first_step()
            with batch_invariant_if(self.batch_invariant):  # not while the caller has the tokens of a step
                sequences = self._sequences = step.start(*self.prompts)
            on_host = self.samples or bool(self.processors)
            take_step = self._graphed(step, on_host)
            all_done = end_of_decoding(self.model)
            # A superfluous step must not reach the caller, functions on the host or the random generator.
            finished = Finished(step.state.device, not (streamed or on_host or self.stopping))
            may_end = bool(self.eos_ids or self.stopping)
            limit, longest = GenerationLimit(self.model), max(prompt_lengths)
            for count in range(1, self.max_new_tokens + 1):
                if self.stopping:
                    # In place: a CUDA graph reads `done`. Finished sequences gain no more tokens.
                    sequences.done.logical_or_(self.stopping(self.result(), sequences.done))
                limit(longest + count - 1)  # the newest token is not read yet
                yield count
                if may_end and finished(all_done(sequences.done)) is not None:
                    break
                if count == self.max_new_tokens:
                    break
                with batch_invariant_if(self.batch_invariant):
                    if step.thresholds.switches.isdisjoint(length + count - 1 for length in prompt_lengths):
                        take_step()
                    else:
                        step.prefill_again(sequences, self.prompts.ids.shape[1] + count - 1)

    def _first_step(self) -> Step:
        """The decode step, with an empty state; moves the prompts to the model's device."""
        advice = "give all the same max_new_tokens; max_length leaves prompts of other lengths another number"
        require_same_on_ranks(self.model, "max_new_tokens", self.max_new_tokens, advice)
        batch, length = self.prompts.ids.shape
        state = self.model.new_state(batch, max(1, length + self.max_new_tokens - 1))
        if self.samples and self.generator is not None and self.generator.device.type != state.device.type:
            raise InputError(f"generator: is on {self.generator.device}, and the model on {state.device}")
        self.prompts = self.prompts.to(state.device)
        choose = chosen_together(self.model, self.choose)
        self._routing = None
        if self.returns_routing or self.given_routing is not None:
            given = None if self.given_routing is None else self.given_routing.to(state.device)
            padding = length - self.prompts.mask.sum(dim=1)
            self._routing = RoutingBuffer(state.max_length, self.returns_routing, given, padding)
        return Step(
            self.model, state, self.max_new_tokens, self.eos_ids, choose, self._process(), routing=self._routing
        )

    def _graphed(self, step: Step, on_host: bool) -> Callable[[], Tensor]:
        """A function that takes a step, in a CUDA graph where possible.

        A graph would replay the same random numbers, and cannot hold functions on the host: with `on_host` it ends
        before the choice of the token.
        """
        sequences, device = self._sequences, step.state.device
        enabled = self.cuda_graph and not is_sharded(self.model)
        run = Graphed(partial(step.run, sequences), device, enabled and on_host)
        return Graphed(lambda: step.accept(sequences, *run()), device, enabled and not on_host)

    def _process(self) -> Process | None:
        penalise = None if self.penalty == 1.0 else partial(penalise_repetition, penalty=self.penalty)
        if not self.processors:
            return penalise
        if penalise is None:
            return self.processors
        return lambda logits, text, lengths: self.processors(penalise(logits, text, lengths), text, lengths)

    def tokens(self, count: int) -> Tensor:
        """New token number `count`, from 1, of each sequence: long (B,), padding for shorter sequences."""
        sequences = self._sequences
        tokens = sequences.text.gather(1, (sequences.start + count - 1)[:, None])[:, 0]
        return tokens.masked_fill(sequences.count < count, self.pad_id or 0)

    def result(self) -> Tensor:
        """Long (B, T + n): the prompts and the new tokens so far."""
        sequences = self._sequences
        new = new_tokens(sequences.text, sequences.start, sequences.count, self.pad_id)
        return torch.cat([self.prompts.ids, new], dim=1)

    def output(self) -> GenerateOutput:
        """The prompts and the new tokens so far, with the experts of each token."""
        ids, sequences, routing = self.result(), self._sequences, cast(RoutingBuffer, self._routing)
        padding = self.prompts.ids.shape[1] - sequences.start
        # The newest token of each sequence has not been computed.
        known = sequences.start + sequences.count - 1
        return GenerateOutput(ids, routing.result(ids.shape[1], padding, known))


NAMES = tuple(parameter_names(Decoding.__init__)[2:])
"""Names of the options of `generate` and `stream`, `input_ids` and `max_new_tokens` included."""


def as_eos_ids(eos_token_id: int | Sequence[int] | Tensor | None) -> list[int]:
    """EOS tokens as a list, empty for None. Raises InputError for anything that is no token id."""
    value = _plain("eos_token_id", eos_token_id)
    ids = value if is_sequence(value) else [value]
    return [] if value is None else [check_token_id("eos_token_id", token) for token in ids]


def as_pad_id(pad_token_id: int | Tensor | None, eos_ids: Sequence[int]) -> int | None:
    """The padding token, by default the first EOS token. Raises InputError for anything that is no token id."""
    value = _plain("pad_token_id", pad_token_id)
    if value is not pad_token_id and is_sequence(value) and len(value) == 1:  # a tensor of shape (1,)
        (value,) = value
    return next(iter(eos_ids), None) if value is None else check_token_id("pad_token_id", value)


def _plain(name: str, value: Any) -> Any:
    """A tensor as a number or a list; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    check_plain(name, value)
    if value.is_meta:
        raise InputError(f"{name}: has no values, on the meta device")
    return value.tolist()


def resolve_max_new_tokens(max_new_tokens: int | None, max_length: int | None, prompt_length: int) -> int:
    """Most tokens to generate for each prompt.

    Args:
        max_new_tokens: the caller's limit of new tokens, or None.
        max_length: limit of prompt and new tokens; used if `max_new_tokens` is None.
        prompt_length: tokens of the longest prompt.

    Returns:
        `max_new_tokens`, or else max_length - prompt_length, or else DEFAULT_NEW_TOKENS.

    Raises:
        InputError: the result is below 1.
    """
    check_values(max_new_tokens=max_new_tokens, max_length=max_length)
    if max_new_tokens is not None:
        return int(max_new_tokens)  # may be a number of numpy
    if max_length is None:
        return DEFAULT_NEW_TOKENS
    if max_length <= prompt_length:
        raise InputError(f"max_length {max_length} leaves nothing to generate after {prompt_length} prompt tokens")
    return int(max_length) - prompt_length


def until_eos(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """The new tokens of a sequence up to and including its first EOS token; padding follows."""
    end = next((length for length, token in enumerate(tokens, start=1) if token in eos_ids), len(tokens))
    return list(tokens[:end])
