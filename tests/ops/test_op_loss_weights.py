from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.loss.token_losses import checked_loss_weights
from ligermodels.ops.runtime import dispatch


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "ignored"), [((1,), 0.0), ((3, 5), 0.4), ((7,), 1.0), ((0,), 0.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights(
    reduction: str, weighted: torch.dtype | None, shape: tuple[int, ...], ignored: float, dtype: torch.dtype
) -> None:
    """By a loop over the rows, whatever the strides and the weights of ignored rows."""
    target = torch.randint(9, shape[::-1]).permute(*reversed(range(len(shape))))
    target[torch.rand(shape) < ignored] = 4
    weights = None
    if weighted is not None:
        weights = torch.rand(2 * target.numel()).to(weighted)[::2].view(shape)
        weights[target == 4] = torch.nan
    checked, found = checked_loss_weights(target, 9, 4, reduction, weights, dtype)
    assert torch.equal(checked, target) and checked.is_contiguous() and found.is_contiguous()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and found.shape == target.shape
    each = [1.0] * target.numel() if weights is None else weights.flatten().tolist()
    wanted = [0.0 if y == 4 else weight for y, weight in zip(target.flatten().tolist(), each, strict=True)]
    total = sum(wanted) if reduction == "mean" else 1.0
    torch.testing.assert_close(
        found.flatten().tolist(), [w / total if total else 0.0 for w in wanted], rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_bad_target_is_named(backend: str, compiled: bool) -> None:
    """On the CPU, compiled or not, and whatever of the results is used."""

    def rank(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.cross_entropy(x, target, return_rank=True)[1]

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x, x.new_ones(9, 4), target)

    if backend == "triton" and not dispatch.INTERPRETED:
        pytest.skip("a device-side assertion would end the process's use of the GPU")
    target = torch.tensor([1, 9, -100])
    for call, width in ((rank, 9), (loss, 4)):
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager") if compiled else call
        with ops.set_backend(backend), pytest.raises(InputError, match=r"but target\[1\] is 9"):
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
    assert any("loss_weights" in name for name in found)


def losses(op: str, token_weights: torch.Tensor, **options: Any) -> Any:
    hidden, weight, target = torch.randn(6, 8), torch.randn(9, 8), torch.tensor([1, 2, -100, 4, 0, 8])
    if op == "linear_distillation":
        return ops.linear_distillation(
            hidden, weight, hidden, weight, target >= 0, token_weights=token_weights, **options
        )
    inputs = (hidden @ weight.T, target) if op == "cross_entropy" else (hidden, weight, target)
    return getattr(ops, op)(*inputs, token_weights=token_weights, **options)


@pytest.mark.parametrize("bad", [-0.5, torch.nan])
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy", "linear_distillation", "class weights"])
def test_a_mean_by_negative_weights_is_refused(op: str, bad: float) -> None:
    """Weights below 0, such as advantages, would turn the sign of a mean, which is divided by their sum."""
    options: dict[str, Any] = {"class_weights": torch.rand(9)} if op == "class weights" else {}
    op = "cross_entropy" if options else op
    weights = torch.tensor([1.0, 1.0, -1.0, 1.0, bad, 1.0])
    with pytest.raises(InputError, match='token_weights: must not be negative with the reduction "mean"'):
        losses(op, weights, **options)
    for reduction in ("sum", "none"):
        losses(op, weights, reduction=reduction, **options)
    weights[4] = 0.0
    assert losses(op, weights, **options).isfinite()  # an ignored row may have any weight
