"""The convolution before linear attention over texts and packed documents, and the gated norm after it, with
gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import Where
from op_harness import LAYOUTS, check, contiguous, wide
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.causal_conv_kernels import BACKWARD_SPAN
from ligermodels.ops.linear_attention.causal_conv_kernels import MAX_KERNEL_WIDTH as MAX_CONV_WIDTH
from ligermodels.ops.norm.gated_rms_norm import MAX_KERNEL_WIDTH

ACTIVATIONS = ("silu", None)


def plain_conv(
    x: Tensor,
    weight: Tensor,
    earlier: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """By torch's convolution."""
    width = weight.shape[1]
    before = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if earlier is None else earlier
    y = F.conv1d(wide(torch.cat([before, x], dim=1)).mT, wide(weight)[:, None], bias, groups=weight.shape[0])
    return (y if activation is None else F.silu(y)).mT.to(x.dtype)


@pytest.mark.parametrize(
    ("batch", "tokens", "channels", "width"),
    [
        (2, 1, 7, 4), (1, 2, 300, 3), (1, 9, 3, 1), (1, 9, 3, 7), (2, 6, 5, 2), (1, 9, 3, MAX_CONV_WIDTH),
        (1, 9, 3, MAX_CONV_WIDTH + 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_texts(
    where: Where, batch: int, tokens: int, channels: int, width: int, layout: Callable, activation: str | None
) -> None:
    op, plain = partial(ops.causal_conv, activation=activation), partial(plain_conv, activation=activation)
    x = layout(torch.randn(batch, tokens, channels, device=where.device).to(where.dtype))
    weight = torch.randn(channels, width, device=where.device).to(where.dtype)
    check(op, plain, [x, weight], frozen=layout is contiguous)
    earlier = torch.randn(batch, width - 1, channels, device=where.device).to(where.dtype)
    check(lambda x, w: op(x, w, earlier=earlier), lambda x, w: plain(x, w, earlier.to(x.dtype)), [x, weight])
    check(lambda x, w, e: op(x, w, earlier=e), plain, [x, weight, earlier])


@pytest.mark.parametrize("width", [4, 2, 7, MAX_CONV_WIDTH + 1])
def test_biases(where: Where, width: int) -> None:
    """Over texts, with packed documents, after earlier inputs, in steps and in trees."""
    x = torch.randn(1, 2 * BACKWARD_SPAN + 3, 9, device=where.device).to(where.dtype)
    weight = torch.randn(9, width, device=where.device).to(where.dtype)
    bias, earlier = (torch.randn(shape, device=where.device).to(where.dtype) for shape in ((9,), (1, width - 1, 9)))

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return plain_conv(x, weight, bias=wide(bias))

    check(ops.causal_conv, plain, [x, weight, bias])
    bounds = torch.tensor([0, 3, BACKWARD_SPAN + 1, x.shape[1]], device=where.device, dtype=torch.int32)
    check(
        lambda x, w, b: ops.causal_conv(x, w, b, cu_seqlens=bounds),
        lambda x, w, b: torch.cat([plain(part, w, b) for part in x.tensor_split([3, BACKWARD_SPAN + 1], 1)], dim=1),
        [x, weight, bias],
    )
    x = x[:, :5]
    after = ops.causal_conv(x, weight, bias, earlier=earlier)
    torch.testing.assert_close(after, plain_conv(x, weight, earlier, wide(bias)))
    parent, depth = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]], device=where.device)
    assert torch.equal(ops.causal_conv(x, weight, bias, earlier=earlier, tree=(parent, depth)), after)
    inputs = earlier.clone()
    steps = [ops.causal_conv_step(x[:, t : t + 1], weight, inputs, bias) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), after)


@pytest.mark.parametrize("width", [2, 4, 7])
def test_texts_longer_than_a_program_takes(where: Where, width: int) -> None:
    x = torch.randn(2, BACKWARD_SPAN + 2, 5, device=where.device).to(where.dtype)
    weight = torch.randn(5, width, device=where.device).to(where.dtype)
    check(lambda x, w: ops.causal_conv(x, w), plain_conv, [x, weight])


@pytest.mark.parametrize("lengths", [[1, 5, 0, 2, BACKWARD_SPAN - 8, 3, 1, 30], [BACKWARD_SPAN, 2]])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [4, 2, 3, 7])
def test_packed_documents(where: Where, lengths: list[int], activation: str | None, width: int) -> None:
    """Of one or two tokens, of none, and at the bounds of what a program takes."""
    x = torch.randn(1, sum(lengths), 11, device=where.device).to(where.dtype)
    weight = torch.randn(11, width, device=where.device).to(where.dtype)
    bounds = torch.tensor([0, *lengths], device=where.device).cumsum(0).int()

    def apart(x: Tensor, weight: Tensor) -> Tensor:
        parts = [part for part in x.split(lengths, 1) if part.shape[1]]
        return torch.cat([plain_conv(part, weight, activation=activation) for part in parts], dim=1)

    check(lambda x, w: ops.causal_conv(x, w, cu_seqlens=bounds, activation=activation), apart, [x, weight])


def plain_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    y = wide(x) / (wide(x).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (y * wide(weight) * F.silu(wide(z))).to(x.dtype)


def sigmoid_gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    y = wide(x) / (wide(x).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (y * wide(weight) / (1 + torch.exp(-wide(z)))).to(x.dtype)


def norm_of_sigmoid_gated(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    y = wide(x) / (1 + torch.exp(-wide(z)))
    return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide(weight)).to(x.dtype)


def norm_of_gated(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    y = wide(x) * F.silu(wide(z))
    return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * wide(weight)).to(x.dtype)


@pytest.mark.parametrize("shape", [(1, 5), (3, 5, 64), (2, 7, 3, 100), (70, 2, 96), (2, 0, 3, 8)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_norm(where: Where, shape: tuple[int, ...], layout: Callable) -> None:
    x = layout(torch.randn(shape, device=where.device).mul(3).to(where.dtype))
    z = layout(torch.randn(shape, device=where.device).mul(3).to(where.dtype))
    weight = torch.randn(shape[-1], device=where.device)
    op = lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6)  # noqa: E731
    check(op, plain_norm, [x, z, weight], frozen=layout is contiguous)
    assert op(x, z, weight).is_contiguous()


@pytest.mark.parametrize("shape", [(1, 5), (3, 1, 64), (2, 7, 3, 100), (70, 2, 96), (2, 0, 3, 8)], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["norm of gated", "gated norm"])
@pytest.mark.parametrize("of_heads", [False, True], ids=["one weight", "a weight of each head"])
def test_both_orders_of_gate_and_norm(where: Where, shape: tuple[int, ...], before: bool, of_heads: bool) -> None:
    """As Mamba2 has them; both results differ, so an order that is ignored fails."""
    x, z = (torch.randn(shape, device=where.device).mul(3).to(where.dtype) for _ in range(2))
    weight = torch.randn(shape[-2:] if of_heads else shape[-1], device=where.device)
    op = lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6, norm_before_gate=before)  # noqa: E731
    check(op, plain_norm if before else norm_of_gated, [x, z, weight])


@pytest.mark.parametrize("shape", [(1, 5), (2, 7, 3, 100), (2, 0, 3, 8)], ids=str)
@pytest.mark.parametrize("before", [False, True], ids=["norm of gated", "gated norm"])
def test_sigmoid_gates(where: Where, shape: tuple[int, ...], before: bool) -> None:
    x, z = (torch.randn(shape, device=where.device).mul(3).to(where.dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=where.device)
    op = lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6, before, activation="sigmoid")  # noqa: E731
    check(op, sigmoid_gated_norm if before else norm_of_sigmoid_gated, [x, z, weight])


def test_gates_that_are_slices_of_wider_rows(where: Where) -> None:
    """As of a projection whose rows hold more than the gate, of one token and of many."""
    for batch, tokens in ((1, 1), (2, 33)):
        row = torch.randn(batch, tokens, 130, device=where.device).mul(20).to(where.dtype)
        x = torch.randn(batch, tokens, 6, 16, device=where.device).to(where.dtype)
        z = row[..., 7:103].unflatten(-1, (6, 16))
        weight = torch.randn(16, device=where.device)
        check(lambda x, z, w: ops.gated_rms_norm(x, z, w, 1e-6), plain_norm, [x, z, weight])


def test_rows_wider_than_the_kernel_holds(where: Where) -> None:
    x, z = torch.randn(2, 1, 1, MAX_KERNEL_WIDTH + 1, device=where.device).to(where.dtype)
    weight = torch.randn(MAX_KERNEL_WIDTH + 1, device=where.device)
    torch.testing.assert_close(ops.gated_rms_norm(x, z, weight, 1e-6), plain_norm(x, z, weight))


@pytest.mark.kernels
def test_registration(kernels_device: torch.device) -> None:
    x, weight = torch.randn(2, 5, 9, device=kernels_device), torch.randn(9, 4, device=kernels_device)
    heads, scale = torch.randn(2, 5, 3, 3, device=kernels_device), torch.randn(3, device=kernels_device)
    for name, arguments in {
        "causal_conv_forward": (x, weight, weight[:, 0], None, None, True),
        "causal_conv_backward": (x, x, weight, weight[:, 0], None, None, False, True, True, True),
        "gated_rms_norm_forward": (heads, heads, scale, 1e-6, True, True),
        "gated_rms_norm_backward": (heads, heads, heads, scale, 1, True, True, 1e-6, False, True),
    }.items():
        op = getattr(torch.ops.ligermodels, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_bad_input() -> None:
    x, weight = torch.zeros(1, 3, 5), torch.zeros(5, 4)
    parent = torch.zeros(3, dtype=torch.long)
    with pytest.raises(InputError, match="causal_conv: weight must be"):
        ops.causal_conv(x, weight[1:])
    with pytest.raises(InputError, match="causal_conv: earlier must be"):
        ops.causal_conv(x, weight, earlier=x[:, 1:])
    with pytest.raises(InputError, match="causal_conv: tree's depth must be"):
        ops.causal_conv(x, weight, tree=(parent, parent[1:]))
    with pytest.raises(InputError, match="without earlier inputs or a tree"):
        ops.causal_conv(x, weight, tree=(parent, parent), cu_seqlens=parent.int())
    with pytest.raises(InputError, match="causal_conv: activation: 'gelu' is not implemented; give 'silu' or None"):
        ops.causal_conv(x, weight, activation="gelu")
    with pytest.raises(InputError, match="gated_rms_norm: z must be"):
        ops.gated_rms_norm(x, x[:, :2], torch.zeros(5), 1e-6)
    with pytest.raises(InputError, match="gated_rms_norm: activation 'tanh' is unknown; there are: silu, sigmoid"):
        ops.gated_rms_norm(x, x, torch.zeros(5), 1e-6, activation="tanh")
    with pytest.raises(InputError, match="causal_conv_step: inputs must be contiguous"):
        ops.causal_conv_step(x[:, :1], weight, torch.zeros(1, 5, 3).mT)


def test_a_gradient_of_earlier_inputs_alone_through_a_tree(where: Where) -> None:
    """The kernel of trees has no gradient."""
    shapes = (1, 3, 5), (5, 3), (1, 2, 5)
    x, weight, earlier = (torch.randn(shape, device=where.device).to(where.dtype) for shape in shapes)
    tree = torch.tensor([0, 0, 1], device=where.device), torch.tensor([0, 1, 2], device=where.device)
    earlier.requires_grad_()
    results = [op(x, weight, earlier=earlier, tree=tree) for op in (ops.causal_conv, ops.causal_conv_reference)]
    found, wanted = (torch.autograd.grad(y.float().square().sum(), earlier)[0] for y in results)
    torch.testing.assert_close(found, wanted)
