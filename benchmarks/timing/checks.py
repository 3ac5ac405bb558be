"""Checks of every timed call of an op: a provider cannot be fast by computing less.

- All outputs and gradients of the first call are compared with torch's in fp32.
- Before each call all inputs and output gradients are rewritten, and the first input alternates between x and -2 x
  (`Case.change`). A result cached from another call, by the address of its inputs for instance, is wrong.
- After each call a sample of every output is compared, and the outputs are overwritten with NaN. Outputs that are
  returned twice, and memory that is returned without being written, are wrong.
- After the timing the provider must be right for another number of tokens.
- `measure.milliseconds` compares the events with the host's clock, so it sees work on other streams too.

`-2 x` is exact in binary floating point and changes the outputs of every op here: norms ignore the scale but keep the
sign; losses of random logits depend on the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import measure
from benchmarks.timing.case import Call, Case, Passes

SAMPLE, SAMPLE_LIMIT = 1024, 2 * measure.ERROR_LIMIT
"""Number of elements of an output that are compared after a timed call, and their largest relative error."""
ONE_SIZE = frozenset({"torch.compile"})
"""Providers that compile again for another shape, by the guards of torch.compile; they are not checked with one."""


class Truth(NamedTuple):
    """Expected results. `wanted`: all outputs and gradients. `samples`: samples of them, by whether the first input is
    changed."""

    seeds: list[Tensor]
    wanted: list[Tensor]
    samples: Mapping[bool, list[Tensor]]


def truth(case: Case, inputs: tuple[Tensor, ...]) -> Truth:
    """The expected results, computed by plain torch in fp32, and the gradients of the outputs in bf16."""
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
    """Evenly spaced elements of each output, copied in fp32."""
    flat = [y.detach().flatten() for y in outputs]
    return [y[:: (len(y) // SAMPLE) | 1].to(torch.float32, copy=True) for y in flat]


def poison(outputs: Iterable[Tensor]) -> None:
    """Overwrite outputs with NaN, except expanded ones."""
    for y in outputs:
        if y.is_floating_point() and 0 not in y.stride():
            y.detach().fill_(torch.nan)


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor], when: str) -> None:
    """Raise `measure.Untrusted` if samples differ. A forward pass has only the outputs, the first of `wanted`.

    Args:
        found: Samples of the outputs, perhaps followed by the gradients.
        wanted: Samples of the expected outputs and gradients.
        when: End of the message: when the outputs were wrong.
    """
    errors = [measure.relative_error(a, b) for a, b in zip(found, wanted, strict=False)]
    if not all(error < SAMPLE_LIMIT for error in errors):  # NaN is not
        raise measure.Untrusted(f"wrong by {measure.worst(errors):.2g} {when}")


class Checked:
    """Checked calls of "forward" or "both" passes: call `before` and `after` around each, outside the timed part."""

    def __init__(self, passes: Passes, which: str, known: Truth) -> None:
        self.passes, self.call, self.known = passes, getattr(passes, which), known
        self.changed, self.found = False, list[tuple[bool, list[Tensor]]]()

    @property
    def hooks(self) -> tuple[Callable[[], None], Callable[[Sequence[Tensor]], None]]:
        """The arguments `before` and `after` of `measure.milliseconds`."""
        return self.before, self.after

    def before(self) -> None:
        """Rewrite the inputs, with the first one changed in every other call."""
        self.changed = not self.changed
        self.passes.reset(self.changed)

    def after(self, outputs: Sequence[Tensor]) -> None:
        """Keep a sample of the outputs and overwrite them with NaN."""
        self.found.append((self.changed, sampled(outputs)))
        poison(outputs)

    def verify(self, when: str) -> None:
        """Compare the kept samples; raises `measure.Untrusted` if a call was wrong."""
        for changed, found in self.found:
            compare(found, self.known.samples[changed], when)
        self.found.clear()


def confirm(passes: Passes, known: Truth, when: str) -> None:
    """Check two untimed calls of both passes.

    Args:
        passes: Calls of a provider.
        known: Expected results.
        when: End of the message: when the outputs were wrong.
    """
    checked = Checked(passes, "both", known)
    for _ in range(2):
        checked.before()
        checked.after(checked.call())
    checked.verify(when)
    passes.reset()


class Kept:
    """A call that keeps its last outputs. Replays of a CUDA graph of the call write into them."""

    def __init__(self, call: Callable[[], Sequence[Tensor]]) -> None:
        self.call = call
        self.outputs: Sequence[Tensor] = ()

    def __call__(self) -> Sequence[Tensor]:
        self.outputs = ()
        self.outputs = self.call()
        return self.outputs


def verify_replay(every: Sequence[Passes], calls: Sequence[Kept], known: Truth, replay: Callable[[], Any]) -> None:
    """Check that each replay of a CUDA graph computes its outputs again, from inputs that changed in place.

    Args:
        every: The passes that the graph calls.
        calls: The captured calls.
        known: Expected results.
        replay: Replays the graph.
    """
    for changed in (True, False):
        for passes, call in zip(every, calls, strict=True):
            passes.reset(changed)
            poison(call.outputs)
        replay()
        for call in calls:
            compare(sampled(call.outputs), known.samples[changed], "when its CUDA graph is replayed")


class Other(NamedTuple):
    """The case for another number of tokens, and its expected results."""

    case: Case
    inputs: tuple[Tensor, ...]
    known: Truth

    @classmethod
    def of(cls, case: Case) -> Other | None:
        """The other shape of a case, or None."""
        if case.other is None:
            return None
        other = case.other()
        inputs = other.inputs()
        known = truth(other, inputs)
        return cls(other, inputs, known._replace(wanted=[]))  # samples are enough, and smaller

    def confirm(self, provider: str) -> None:
        """Raise `measure.Untrusted` if the provider is wrong."""
        if provider not in ONE_SIZE:
            call: Call = self.case.providers[provider]
            passes = Passes(self.case, call, self.inputs, self.known.seeds)
            confirm(passes, self.known, f"for another shape, {self.case.name}")
