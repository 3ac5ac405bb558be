"""The linear layer of a large weight on a CPU: against float64; where it is torch's own; and as the head of a model."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.ops.linear.linear import LARGE

ONEDNN = torch.backends.mkldnn.is_available()
K = 129
N = -(-LARGE // K)  # just large


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call without gradients of operands that fit one another, whether oneDNN computes it."""
    module, calls = sys.modules["ligermodels.ops.linear.linear"], []
    few_rows, onednn = module.BACKENDS

    def noted(*given: Any) -> bool:
        calls.append(onednn.supports(*given))
        return calls[-1]

    monkeypatch.setattr(module, "BACKENDS", (few_rows, onednn._replace(supports=noted)))
    return calls


def operands(rows: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((*rows, K), (N, K), (N,)))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [(1,), (), (3,), (2, 1), (2, 4), (17,)], ids=str)
@torch.no_grad()
def test_against_float64(served: list[bool], rows: tuple[int, ...], bias: bool) -> None:
    x, weight, added = operands(rows)
    given = (x, nn.Parameter(weight), added) if bias else (x, weight)
    found, exact = ops.linear(*given), F.linear(*(each.double() for each in given))
    assert served == [ONEDNN] and found.shape == (*rows, N) and found.dtype == torch.float32 and found.is_contiguous()
    assert (found - exact).norm() <= max(1e-6 * exact.norm(), 1.5 * (F.linear(*given) - exact).norm())


@torch.no_grad()
def test_strides_and_neighbours(served: list[bool]) -> None:
    """A NaN stays in its row, and strides of x, also of its batch, make no difference."""
    x, weight, _ = operands((4, 2))
    wanted = ops.linear(x, weight)
    around = torch.full((6, 4, 2 * K), float("nan"))
    around[1:-1, 1:-1, ::2] = x
    for strided in (around[1:-1, 1:-1, ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(ops.linear(strided, weight), wanted)
    x[0, 0, 5] = float("nan")
    found = ops.linear(x, weight)
    assert found[0, 0].isnan().all() and torch.equal(found[0, 1], wanted[0, 1]) and torch.equal(found[1:], wanted[1:])
    assert served == [ONEDNN] * 4


def test_what_is_left_to_torch(served: list[bool]) -> None:
    x, weight, bias = operands()
    with torch.no_grad():
        for more in (
            (x.double(), weight.double()),
            (x.bfloat16(), weight.bfloat16()),
            (x, weight.t().contiguous().t()),
            (x[:0], weight),
            (x.to("meta"), weight.to("meta")),
        ):
            found, wanted = ops.linear(*more), F.linear(*more)
            assert found.is_meta if wanted.is_meta else torch.equal(found, wanted)
        with torch.autocast("cpu", torch.bfloat16):
            assert ops.linear(x, weight).dtype == torch.bfloat16
        with torch.backends.mkldnn.flags(enabled=False):
            assert torch.equal(ops.linear(x, weight), F.linear(x, weight))
        for wrong in ((x, weight[:, :-1]), (x, weight.double()), (x, weight, bias[:-1])):
            with pytest.raises(RuntimeError):
                ops.linear(*wrong)
        assert not any(served)
        small = weight[:-1].narrow(0, 0, (LARGE - 1) // K)
        assert torch.equal(ops.linear(x, small), F.linear(x, small)) and not any(served)
    weight.requires_grad_()
    ops.linear(x, weight).sum().backward()
    assert weight.grad is not None and not any(served)


def test_as_the_head_of_a_model(served: list[bool]) -> None:
    """Logits without gradients are those with, and greedy tokens those of a model in float64."""
    config = {**CONFIGS["llama-3.2"], "vocab_size": -(-LARGE // CONFIGS["llama-3.2"]["hidden_size"])}
    model = lm.from_config(config).eval()
    ids = torch.randint(3, config["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(ids).logits
    assert served.count(True) == ONEDNN
    torch.testing.assert_close(logits, model(ids).logits.detach(), rtol=1e-4, atol=1e-5)
    served.clear()
    tokens = model.generate(ids, max_new_tokens=4, eos_token_id=None)
    assert served.count(True) == ONEDNN * 4
    assert torch.equal(tokens, model.double().generate(ids, max_new_tokens=4, eos_token_id=None))
