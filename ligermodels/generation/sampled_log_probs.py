"""Samples of a model with the log-probabilities with which their tokens were drawn, in one pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ligermodels.arguments import check_names
from ligermodels.errors import InputError
from ligermodels.generation.generate import NAMES, Decoding
from ligermodels.generation.prompts import TokenIds
from ligermodels.generation.step import DecodingModel
from ligermodels.layers.sharding import is_tensor_parallel


@torch.no_grad()
def sample_with_log_probs(
    model: DecodingModel,
    input_ids: TokenIds,
    max_new_tokens: int | None = None,
    *,
    temperature: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`generate` with `do_sample`, and the log-probabilities of the new tokens from the logits that they are drawn by.

    Args:
        model: the model, for example a `CausalLM`.
        input_ids: prompts, as for `generate`.
        max_new_tokens: most new tokens of a sequence.
        temperature: above 0; logits are divided by it. Default: 1.
        options: further options of `generate`, without `do_sample`, `on_token` and `streamer`.

    Returns:
        Long (B, T + n), as of `generate`; and float32 (B, n), log softmax(logits / temperature) of the new tokens, over
        all tokens: after `repetition_penalty` and `logits_processor`, before `top_k`, `top_p` and `min_p`; with 0 on
        the padding of shorter sequences.

    Raises:
        InputError: arguments that `generate` refuses; or a tensor-parallel model.

    Examples:
        >>> model = lm.from_config(CONFIG)
        >>> ids, log_probs = sample_with_log_probs(model, [[3, 1, 4]], 5, temperature=0.7)
        >>> ids.shape, log_probs.shape
        (torch.Size([1, 8]), torch.Size([1, 5]))
    """
    if own := {"do_sample", "on_token", "streamer", "num_beams"} & options.keys():
        raise InputError(f"sample_with_log_probs: takes no {', '.join(sorted(own))}; it always samples")
    check_names("sample_with_log_probs", options, NAMES)
    if any(map(is_tensor_parallel, model.modules())):
        raise InputError("sample_with_log_probs: the model is tensor-parallel; model.log_probs(ids, ids) computes them")
    temperature = 1.0 if temperature is None else temperature
    decoding = Decoding(model, input_ids, max_new_tokens, temperature=temperature, do_sample=True, **options)
    decoding.choose = recorded = _Recorded(decoding.choose, temperature)
    counts = list(decoding.steps(streamed=True))  # no step runs ahead
    ids, start = decoding.result(), decoding.prompts.ids.shape[1]
    lengths = decoding._sequences.count[:, None]
    log_probs = torch.stack(recorded.steps[: len(counts)], 1)[:, : ids.shape[1] - start]
    is_padding = torch.arange(log_probs.shape[1], device=ids.device) >= lengths
    return ids, log_probs.masked_fill(is_padding, 0.0)


class _Recorded:
    """`choose`, logits (B, V) -> tokens (B,), with the log-probabilities (B,) of the tokens of each call in `steps`."""

    def __init__(self, choose: Callable[[Tensor], Tensor], temperature: float) -> None:
        self._choose, self._temperature, self.steps = choose, temperature, list[Tensor]()

    def __call__(self, logits: Tensor) -> Tensor:
        tokens = self._choose(logits)
        log_probs = (logits.float() / self._temperature).log_softmax(-1)
        self.steps.append(log_probs.gather(1, tokens[:, None])[:, 0])
        return tokens
