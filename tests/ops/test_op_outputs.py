"""Outputs of ops require a gradient exactly if they depend on an operand that does, whichever operands are frozen."""

import pytest
import torch
from test_op_registration import CASES, Case, make, opaque_calls
from torch import Tensor
from torch.utils import _pytree as pytree

from ligermodels import ops

MORE = {
    "gated_delta_rule and the state": Case(
        lambda q, k, v, g, beta, state: ops.gated_delta_rule(q, k, v, -g * g, beta, initial_state=state),
        ((2, 5, 1, 4), (2, 5, 1, 4), (2, 5, 2, 3), (2, 5, 2), (2, 5, 2), (2, 2, 4, 3)),
        (),
    ),
    "ssd and the state": Case(
        lambda x, dt, a, b, c, d, state: ops.ssd(x, dt * dt, -a * a, b, c, d, initial_state=state),
        ((2, 5, 2, 3), (2, 5, 2), (2,), (2, 5, 1, 4), (2, 5, 1, 4), (2,), (2, 2, 4, 3)),
        (),
    ),
    "float8_add_rms_norm": Case(
        lambda x, r, w: ops.float8_add_rms_norm(x, r, w, 1e-6, dtype=torch.float8_e4m3fn),
        ((16, 64), (16, 64), (64,)),
        (),
    ),
    "ssd of a wide state": Case(
        lambda x, dt, a, b, c, d: ops.ssd(x, dt * dt, -a * a, b, c, d),
        ((1, 3, 1, 2), (1, 3, 1), (1,), (1, 3, 1, 130), (1, 3, 1, 130), (1,)),
        (),
    ),
}
SEVERAL = {name: case for name, case in {**CASES, **MORE}.items() if len(case.shapes) > 1 and name != "attention"}
"""Ops of several operands; "attention" names its backend, and has one output."""


def outputs_of(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    outputs = case.op(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def depends(output: Tensor, operand: Tensor) -> bool:
    """Whether the gradient is not zero."""
    if not output.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(output.square().sum(), operand, retain_graph=True, materialize_grads=True)
    return bool(gradient.any())


@pytest.mark.kernels
@pytest.mark.parametrize("name", SEVERAL)
def test_outputs_without_dependence_on_trained_operands_are_constants(name: str, kernels_device: torch.device) -> None:
    torch.manual_seed(1)  # the mask of linear_distillation keeps some rows
    case = SEVERAL[name]
    operands = range(len(case.shapes))
    for operand in operands:
        inputs = make(case, kernels_device, frozen=[other for other in operands if other != operand])
        with ops.set_backend("reference"):
            wanted = [depends(output, inputs[operand]) for output in outputs_of(case, inputs)]
        found = [output.requires_grad for output in outputs_of(case, inputs)]
        assert found == wanted, f"operand {operand} alone requires a gradient"


def called_directly() -> dict[str, str]:
    """Opaque op -> the first case that calls it."""
    return {node: name for name, case in reversed(CASES.items()) for node in case.nodes}


@pytest.mark.kernels
@pytest.mark.parametrize("node", called_directly())
def test_a_backward_pass_through_an_opaque_op_is_an_error(node: str, kernels_device: torch.device) -> None:
    """As in a program of torch.export, which has no autograd.Function around the op; no gradient is left out."""
    seen = opaque_calls(called_directly()[node], kernels_device)
    op, args = next((op, args) for op, args in seen if op.name() == f"ligermodels::{node}")
    args = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), args)
    needed = any(x.requires_grad for x in pytree.tree_leaves(args) if isinstance(x, Tensor))
    outputs = op(*args)
    for output in [outputs] if isinstance(outputs, Tensor) else outputs:
        assert output.requires_grad == (needed and output.is_floating_point())
        if not output.requires_grad:
            continue
        with pytest.raises(RuntimeError, match=rf"{node} has no gradient.* torch\.no_grad\(\)"):
            output.sum().backward()
    with torch.no_grad():
        assert not any(x.requires_grad for x in pytree.tree_leaves(op(*args)))
