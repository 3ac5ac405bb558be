import importlib
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import dispatch
from ligermodels.ops.token_losses import row_coefficients
from ligermodels.ops.weigh_rows import MAX_BLOCK, weigh_rows


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "ignored"), [((1,), 0.0), ((3, 5), 0.4), ((7,), 1.0), ((2, MAX_BLOCK + 3), 0.5), ((0,), 0.0)], ids=str
)
def test_coefficients(
    kernels_device: torch.device, reduction: str, weighted: torch.dtype | None, shape: tuple[int, ...], ignored: float
) -> None:
    """As in plain torch, whatever the strides and the weights of ignored rows."""
    target = torch.randint(9, shape[::-1], device=kernels_device).permute(*reversed(range(len(shape))))
    target[torch.rand(shape, device=kernels_device) < ignored] = 4
    weights = None
    if weighted is not None:
        weights = torch.rand(2 * target.numel(), device=kernels_device).to(weighted)[::2].view(shape)
        weights[target == 4] = torch.nan
    checked, found = weigh_rows(target, 9, 4, reduction, weights, torch.bfloat16)
    assert torch.equal(checked, target) and checked.is_contiguous()
    wanted = row_coefficients(target, 4, reduction, weights, torch.bfloat16)
    assert found.dtype == wanted.dtype == torch.float32 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    checked, wide = weigh_rows(target, 9, 4, reduction, weights, torch.float64)
    assert torch.equal(checked, target) and checked.is_contiguous()
    assert torch.equal(wide, row_coefficients(target, 4, reduction, weights, torch.float64))
    assert wide.dtype == torch.float64


@pytest.mark.kernels
@pytest.mark.parametrize("value", [-1, 9, 2**40, -(2**40)])
@pytest.mark.parametrize("at", [0, 3, MAX_BLOCK + 1])
def test_a_target_that_is_none(
    kernels_device: torch.device, value: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel finds it wherever it is, even among ignored ones, and nothing else."""
    module = importlib.import_module("ligermodels.ops.weigh_rows")
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "check_targets", lambda *_: None)
    monkeypatch.setattr(torch, "_assert_async", lambda good, message: asked.append((int(good), message)))
    target = torch.full((MAX_BLOCK + 2,), -100, device=kernels_device)
    target[::2] = 8
    module._weigh_rows(target, None, 9, -100, "mean", False)
    target[at] = value
    module._weigh_rows(target, None, 9, -100, "mean", False)
    module._weigh_rows(target, None, 9, value, "mean", False)  # ignored, but then the others are none
    assert [good for good, _ in asked] == [1, 0, 0]
    assert "[0, 9)" in asked[0][1] and "(-100)" in asked[0][1]


@pytest.mark.parametrize("face", ["reference", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bad_target_is_named(face: str, compiled: bool) -> None:
    """On the CPU, compiled or not, and whatever of the results is used."""

    def rank(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.cross_entropy(x, target, return_rank=True)[1]

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x, x.new_ones(9, 4), target)

    if face == "triton" and not dispatch.INTERPRETED:
        pytest.skip("a device-side assertion would end the process's use of the GPU")
    target = torch.tensor([1, 9, -100])
    for call, width in ((rank, 9), (loss, 4)):
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager") if compiled else call
        with ops.force(face), pytest.raises(InputError, match=r"target\[1\] is 9.*1 such"):
            call(torch.randn(3, width), target)


@pytest.mark.kernels
def test_a_graph_keeps_the_check(kernels_device: torch.device) -> None:
    """Though only the ranks are used: on CUDA nothing else would tell of a bad target."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def rank(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.cross_entropy(x, target, return_rank=True)[1]

    torch._dynamo.reset()
    compiled = torch.compile(rank, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    compiled(torch.randn(3, 9, device=kernels_device), torch.tensor([1, 8, -100], device=kernels_device))
    assert any("weigh_rows" in name for name in found)
