"""The loss of a row of logits: its options, its weight in the reduced loss, and the records of the numbers of each
row.

For a row of logits l and its target y, with effective logits x = logit_scale * l, or softcap * tanh(logit_scale * l /
softcap) (Gemma 2, https://arxiv.org/abs/2408.00118), and lse = log sum exp x:

    loss = lse - (1 - label_smoothing) * x_y - label_smoothing * mean(x) + z_loss * lse^2

(label smoothing as torch and https://arxiv.org/abs/1512.00567, z-loss as PaLM, https://arxiv.org/abs/2204.02311). The
head of `loss_terms` has the formula with class weights and token scaling.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.arguments import LARGEST, is_number, is_whole
from ligermodels.errors import InputError, short
from ligermodels.ops.runtime.checks import assert_async, check_tensor
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import empty_like

Reduction = Literal["mean", "sum", "none"]


_RANGES = {
    "label_smoothing": (0.0, 1.0, "in [0, 1]"),
    "z_loss": (0.0, LARGEST, "0 or above, and finite"),
    "softcap": (math.ulp(0.0), LARGEST, "positive and finite, or None"),
    "logit_scale": (math.ulp(0.0), LARGEST, "positive and finite"),
}
"""The least and the largest value of the options."""


class LossOptions(NamedTuple):
    """Options of the loss of a row, in the order of the arguments of the registered ops."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def check(self, op: str, reduction: str) -> None:
        """Raises InputError, naming `op`, for a number out of its range, or an unknown reduction."""
        check_reduction(op, reduction)
        if not (torch.compiler.is_compiling() or is_whole(self.ignore_index)):
            raise InputError(f"{op}: ignore_index must be a whole number, got {short(self.ignore_index)}")
        if not self.are_plain:
            self._check_ranges(op)

    @property
    def are_plain(self) -> bool:
        """Whether the loss of a row is the cross entropy of its logits as they are."""
        return self[1:] == LossOptions()[1:]

    def _check_ranges(self, op: str) -> None:
        for name, (least, most, requirement) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name == "softcap":
                continue
            known = torch.compiler.is_compiling() or is_number(value)  # compiled, a number may be a symbol
            if not known or not least <= value <= most:
                raise InputError(f"{op}: {name} must be {requirement}, got {short(value)}")


class RowOutputs(NamedTuple):
    """The statistics that are requested beside the losses, in the order of `LogitRows`."""

    ranks: bool = False
    predicted: bool = False
    entropies: bool = False
    lses: bool = False
    means: bool = False


UNUSED: Any = None  # the default of fields that code reads only where they are given


class LogitRows(NamedTuple):
    """Numbers of each row of logits, (...) as the target, or flat; None for numbers that are not requested or used.

    The statistics, from losses to totals, are in the order in which registered ops return them. Ignored rows have ranks
    and predicted classes -1, totals 1, and 0 otherwise. The log-sum-exp is maximum + log(total). Kernels use these two,
    because their sum loses the digits of a small loss beside large logits.

    A class c is dropped if bit c % 8 of byte c // 8 is set. The bits, and not the logits, tell the backward pass which
    classes are kept: logits that it recomputes by other chunks may differ by a rounding.
    """

    target: Tensor  # int64
    losses: Tensor = UNUSED
    ranks: Tensor | None = None  # number of classes that rank before the target, see `cross_entropy`
    predicted: Tensor | None = None  # class of the largest logit, the first one of equal logits
    entropies: Tensor | None = None  # of softmax(x)
    lses: Tensor | None = None  # log sum exp x
    means: Tensor | None = None  # mean over the classes of class_weights * x
    maxima: Tensor = UNUSED  # of x; requested with lses
    totals: Tensor = UNUSED  # sum exp(x - maximum); requested with lses
    weights: Tensor | None = None  # of the losses, in the gradient that replaces the logits; None: no gradient
    inverse_temperatures: Tensor | None = None  # None for 1
    dropped_bits: Tensor | None = None  # uint8 (..., bytes): the classes that a sampler drops; None for no class
    log_masses: Tensor | None = None  # the log-probability of the kept classes together

    @classmethod
    def empty(cls, target: Tensor, dtype: torch.dtype, outputs: RowOutputs) -> "LogitRows":
        """Uninitialised statistics for targets (...).

        Args:
            target: int64 (...).
            dtype: of the statistics that are not integers.
            outputs: the requested statistics.
        """
        requested = (True, *outputs, outputs.lses, outputs.lses)
        dtypes = (dtype, torch.int64, torch.int64, *[dtype] * 5)
        statistics: Any = [
            target.new_empty(target.shape, dtype=dtype) if needed else None
            for needed, dtype in zip(requested, dtypes, strict=True)
        ]
        return cls(target, *statistics)

    @property
    def have_losses_alone(self) -> bool:
        """Whether losses, by the logits as they are, are the only statistics; they may have weights."""
        return all(x is None for name, x in self._asdict().items() if name not in ("target", "losses", "weights"))

    def pack(self) -> list[Tensor]:
        """The statistics that are not None, in order: the results of registered ops and autograd.Functions."""
        return [x for x in self[1:9] if x is not None]

    def dropped(self) -> list[Tensor]:
        """The dropped bits and the log masses, or nothing if all classes are kept."""
        return [x for x in (self.dropped_bits, self.log_masses) if x is not None]

    @classmethod
    def unpack(cls, target: Tensor, statistics: Iterable[Tensor | None], outputs: RowOutputs) -> "LogitRows":
        """Rows of targets (...) with packed statistics; with maxima and totals if these are among the statistics.

        Args:
            target: int64 (...).
            statistics: as from `pack`.
            outputs: the requested statistics.
        """
        remaining = iter(statistics)
        fields: Any = [next(remaining) if requested else None for requested in (True, *outputs)]
        return cls(target, *fields, *remaining)

    def chunk(self, rows: slice) -> "LogitRows":
        """Views of some rows, flat."""
        fields: Any = [None if x is None else x.reshape(-1, *x.shape[self.target.dim() :])[rows] for x in self]
        return LogitRows(*fields)

    def for_gradients(self) -> "LogitRows":
        """The fields that the gradients depend on."""
        return self._replace(losses=UNUSED, ranks=None, predicted=None, lses=None, means=None, log_masses=None)

    def fill_lses(self) -> None:
        """Computes the log-sum-exps, if requested, from maxima and totals."""
        if self.lses is not None:
            torch.add(self.maxima, self.totals.log(), out=self.lses)


class RowGradients(NamedTuple):
    """The gradients by the statistics of each row, (M,); None for 0. `losses`: by -log p_y."""

    losses: Tensor
    entropies: Tensor | None = None
    lses: Tensor | None = None
    means: Tensor | None = None

    def flat(self) -> "RowGradients":
        """Contiguous gradients (M,) from gradients (...)."""
        gradients: Any = [None if g is None else g.reshape(-1).contiguous() for g in self]
        return RowGradients(*gradients)

    def chunk(self, rows: slice) -> "RowGradients":
        """Views of some rows of flat gradients."""
        gradients: Any = [None if g is None else g[rows] for g in self]
        return RowGradients(*gradients)


def checked_loss_weights(
    target: Tensor, num_classes: int, ignore_index: int, reduction: Reduction, token_weights: Tensor | None,
    dtype: torch.dtype, divided: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Checks the targets (`check_targets`) and computes their `loss_weights`, in one op.

    A compiled graph that uses the returned targets therefore keeps the check.

    Args:
        target: int64 (...).
        num_classes: the number of classes V.
        ignore_index: the target of ignored rows.
        reduction: "mean", "sum" or "none".
        token_weights: floating (...), or None.
        dtype: the dtype of the logits or hidden states.
        divided: see `loss_weights`.

    Returns:
        A contiguous copy of the targets, and the weights, contiguous and without a gradient.
    """
    tokens, dtype = None if token_weights is None else token_weights.detach(), torch.promote_types(dtype, torch.float32)
    arguments = target, tokens, num_classes, ignore_index, reduction, dtype, divided
    return cast("tuple[Tensor, Tensor]", _loss_weights(*arguments))


@custom_op()
def _loss_weights(
    target: Tensor, token_weights: Tensor | None, num_classes: int, ignore_index: int, reduction: str,
    dtype: torch.dtype, divided: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if is_fake(target):
        return empty_like(target), target.new_empty(target.shape, dtype=dtype)
    check_targets(target, num_classes, ignore_index)
    weights = loss_weights(target, ignore_index, reduction, token_weights, dtype, divided)
    return target.clone(memory_format=torch.contiguous_format), weights.contiguous()


def loss_weights(
    target: Tensor, ignore_index: int, reduction: str, token_weights: Tensor | None, dtype: torch.dtype,
    divided: bool = True,
) -> Tensor:  # fmt: skip
    """The weight of each row in the reduced loss, for targets that have been checked; 0 for ignored rows.

    Args:
        target: int64 (...).
        ignore_index: the target of ignored rows.
        reduction: "mean" divides the weights by their sum; "sum" and "none" divide by nothing.
        token_weights: floating (...), or None for ones.
        dtype: the dtype of the logits or hidden states; the weights are at least float32.
        divided: False: "mean" divides by nothing either, as the caller does, after factors of its own.
    """
    dtype, valid = torch.promote_types(dtype, torch.float32), target != ignore_index
    weights = valid.to(dtype) if token_weights is None else torch.where(valid, token_weights.detach().to(dtype), 0.0)
    if reduction == "mean" and token_weights is not None:
        check_mean_weights(weights)
    return normalised(weights, weights) if reduction == "mean" and divided else weights


def check_mean_weights(weights: Tensor) -> None:
    """Raises InputError for a negative token weight (or NaN) of a mean; on CUDA a device-side assertion.

    Over a negative sum the mean would have the sign of the loss reversed, and over a small sum any size.
    """
    requirement = 'must not be negative with the reduction "mean", which divides by their sum'
    assert_async(weights >= 0, f'token_weights: {requirement}; give reduction="sum", divided by a number of tokens')


def normalised(weights: Tensor, divisors: Tensor) -> Tensor:
    """weights (...) / sum of divisors (...); 0 if that sum is 0."""
    total = divisors.sum()
    return torch.where(total != 0, weights / total, 0.0)


def check_reduction(op: str, reduction: str) -> None:
    """Raises InputError unless the reduction is "mean", "sum" or "none"."""
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'{op}: reduction must be "mean", "sum" or "none", got {reduction!r}')


def checked_class_weights(op: str, class_weights: Tensor, num_classes: int, x: Tensor) -> Tensor:
    """Checks the class weights, and casts them to the dtype of the losses.

    Args:
        op: the op's name, for error messages.
        class_weights: floating (num_classes,).
        num_classes: the number of classes.
        x: logits or hidden states, for device and dtype.

    Returns:
        The weights without a gradient, contiguous, float32 (float64 for float64 `x`).

    Raises:
        InputError: shape, dtype or device do not fit, or the weights are a DTensor.
    """
    reject_dtensors(op, class_weights)
    check_tensor(op, "class_weights", class_weights, (num_classes,), x.device)
    return class_weights.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def check_targets(target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Checks that each target is a class or ignored.

    On CUDA this is a device-side assertion, so that the host does not wait for the device, unless `host_checks` are on.

    Args:
        target: int64, any shape.
        num_classes: targets must be in [0, num_classes).
        ignore_index: the target of ignored rows.

    Raises:
        InputError: a target is neither a class nor `ignore_index`.
    """
    valid = (target.clamp(0, num_classes - 1) == target) | (target == ignore_index)
    message = f"target: must lie in [0, {num_classes}), or be the ignore_index ({ignore_index})"
    assert_async(valid, message, target, "target")


def with_extras(loss: Tensor, *extras: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """The loss, or a tuple of the loss and the extras that are not None."""
    returned = [x for x in extras if x is not None]
    return (loss, *returned) if returned else loss
