"""The short causal convolution of Gated DeltaNet, Mamba2 and LFM2: depthwise (each channel by itself), then SiLU or
nothing."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.causal_conv_kernels import MAX_KERNEL_WIDTH, CausalConv, tree_conv
from ligermodels.ops.runtime.checks import check_rising, check_tensor
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.ops.runtime.library import reject_dtensors


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    earlier: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    tree: tuple[Tensor, Tensor] | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """silu(bias + sum over s < W of weight[:, W - 1 - s] * x[:, t - s]), for each token t and channel.

    It computes in fp32 (fp64 for fp64), with equal bits in every run. Differentiable in x, weight, bias and earlier.

    Args:
        x: (B, T, C), any floating dtype.
        weight: (C, W), any floating dtype. The kernels serve W up to 8, torch wider ones.
        bias: (C,), any floating dtype, or None.
        earlier: (B, W - 1, C) of x's dtype, the inputs before the first token; zeros when None.
        cu_seqlens: int32 (n + 1,), bounds of documents that are packed into one row (B = 1), from 0 to T: each document
            has zeros before its first token. Excludes `earlier` and `tree`.
        tree: for tokens that form a tree, two long (T,), or (B, T) where each sequence has its own: each token's parent
            (the root is its own parent) and its distance from the root; see `conv_sources`. `earlier` precedes the
            root.
        activation: "silu", or None for the sum itself.

    Returns:
        Contiguous (B, T, C) of x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or cu_seqlens is given with another layout, or, on the CPU,
            does not rise from 0 to T; or the activation is unknown.
    """
    _check(x, weight, bias, earlier, cu_seqlens, tree)
    silu = is_silu("causal_conv", activation)
    reference = partial(
        causal_conv_reference, x, weight, bias, earlier=earlier, cu_seqlens=cu_seqlens, tree=tree, activation=activation
    )
    if not use_kernels(x, weight, bias, earlier) or weight.shape[1] > MAX_KERNEL_WIDTH or 0 in x.shape:
        return reference()
    if tree is None and (earlier is None or not earlier.requires_grad):
        first = None if cu_seqlens is None else first_tokens(x, cu_seqlens)
        return CausalConv.apply(x, weight, bias, earlier, first, silu)
    operands = x, weight, bias, earlier
    if tree is None or (torch.is_grad_enabled() and any(t.requires_grad for t in operands if t is not None)):
        return reference()
    return tree_conv(x, weight, bias, earlier, *tree, silu)


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, earlier: Tensor | None = None,
    cu_seqlens: Tensor | None = None, tree: tuple[Tensor, Tensor] | None = None, activation: str | None = "silu",
) -> Tensor:  # fmt: skip
    """The specification of `causal_conv`, in plain torch, with the same arguments x, weight, bias, earlier, cu_seqlens,
    tree and activation."""
    tokens, width = x.shape[1], weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs = F.pad(x, (0, 0, width - 1, 0)) if earlier is None else torch.cat([earlier, x], dim=1)
    inputs, taps = inputs.to(wide), weight.to(wide)
    first = None if cu_seqlens is None else first_tokens(x, cu_seqlens)
    sources = None if tree is None else conv_sources(*tree, width)
    token, row = torch.arange(tokens, device=x.device), torch.arange(x.shape[0], device=x.device)[:, None]
    total = torch.zeros((), dtype=wide, device=x.device) if bias is None else bias.to(wide)
    for back in range(width):
        start = width - 1 - back
        seen = inputs[:, start : start + tokens] if sources is None else inputs[row, sources[..., back]]
        if first is not None:
            seen = seen.masked_fill((token - back < first)[:, None], 0)
        total = total + seen * taps[:, start]
    return (F.silu(total) if activation == "silu" else total).to(x.dtype)


def conv_sources(parent: Tensor, depth: Tensor, width: int) -> Tensor:
    """Indices of the inputs that each node of a tree sees in a causal convolution.

    Args:
        parent: long (N,) or (B, N), each node's parent; the root is its own parent.
        depth: long (N,) or (B, N), each node's distance from the root.
        width: inputs per output, W.

    Returns:
        long (N, W) or (B, N, W): column s is the index of the input s tokens before the node. Index 0 is the first of
        the W - 1 inputs before the root, so node i has index W - 1 + i.
    """
    node = torch.arange(parent.shape[-1], device=parent.device).expand_as(parent)
    columns = []
    for back in range(width):
        columns.append(torch.where(depth >= back, node, depth - back) + width - 1)
        node = parent.gather(-1, node)
    return torch.stack(columns, dim=-1)


def is_silu(op: str, activation: str | None) -> bool:
    """Whether the activation after the convolution is SiLU; InputError, naming `op`, if it is neither SiLU nor None."""
    if activation not in (None, "silu"):
        raise InputError(f"{op}: activation: {activation!r} is not implemented; give 'silu' or None")
    return activation == "silu"


def first_tokens(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Int32 (T,): the first token of each token's document."""
    token = torch.arange(x.shape[1], device=x.device)
    return cu_seqlens[torch.bucketize(token, cu_seqlens[1:], right=True)]


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor | None, cu_seqlens: Tensor | None,
    tree: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    name = "causal_conv"
    reject_dtensors(name, x, weight, bias, earlier)
    check_tensor(name, "x", x, ("B", "T", "C"))
    batch, tokens, channels = x.shape
    check_tensor(name, "weight", weight, (channels, "W"), x.device)
    check_tensor(name, "bias", bias, (channels,), x.device, optional=True)
    shape = (batch, weight.shape[1] - 1, channels)
    check_tensor(name, "earlier", earlier, shape, x.device, x.dtype, optional=True)
    if cu_seqlens is not None and (earlier is not None or tree is not None):
        raise InputError(f"{name}: cu_seqlens: packed documents go without earlier inputs or a tree; give one of them")
    for part, nodes in zip(("parent", "depth"), tree or (None, None), strict=True):
        own = nodes is not None and nodes.dim() == 2
        check_tensor(
            name, f"tree's {part}", nodes, (batch, tokens) if own else (tokens,), x.device, torch.long, optional=True
        )
    check_tensor(name, "cu_seqlens", cu_seqlens, ("n",), x.device, torch.int32, optional=True)
    if cu_seqlens is not None and batch != 1:
        raise InputError(f"{name}: documents are packed into one row, but x has {batch}; flatten x to (1, T, C)")
    check_rising(name, cu_seqlens, tokens)
