"""Second derivatives, as of a gradient penalty, are right or an error: no op takes its gradients for constants."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_op_registration import CASES, Case, int4, make
from torch import Tensor

import ligermodels
from ligermodels import ops
from ligermodels.layers.tokens import take_tokens

OFFSETS = (2, 2, 6)


def numbers(x: Tensor, *values: int) -> Tensor:
    return torch.tensor(values, device=x.device)


MORE = {
    "grouped_mm": Case(
        lambda x, w, b: ops.grouped_mm(x, w, numbers(x, *OFFSETS).int(), b), ((6, 8), (3, 16, 8), (3, 16)), ()
    ),
    "mix_experts": Case(
        lambda x, w, *others: ops.mix_experts(
            x, w, numbers(x, 0, 2, 3, 0, 2, 3, 0, 3).view(4, 2), *others, activation=ops.GLUOptions("silu")
        ),
        ((4, 6), (4, 2), (4, 10, 6), (4, 6, 5), (4, 10), (4, 6)),
        (),
    ),
    "take_tokens": Case(lambda x: take_tokens(x.square(), numbers(x, 4, 1, 2)), ((2, 3, 5),), ()),
    "quantized_linear, twice": Case(
        lambda x: ops.quantized_linear(ops.quantized_linear(x, *int4(x, 70)).sin(), *int4(x, 20)), ((2, 70),), ()
    ),
    "attention": Case(lambda q, k, v: ops.attention(q, k, v), ((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)), ()),
    "attention with a softcap": Case(
        lambda q, k, v: ops.attention(q, k, v, softcap=5.0), ((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)), ()
    ),
}
DIFFERENTIABLE = {"_TakeRows"}
"""Functions whose backward passes are plain torch, and linear in the gradient."""


def penalty(op: Callable[..., Any], inputs: list[Tensor], *, create_graph: bool) -> Tensor:
    """The squared gradient of the sum of the op's outputs (and sines of its inputs, as ops may be linear)."""
    outputs = op(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total = torch.stack([x.sum() for x in outputs if x.requires_grad] + [x.sin().sum() for x in inputs]).sum()
    return sum(g.square().sum() for g in torch.autograd.grad(total, inputs, create_graph=create_graph))  # type: ignore[return-value]


def second_derivatives(case: Case, inputs: list[Tensor]) -> list[Tensor] | None:
    """Gradients of the penalty; None where they are refused."""
    try:
        return [*torch.autograd.grad(penalty(case.op, inputs, create_graph=True), inputs, materialize_grads=True)]
    except RuntimeError as error:
        assert any(text in str(error) for text in ("no second derivatives", "is not implemented")), error
        return None


@pytest.mark.parametrize(
    "name", [*sorted(CASES.keys() - {"cross_entropy of all terms"}), *MORE]
)  # detaches its own weights
def test_right_or_refused(name: str) -> None:
    """By differences, in float64, which the references compute; `int4` weights have a fixed dtype."""
    case = {**CASES, **MORE}[name]
    dtype = torch.float32 if "quantized" in name else torch.float64
    inputs = [x.detach().to(dtype).requires_grad_() for x in make(case, torch.device("cpu"))]
    gradients = second_derivatives(case, inputs)
    if gradients is None:
        return
    step = 1e-5
    directions = [torch.randn_like(x) for x in inputs]

    def at(sign: float) -> Tensor:
        moved = [(x + sign * step * v).detach().requires_grad_() for x, v in zip(inputs, directions, strict=True)]
        return penalty(case.op, moved, create_graph=False)

    wanted = (at(1.0) - at(-1.0)) / (2 * step)
    ours = torch.stack([(g * v).sum() for g, v in zip(gradients, directions, strict=True)]).sum()
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_kernels_refuse(name: str, kernels_device: torch.device) -> None:
    assert second_derivatives(CASES[name], make(CASES[name], kernels_device)) is None


def functions() -> Iterator[type]:
    for module in pkgutil.walk_packages(ligermodels.__path__, "ligermodels."):
        if not module.name.endswith("__main__") and not module.name.startswith("ligermodels.integrations"):
            importlib.import_module(module.name)
    for kind in torch.autograd.Function.__subclasses__():
        if kind.__module__.startswith("ligermodels."):
            yield kind


def test_every_autograd_function_refuses_or_is_differentiable() -> None:
    """Also those that need several GPUs."""
    found = {kind.__name__: kind for kind in functions()}
    assert len(found) > 20
    unguarded = {name for name, kind in found.items() if not hasattr(kind.backward, "refuses_second_derivatives")}
    assert unguarded == DIFFERENTIABLE | {"_WithoutGradient"}  # has no first derivative
