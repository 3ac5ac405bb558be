"""Ops on fake tensors outside of a compiler, as in estimates of memory: nothing reads a value."""

from collections.abc import Callable

import pytest
import torch
from test_op_registration import CASES, Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ligermodels import ops

COUNTED = {
    "linear_cross_entropy": lambda h, w, y: ops.linear_cross_entropy(h, w, y, num_targets=2),
    "linear_log_probs": lambda h, w, y: ops.linear_log_probs(h, w, y, num_targets=2, temperature=torch.ones(6)),
    "linear_distillation": lambda h, w, y: ops.linear_distillation(h, w, h, w, y != -100, num_tokens=2),
}


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"attention"}))  # asks for kernels
def test_both_passes(name: str, backend: str | None) -> None:
    case: Case = CASES[name]
    with ops.set_backend(backend), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, requires_grad=True) for shape in case.shapes]
        outputs = case.op(*inputs)
        outputs = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if x is not None]
        gradients = torch.autograd.grad([x.sum() for x in outputs if x.requires_grad], inputs)
        assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("window", [None, 2])
def test_packed_attention(window: int | None) -> None:
    with FakeTensorMode():
        q, k = (torch.empty(1, 7, heads, 16, requires_grad=True) for heads in (4, 2))
        bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
        assert ops.attention(q, k, k, cu_seqlens=bounds, window=window).shape == q.shape


@pytest.mark.parametrize("name", COUNTED)
def test_a_known_number_of_targets(name: str) -> None:
    op: Callable[..., Tensor] = COUNTED[name]
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, 8, requires_grad=True) for rows in (6, 20))
        gradient, _ = torch.autograd.grad(op(hidden, weight, torch.zeros(6, dtype=torch.long)).sum(), [hidden, weight])
        assert gradient.shape == hidden.shape
