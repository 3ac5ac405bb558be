"""What every timed call of an op is held to, so that a provider is fast only by computing what it is asked for.

- The first call's outputs and gradients are compared whole with torch's in fp32.
- Before each call all inputs and output gradients are written anew, and the first input alternates between x and -2 x
  (`Case.change`), so that a result kept from another call, under the address of its inputs or otherwise, is wrong.
- After each call a sample of every output is compared and the outputs are overwritten with NaN, so that outputs that
  are returned again, or memory that is returned as it was, are wrong.
- After the timing the same provider must be right for another number of tokens.
- `measure.milliseconds` compares the events with the host's clock, which sees work on other streams too.

`-2 x` is exact in binary floating point, and no op here has the same result for both: norms ignore a scale and keep a
sign, losses of random logits keep a sign's mean and not a scale's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.case import Call, Case, Passes

SAMPLE, SAMPLE_LIMIT = 1024, 2 * measure.ERROR_LIMIT
"""Elements of an output that are compared after a timed call, and the relative error that they may have."""
ONE_SIZE = frozenset({"torch.compile"})
"""Providers that are made anew for another shape, by the guards of torch.compile, and so are not tried with one."""


class Truth(NamedTuple):
    """`wanted`: outputs and gradients, whole; `samples` of them, by whether the first input is the changed one."""

    seeds: list[Tensor]
    wanted: list[Tensor]
    samples: Mapping[bool, list[Tensor]]


def truth(case: Case, inputs: tuple[Tensor, ...]) -> Truth:
    """Seeds in bf16, and what plain torch finds in fp32."""
    eager = case.providers["torch"]
    seeds = Passes(case, eager, inputs).seeds
    exact = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    passes = Passes(case, eager, exact, [seed.float() for seed in seeds])
    passes.reset(changed=True)
    changed = sampled(passes.both())
    passes.reset()
    wanted = passes.both()
    return Truth(seeds, wanted, {True: changed, False: sampled(wanted)})


def sampled(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Elements of each, at equal distances, as copies in fp32."""
    flat = [y.detach().flatten() for y in outputs]
    return [y[:: (len(y) // SAMPLE) | 1].to(torch.float32, copy=True) for y in flat]


def poison(outputs: Iterable[Tensor]) -> None:
    """Overwrite with NaN, but what is expanded from fewer elements."""
    for y in outputs:
        if y.is_floating_point() and 0 not in y.stride():
            y.detach().fill_(torch.nan)


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor], when: str) -> None:
    """Raises `measure.Untrusted` unless samples agree; a forward pass has the outputs alone, which come first."""
    errors = [measure.relative_error(a, b) for a, b in zip(found, wanted, strict=False)]
    if not all(error < SAMPLE_LIMIT for error in errors):  # NaN is not
        raise measure.Untrusted(f"wrong by {measure.worst(errors):.2g} {when}")


class Checked:
    """Calls of "forward" or "both" passes: `before` and `after` belong around each, outside of what is timed."""

    def __init__(self, passes: Passes, which: str, known: Truth) -> None:
        self.passes, self.call, self.known = passes, getattr(passes, which), known
        self.changed, self.found = False, list[tuple[bool, list[Tensor]]]()

    @property
    def hooks(self) -> tuple[Callable[[], None], Callable[[Sequence[Tensor]], None]]:
        """As `measure.milliseconds` takes them."""
        return self.before, self.after

    def before(self) -> None:
        """Write the inputs anew, not as they were before the last call."""
        self.changed = not self.changed
        self.passes.reset(self.changed)

    def after(self, outputs: Sequence[Tensor]) -> None:
        """Note a sample, and poison."""
        self.found.append((self.changed, sampled(outputs)))
        poison(outputs)

    def verify(self, when: str) -> None:
        """Compare what was noted; Untrusted where a call was wrong."""
        for changed, found in self.found:
            compare(found, self.known.samples[changed], when)
        self.found.clear()


def confirm(passes: Passes, known: Truth, when: str) -> None:
    """Two calls of both passes, outside of any timing."""
    checked = Checked(passes, "both", known)
    for _ in range(2):
        checked.before()
        checked.after(checked.call())
    checked.verify(when)
    passes.reset()


class Kept:
    """A call whose last outputs can be looked at; those of a call in a CUDA graph are written by each replay."""

    def __init__(self, call: Callable[[], Sequence[Tensor]]) -> None:
        self.call = call
        self.outputs: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        self.outputs = ()
        self.outputs = self.call()
        return self.outputs


def verify_replay(every: Sequence[Passes], calls: Sequence[Kept], known: Truth, replay: Callable[[], Any]) -> None:
    """A graph of `calls` must compute anew, from inputs that change under it, what it is replayed for."""
    for changed in (True, False):
        for passes, call in zip(every, calls, strict=True):
            passes.reset(changed)
            poison(call.outputs)
        replay()
        for call in calls:
            compare(sampled(call.outputs), known.samples[changed], "when its CUDA graph is replayed")


class Other(NamedTuple):
    """A case of another number of tokens, and its truth."""

    case: Case
    inputs: tuple[Tensor, ...]
    known: Truth

    @classmethod
    def of(cls, case: Case) -> Other | None:
        """None where a case has no other shape."""
        if case.other is None:
            return None
        other = case.other()
        inputs = other.inputs()
        known = truth(other, inputs)
        return cls(other, inputs, known._replace(wanted=[]))  # The samples are enough, and smaller.

    def confirm(self, provider: str) -> None:
        """Untrusted where a provider is wrong."""
        if provider not in ONE_SIZE:
            call: Call = self.case.providers[provider]
            passes = Passes(self.case, call, self.inputs, self.known.seeds)
            confirm(passes, self.known, f"for another shape, {self.case.name}")
