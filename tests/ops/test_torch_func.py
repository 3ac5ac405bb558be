"""Transforms of torch.func (grad, vmap, jvp) through ops are right or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_op_registration import CASES, Case, make
from torch import Tensor

from ligermodels import ops

# A mask, or the sign of weights, is read before the op; on a GPU it is asserted there, and attention reads addresses.
REFUSED = r"must override the setup_context|vmap: .* (\.item\(\)|data-dependent control flow)"
REFUSED += r"|Batching rule not implemented for aten::_assert_async|Cannot access data pointer of Tensor"
"""torch's errors for an autograd.Function, or a read of values or of an address, in a transform."""
CPU = torch.device("cpu")


def total(case: Case, *inputs: Tensor) -> Tensor:
    outputs = case.op(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    return torch.stack([x.square().sum() for x in outputs if x.is_floating_point()]).sum()


def gradient(case: Case, inputs: list[Tensor]) -> Any:
    return torch.func.grad(lambda *x: total(case, *x), argnums=tuple(range(len(inputs))))(*inputs)


def jvp(case: Case, inputs: list[Tensor]) -> Any:
    return torch.func.jvp(lambda *x: total(case, *x), tuple(inputs), tuple(inputs))[1:]


def vmap(case: Case, inputs: list[Tensor]) -> Any:
    return torch.func.vmap(lambda *x: total(case, *x))(*(torch.stack([x, x]) for x in inputs))


TRANSFORMS = gradient, jvp, vmap


def wanted(transform: Callable[..., Any], case: Case, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = total(case, *leaves)
    if transform is vmap:
        return [value.detach().expand(2)]
    gradients = torch.autograd.grad(value, leaves)
    if transform is jvp:
        return [torch.stack([(g * x).sum() for g, x in zip(gradients, inputs, strict=True)]).sum()]
    return [*gradients]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention"}))  # asks for kernels
def test_right_or_refused(name: str, transform: Callable[..., Any]) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    inputs = [x.detach() for x in make(case, CPU)]
    with ops.set_backend("reference"):
        try:
            found = transform(case, inputs)
        except RuntimeError as error:
            assert pytest.raises(RuntimeError, match=REFUSED).matches(error), error
            return
        found = [found] if isinstance(found, Tensor) else list(found)
        torch.testing.assert_close(found, wanted(transform, case, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_refuse(name: str, transform: Callable[..., Any], kernels_device: torch.device) -> None:
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match=REFUSED):
        transform(CASES[name], [x.detach() for x in make(CASES[name], kernels_device)])
