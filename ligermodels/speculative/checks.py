"""Checks of the files of draft heads, and their report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from ligermodels.errors import ConfigWarning, LigerModelsError

TOLERANCE = 1e-4
"""Largest relative error of a float32 computation that rounding explains."""
ROWS = 1024
"""Rows of an lm_head whose logits are compared."""


@dataclass(frozen=True)
class Check:
    """A check of a report.

    name: what is checked, such as "layer ids".
    found: what the files say; of a failed check, the mismatch.
    passed: None if an earlier mismatch left it out.
    """

    name: str
    found: str
    passed: bool | None


@dataclass(frozen=True)
class HeadsReport:
    """The result of `verify_heads`: the checks, in order, and the kind of the heads."""

    kind: str
    checks: Sequence[Check]

    @property
    def first_mismatch(self) -> Check | None:
        """The first check that failed; None if there is none."""
        return next((check for check in self.checks if check.passed is False), None)

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return self.first_mismatch is None


class Mismatch(Exception):
    """A check failed; the message names the tensor or field, and both values."""


def report_of(kind: str, checks: Iterable[tuple[str, Callable[[], str]]]) -> HeadsReport:
    """Run checks up to the first mismatch.

    Args:
        kind: kind of the heads.
        checks: name -> a function that returns what it found. It raises `Mismatch`, or an error of the package.
    """
    results, failed = list[Check](), False
    for name, check in checks:
        if failed:
            results.append(Check(name, "not checked", None))
            continue
        try:
            with catch_warnings(), torch.device("cpu"):  # whatever torch's default device is
                simplefilter("ignore", ConfigWarning)  # the checks say the same
                results.append(Check(name, check(), True))
        except (Mismatch, LigerModelsError) as error:
            results.append(Check(name, str(error), False))
            failed = True
    return HeadsReport(kind, results)


def require(right: bool, problem: str) -> None:
    """Raise `Mismatch` with this message unless `right`."""
    if not right:
        raise Mismatch(problem)


def check_values(tensors: Mapping[str, Tensor]) -> str:
    """Require finite values of all tensors, name -> tensor."""
    for name, tensor in tensors.items():
        finite = not tensor.is_floating_point() or bool(tensor.isfinite().all())
        require(finite, f"{name}: has values that are infinite or not a number")
    return f"{len(tensors)} tensors, all finite"


def compare(places: Iterator[tuple[str, Tensor, Tensor]]) -> str:
    """Compare results of the package with the formulas, in the order of the computation.

    Args:
        places: name, result of the package, and result of the formulas, of equal shapes.
    """
    worst, names = 0.0, list[str]()
    for name, ours, formula in places:
        error = ((ours.double() - formula).abs().max() / formula.abs().max().clamp(min=1e-30)).item()
        require(error <= TOLERANCE, f"{name}: relative error {error:.1e}, above {TOLERANCE:.0e}")
        worst = max(worst, error)
        names.append(name)
    return f"{', '.join(names)}: relative error {worst:.1e}"


def random(seed: int, *shape: int) -> Tensor:
    """fp32 numbers of the normal distribution, always the same for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
