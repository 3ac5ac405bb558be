"""One harness for all ops: an op against the same computation in float64 and eagerly in the op's own dtype.

`plain` is an independent torch implementation of an op that works in the dtype of what it is given, at least float32
inside where eager models do so. Run on float64 copies it is the truth; run on copies in the tested dtype it is the
eager computation, whose error is the measure: ours may be 1.5 times that, for every output and every gradient, in the
root mean square, and 2 times in the greatest element, which is one sample of chance. It may be 3 times where the
greatest of few numbers is compared: of up to 1,000 elements, or where a few great elements hold most of a tensor, so
that its squares sum to less than 100 times the greatest one (those of 1,000 normal numbers to 95 times). Of 1,200
gradients of a head computed row after row in exact float32, 25 are beyond 2 times, and 1 is beyond 3 times.

Of up to 8 numbers, which may be right by luck in the eager result, an eighth of the inputs' rounding error is allowed
on top, and at least as many float32 units again.
"""

from collections.abc import Callable, Sequence
from itertools import chain, combinations

import torch

Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
ULPS = 4  # float32 units in the last place of the greatest value, on top


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str
) -> torch.Tensor:
    """As transformers writes Llama's and Gemma's."""
    y = wide(x) / (wide(x).pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if weight is None:
        return y.to(x.dtype)
    if casting_mode == "llama":
        return (offset + weight) * y.to(x.dtype) if offset else weight * y.to(x.dtype)
    return (y * (offset + wide(weight))).to(x.dtype)


def run(
    op: Op, inputs: Sequence[torch.Tensor], needs: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs of op, and the gradients of those inputs that `needs` counts, for random gradients of the outputs.

    A scalar's is -0.5, exact whenever it is multiplied in: linear_cross_entropy does that last.
    """
    leaves = [x.detach().requires_grad_(i in needs) for i, x in enumerate(inputs)]
    outputs = op(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    differentiable, directions = [], []
    for i, x in enumerate(outputs):
        if x.requires_grad:
            differentiable.append(x)
            generator = torch.Generator(x.device).manual_seed(100 + i)
            direction = torch.randn(x.shape, generator=generator, device=x.device)
            direction = (direction * 16).round() / 16 if x.dim() else torch.tensor(-0.5)  # 16ths: exact in any dtype
            directions.append(direction.to(x))
    wanted = [leaves[i] for i in needs]
    found = iter(torch.autograd.grad(differentiable, wanted, directions) if wanted else ())
    return [x.detach() for x in outputs], [next(found) if i in needs else None for i in range(len(inputs))]


def copies(inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Contiguous copies that share nothing with the inputs, the floating ones in dtype."""
    return [
        x.detach().to(dtype if dtype and x.is_floating_point() else x.dtype, copy=True).contiguous() for x in inputs
    ]


def assert_as_good(
    name: str, ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, coarse: float = 0.0, slack: float = 1.0
) -> None:
    """ours is not much further from the truth than the eager result; how much, the head of this module says, and
    `slack` times as much.

    coarse: the rounding error of what the result was computed from."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(truth.shape)}"
    assert not ours.requires_grad
    if not truth.is_floating_point():
        assert torch.equal(ours, truth), f"{name}: {ours} where {truth} was expected"
        return
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    rounded = truth.to(ours.dtype)  # nobody can do better than this
    # A few numbers may be right by luck, in the eager result too.
    luck = max(coarse / 8, ULPS * torch.finfo(torch.float32).eps) if truth.numel() <= 8 else 0.0
    few = truth.numel() <= 1000 or truth.square().sum() < 100 * truth.square().max()
    for norm, factor in ((2.0, 1.5), (float("inf"), 3.0 if few else 2.0)):

        def size(x: torch.Tensor, norm: float = norm) -> float:
            return torch.linalg.vector_norm(x.double(), norm).item() if x.numel() else 0.0

        error = size(ours.double() - truth)
        allowed = slack * factor * max(size(eager.double() - truth), size(rounded.double() - truth))
        allowed += (ULPS * torch.finfo(torch.float32).eps + luck) * size(truth)
        assert error <= allowed, f"{name}: error {error:.3e} in norm {norm}, allowed {allowed:.3e}"


def check(op: Op, plain: Op, inputs: Sequence[torch.Tensor], *, frozen: bool = False, slack: float = 1.0) -> None:
    """op against plain: outputs and gradients, equal bits in a second run on a GPU, and inputs left alone.

    The interpreter runs programs one by one: there a second run could differ only by what the op keeps between calls,
    which the next case of the test would meet.

    slack: of gradients, see `assert_as_good`.

    The floating inputs are differentiated: all of them or, with frozen, every subset of them in turn.
    """
    floating = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    subsets = chain.from_iterable(combinations(floating, n) for n in range(len(floating))) if frozen else ()
    before = copies(inputs)
    coarse = max((torch.finfo(inputs[i].dtype).eps for i in floating), default=0.0)
    truth, true_gradients = run(plain, copies(inputs, torch.float64), floating)
    eager, eager_gradients = run(plain, copies(inputs), floating)
    for needs in (tuple(floating), *subsets):
        outputs, gradients = run(op, inputs, needs)
        for i, (ours, other, true) in enumerate(zip(outputs, eager, truth, strict=True)):
            assert_as_good(f"output {i}, needing {needs}", ours, other, true, coarse)
        for i, (ours, other, true) in enumerate(zip(gradients, eager_gradients, true_gradients, strict=True)):
            if i in needs:
                assert ours.dtype == inputs[i].dtype
                assert_as_good(f"gradient {i}, needing {needs}", ours, other, true, coarse, slack)
        again, gradients_again = run(op, inputs, needs) if inputs[0].is_cuda else (outputs, gradients)
        for one, two in zip((*outputs, *gradients), (*again, *gradients_again), strict=True):
            assert one is None or torch.equal(one, two), "a second run gave other bits"
    for x, untouched in zip(inputs, before, strict=True):
        assert torch.equal(x, untouched), "the op changed its input"


# Layouts: each gives a tensor of this shape whose strides are awkward in another way.


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def strided_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows longer than they seem, starting at an odd element: no alignment to count on."""
    base = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"))
    base[..., 1 : x.shape[-1] + 1] = x
    return base[..., 1 : x.shape[-1] + 1]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The last dimension is not the contiguous one."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def middle_transposed(x: torch.Tensor) -> torch.Tensor:
    """Dimensions 1 and 2 swapped in memory, as heads and tokens are in (B, H, T, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = [contiguous, strided_rows, transposed]
