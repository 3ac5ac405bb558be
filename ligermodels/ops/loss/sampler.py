"""What a sampler does to logits before it draws a token: a temperature, then top-k, top-p and min-p.

With effective logits x (head of `token_losses`), a temperature t and the kept classes K of a row, the tokens are drawn
from softmax(x / t) over K. K is found as by transformers' warpers, in their order:

- top-k keeps the k largest logits, and all that equal the k-th;
- top-p drops the most classes of least probability whose total probability is at most 1 - top_p, but keeps one class;
  of equal logits it drops the first classes first (transformers' own sort leaves their order open);
- min-p drops classes less probable than min_p times the largest probability.

So K is an interval of logits, but for the first classes of those at its lower end (`cutoffs`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import is_number, is_whole
from ligermodels.errors import InputError
from ligermodels.ops.loss.token_losses import LogitRows
from ligermodels.ops.runtime.checks import assert_async, check_tensor


class SamplerOptions(NamedTuple):
    """The classes that a sampler keeps, in the order of the arguments of the registered op."""

    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0


def dropped_classes(bits: Tensor, first: int, num_classes: int) -> Tensor:
    """Whether each class from `first` on is dropped, bool (M, num_classes).

    Args:
        bits: uint8 (M, bytes), see `LogitRows`.
        first: the first class, a multiple of 8.
        num_classes: the number of classes.
    """
    part = bits[:, first // 8 : num_bytes(first + num_classes)].unsqueeze(-1)
    return ((part >> _places(part.device)) & 1).bool().flatten(1)[:, :num_classes]


def num_bytes(num_classes: int) -> int:
    """The number of bytes with a bit for each class."""
    return -(-num_classes // 8)


def pack_bits(mask: Tensor) -> Tensor:
    """bool (M, V) -> uint8 (M, num_bytes(V)); see `LogitRows`."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).view(len(mask), -1, 8)
    return (padded.to(torch.uint8) << _places(mask.device)).sum(-1, dtype=torch.uint8)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def empty_sampler(
    rows: LogitRows, inverse_temperatures: Tensor | None, num_classes: int, *, filtered: bool
) -> LogitRows:
    """The rows with temperatures, and with memory for the dropped classes if there may be some.

    Args:
        rows: contiguous targets (...).
        inverse_temperatures: (...), or None.
        num_classes: the number of classes V.
        filtered: whether classes may be dropped.
    """
    rows = rows._replace(inverse_temperatures=inverse_temperatures)
    if not filtered:
        return rows
    bits = rows.losses.new_empty((*rows.losses.shape, num_bytes(num_classes)), dtype=torch.uint8)
    return rows._replace(dropped_bits=bits, log_masses=torch.empty_like(rows.losses))


def checked_sampler(op: str, top_k: Any, top_p: Any, min_p: Any) -> SamplerOptions | None:
    """The options of a sampler; None if it keeps all classes.

    Args:
        op: the op's name, for error messages.
        top_k: a whole number from 0 on, or None.
        top_p: a number in [0, 1], or None.
        min_p: a number in [0, 1], or None.

    Raises:
        InputError: an option has another type or value.
    """
    if top_k is not None and (not is_whole(top_k) or top_k < 0):
        raise InputError(f"{op}: top_k must be a whole number, 0 or above, or None, the same for all rows; got {top_k}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and (not is_number(value) or not 0 <= value <= 1):
            raise InputError(f"{op}: {name} must be a number in [0, 1] or None, the same for all rows; got {value}")
    sampled = SamplerOptions(int(top_k or 0), 1.0 if top_p is None else float(top_p), float(min_p or 0.0))
    return None if sampled == SamplerOptions() else sampled


def inverse_temperatures(
    op: str, temperature: Any, target: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor | None:
    """1 / temperature for each row, of the target's shape; None if the temperature is the number 1.

    Args:
        op: the op's name, for error messages.
        temperature: a positive number, or floating, of the target's shape, positive where there is a target.
        target: int64 (...).
        ignore_index: the target of ignored rows, whose temperature is not used.
        dtype: of the statistics.

    Raises:
        InputError: another type, shape or device, a tensor that needs a gradient, or a number, or on the CPU an
            element, that is not positive and finite. On CUDA such an element fails a device-side assertion.
    """
    if isinstance(temperature, Tensor):
        check_tensor(op, "temperature", temperature, target.shape, target.device)
        if temperature.requires_grad and torch.is_grad_enabled():
            raise InputError(f"{op}: temperature has no gradient; give temperature.detach()")
        valid = target != ignore_index
        usable = is_temperature(temperature) | ~valid
        assert_async(usable, f"{op}: temperature must be positive and finite", temperature, "temperature")
        return torch.where(valid, temperature.detach().to(dtype), 1.0).reciprocal()
    if not is_number(temperature) or not 0 < temperature < float("inf"):
        raise InputError(f"{op}: temperature must be a positive number or a tensor, got {temperature!r}")
    factor = 1 / float(temperature)
    return None if temperature == 1 else torch.full(target.shape, factor, dtype=dtype, device=target.device)


def is_temperature(x: Tensor) -> Tensor:
    """Whether each element is positive and finite, bool of x's shape."""
    return (x > 0) & (x < torch.inf)


def dropped_reference(x: Tensor, kept: SamplerOptions) -> Tensor:
    """Whether each class is dropped, bool (..., V), by sorted logits as in transformers' warpers.

    Args:
        x: (..., V), effective logits over the temperature.
        kept: the classes that are kept.
    """
    dropped = torch.zeros_like(x, dtype=torch.bool)
    if kept.top_k:
        dropped |= x < x.topk(min(kept.top_k, x.shape[-1])).values[..., -1:]
    ascending, order = x.masked_fill(dropped, -torch.inf).sort(dim=-1, stable=True)
    if kept.top_p < 1:
        improbable = ascending.softmax(-1).cumsum(-1) <= 1 - kept.top_p
        improbable[..., -1] = False
        dropped |= improbable.scatter(-1, order, improbable)
    if kept.min_p:
        p = x.softmax(-1)
        dropped |= p < kept.min_p * p.amax(-1, keepdim=True)
    return dropped
