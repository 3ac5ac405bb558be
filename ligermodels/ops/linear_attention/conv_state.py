"""The decoding state of the causal convolution, its last W - 1 inputs, updated in place: by a token, or by an accepted
path of a tree."""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.causal_conv import causal_conv_reference, conv_sources, is_silu
from ligermodels.ops.linear_attention.causal_conv_kernels import BLOCK, WARPS
from ligermodels.ops.runtime.checks import Signature, check_tensor, check_tensors
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors
from ligermodels.ops.runtime.tensors import contiguous

_STEP = Signature(x="B 1 C", weight="C W", bias="C ?")
_COMMIT = Signature(x="B N C", node="B int64")


def causal_conv_step(
    x: Tensor, weight: Tensor, inputs: Tensor, bias: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """`causal_conv` of one token per sequence. A CUDA graph can capture the call. No gradient.

    Args:
        x: (B, 1, C), any floating dtype, the token's inputs.
        weight: (C, W), any floating dtype.
        inputs: contiguous (B, W - 1, C) of x's dtype, the inputs before the token; updated in place to the inputs
            before the next token.
        bias: (C,), any floating dtype, or None.
        activation: "silu", or None for the sum itself.

    Returns:
        Contiguous (B, 1, C) of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, the activation is unknown, or autograd would need a gradient.
    """
    op = "causal_conv_step"
    _STEP.check(op, x, weight, bias)
    _check_inputs(op, x, inputs, weight.shape[1], weight, bias)
    silu = is_silu(op, activation)
    if not use_kernels(x, weight, inputs, bias):
        return causal_conv_step_reference(x, weight, inputs, bias, activation)
    return _causal_conv_step(x, weight, inputs, bias, silu)


def causal_conv_step_reference(
    x: Tensor, weight: Tensor, inputs: Tensor, bias: Tensor | None = None, activation: str | None = "silu"
) -> Tensor:
    """The specification of `causal_conv_step`, in plain torch, with the same arguments x, weight, inputs, bias and
    activation."""
    y = causal_conv_reference(x, weight, bias, earlier=inputs, activation=activation)
    inputs.copy_(torch.cat([inputs, x], dim=1)[:, 1:])
    return y


def commit_conv_inputs(inputs: Tensor, x: Tensor, node: Tensor, tree: tuple[Tensor, Tensor]) -> None:
    """Moves the decoding state from before the root of each tree to after one of its nodes, in place. A CUDA graph can
    capture the call.

    Args:
        inputs: contiguous (B, W - 1, C), the inputs before the root; becomes the last W - 1 inputs at the node.
        x: (B, N, C) of the dtype of `inputs`, the inputs of the nodes.
        node: long (B,), the accepted node of each sequence.
        tree: two long (N,), or (B, N) where each sequence has its own: each node's parent (the root is its own parent)
            and its distance from the root.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `inputs` is not contiguous.
    """
    op, (parent, depth) = "commit_conv_inputs", tree
    _COMMIT.check(op, x, node)
    check_tensors(op, inputs=inputs)
    _check_inputs(op, x, inputs, inputs.shape[1] + 1)
    for name, nodes in (("parent", parent), ("depth", depth)):
        shape = (x.shape[1],) if nodes.dim() == 1 else tuple(x.shape[:2])
        check_tensor(op, f"tree's {name}", nodes, shape, x.device, torch.long)
    if not use_kernels(inputs, x):
        commit_conv_inputs_reference(inputs, x, node, tree)
    else:
        _commit_conv_inputs(inputs, x, node, parent, depth)


def commit_conv_inputs_reference(inputs: Tensor, x: Tensor, node: Tensor, tree: tuple[Tensor, Tensor]) -> None:
    """The specification of `commit_conv_inputs`, in plain torch, with the same arguments inputs, x, node and tree."""
    sequence = torch.arange(len(x), device=x.device)
    sources = conv_sources(*tree, inputs.shape[1]).expand(len(x), -1, -1)[sequence, node]
    # indices into the inputs followed by x
    inputs.copy_(torch.cat([inputs, x], dim=1)[sequence[:, None], sources.flip(1) + 1])


def _check_inputs(op: str, x: Tensor, inputs: Tensor, width: int, *parameters: Tensor | None) -> None:
    reject_dtensors(op, x, inputs, *parameters)
    check_tensor(op, "inputs", inputs, (x.shape[0], width - 1, x.shape[2]), x.device, x.dtype)
    if not inputs.is_contiguous():
        raise InputError(f"{op}: inputs must be contiguous, it is changed in place: call .contiguous()")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, inputs, *parameters)):
        raise InputError(f"{op} has no gradient: call it under torch.no_grad()")


@kernel
def _conv_step_kernel(
    x, x_batch, weight, bias, inputs, out, C, blocks,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes BLOCK channels of a sequence. It reads all values that it changes before any of its threads
    writes. BEFORE: a power of two, at least WIDTH - 1."""
    wait_for_previous(PDL)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, BEFORE)[:, None]
    stored = inputs + (batch * (WIDTH - 1) + place) * C + channel[None, :]
    inside = (place < WIDTH - 1) & (channel < C)[None, :]
    new = tl.load(x + batch * x_batch + channel, mask=channel < C, other=0.0)
    before = tl.load(stored, mask=inside, other=0.0)
    taps = tl.load(weight + channel[None, :] * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
    last = tl.load(weight + channel * WIDTH + (WIDTH - 1), mask=channel < C, other=0.0).to(tl.float32)
    y = tl.sum(before.to(tl.float32) * taps, axis=0) + new.to(tl.float32) * last
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=channel < C, other=0.0).to(tl.float32)
    tl.debug_barrier()
    tl.store(stored - C, before, mask=inside & (place > 0))
    if WIDTH > 1:
        tl.store(inputs + (batch * (WIDTH - 1) + WIDTH - 2) * C + channel, new, mask=channel < C)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + batch * C + channel, y.to(out.dtype.element_ty), mask=channel < C)


@kernel
def _commit_conv_kernel(
    inputs, x, x_batch, x_token, node, parent, depth, tree_batch, C, blocks,
    WIDTH: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK channels of a sequence, and walks up from the node to find the last inputs."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    place = tl.arange(0, BEFORE)
    at = tl.load(node + batch)
    parent += batch * tree_batch
    level = tl.load(depth + batch * tree_batch + at)
    source = tl.zeros((BEFORE,), tl.int64)  # a node or, below 0, an earlier input
    for back in tl.static_range(WIDTH - 1):
        source = tl.where(place == WIDTH - 2 - back, tl.where(level >= back, at, level - back), source)
        at = tl.load(parent + at)
    inside = (place < WIDTH - 1)[:, None] & (channel < C)
    of_node = (source >= 0)[:, None]
    inputs += batch * (WIDTH - 1) * C
    new = tl.load(x + batch * x_batch + source[:, None] * x_token + channel, mask=inside & of_node, other=0.0)
    old = tl.load(inputs + (source + (WIDTH - 1))[:, None] * C + channel, mask=inside & ~of_node, other=0.0)
    tl.debug_barrier()
    tl.store(inputs + place[:, None] * C + channel, tl.where(of_node, new, old), mask=inside)


@custom_op(mutates_args=("inputs",))
def _causal_conv_step(x: Tensor, weight: Tensor, inputs: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    out = x.new_empty(x.shape)
    if is_fake(out):
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    (batch, _, channels), width = x.shape, weight.shape[1]
    blocks = -(-channels // BLOCK)
    if batch and channels:
        _conv_step_kernel[(batch * blocks,)](
            x, x.stride(0), weight.contiguous(), contiguous(bias), inputs, out, channels, blocks,
            HAS_BIAS=bias is not None, SILU=silu, WIDTH=width, BEFORE=power_of_2_above(width - 1), BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return out


@custom_op(mutates_args=("inputs",))
def _commit_conv_inputs(inputs: Tensor, x: Tensor, node: Tensor, parent: Tensor, depth: Tensor) -> None:
    if is_fake(inputs):
        return
    x = x if x.stride(2) == 1 else x.contiguous()
    batch, before, channels = inputs.shape
    blocks = -(-channels // BLOCK)
    if batch and before and channels:
        _commit_conv_kernel[(batch * blocks,)](
            inputs, x, x.stride(0), x.stride(1), node.contiguous(), parent.contiguous(), depth.contiguous(),
            x.shape[1] if parent.dim() == 2 else 0, channels, blocks,
            WIDTH=before + 1, BEFORE=power_of_2_above(before), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
