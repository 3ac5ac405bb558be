"""The kernels of `causal_conv`: a program walks along the tokens of some channels, with the last inputs in registers.

Forward and backward pass read and write each value once. Plain torch makes some fifty passes over memory, more than a
tenth of a training step in a model that is mostly Gated DeltaNet.
"""

import torch
from torch import Tensor

from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, once_differentiable
from ligermodels.ops.runtime.tensors import contiguous, empty_gradient, empty_like

MAX_KERNEL_WIDTH = 8  # inputs per output W; the kernels hold the W - 1 inputs before each token in registers
BLOCK = 256  # channels per program
WARPS = 2
# The tokens of a program, which reads W - 1 more and in the backward pass writes one part of the weight's gradient; and
# the tokens that are loaded together, while those before them are convolved.
SPAN, AHEAD = 32, 8
BACKWARD_SPAN, BACKWARD_AHEAD = 64, 4


@triton.jit
def _bias(bias, channel, inside, HAS_BIAS: tl.constexpr):
    """The sum of no inputs: the bias, or zeros."""
    if HAS_BIAS:
        found = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        found = tl.zeros_like(channel).to(tl.float32)
    return found


@triton.jit
def _tap(weight, channel, inside, place: tl.constexpr, WIDTH: tl.constexpr):
    """The weights of one of the WIDTH inputs of a token, the earliest in place 0."""
    return tl.load(weight + channel * WIDTH + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _taps(weight, channel, inside, WIDTH: tl.constexpr):
    """A tuple of the weights of each input."""
    taps = ()
    for place in tl.static_range(WIDTH):
        taps += (_tap(weight, channel, inside, place, WIDTH),)  # type: ignore[assignment]
    return taps


@triton.jit
def _input(x, x_token, earlier, t, channel, inside, C, HAS_EARLIER: tl.constexpr, WIDTH: tl.constexpr):
    """The inputs at token t, in float32; for t < 0 from `earlier`."""
    found = tl.load(x + t * x_token + channel, mask=inside & (t >= 0), other=0.0).to(tl.float32)
    if HAS_EARLIER:
        place = t + (WIDTH - 1)
        there = inside & (t < 0) & (place >= 0)
        found += tl.load(earlier + place * C + channel, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def _inputs(x, x_token, earlier, t, channel, inside, C, HAS_EARLIER: tl.constexpr, WIDTH: tl.constexpr):
    """A tuple of the WIDTH - 1 inputs before token t, the earliest first."""
    inputs = ()
    for place in tl.static_range(1, WIDTH):
        value = _input(x, x_token, earlier, t - (WIDTH - place), channel, inside, C, HAS_EARLIER, WIDTH)
        inputs += (value,)  # type: ignore[assignment]
    return inputs


@triton.jit
def _rows(x, x_token, begin, end, channel, inside, AHEAD: tl.constexpr):
    """A tuple of the inputs at AHEAD tokens from `begin` on, zeros from `end` on."""
    rows = ()
    for place in tl.static_range(AHEAD):
        t = begin + place
        rows += (tl.load(x + t * x_token + channel, mask=inside & (t < end), other=0.0),)  # type: ignore[assignment]
    return rows


@triton.jit
def _convolved(inputs, taps, b, t, first, PACKED: tl.constexpr, WIDTH: tl.constexpr):
    """The sum at token t, and its WIDTH inputs, zeros for tokens before the first token of its document."""
    if PACKED:
        begin = tl.load(first + t)
    total = b
    seen = inputs[:0]
    for place in tl.static_range(WIDTH):
        value = inputs[place]
        if PACKED and place < WIDTH - 1:
            value = tl.where(t - (WIDTH - 1 - place) >= begin, value, 0.0)
        seen += (value,)
    for back in tl.static_range(WIDTH):
        total += seen[WIDTH - 1 - back] * taps[WIDTH - 1 - back]
    return total, seen


@kernel
def _conv_forward_kernel(
    x, x_batch, x_token, weight, bias, earlier, first, out, T, C, span, spans, blocks,
    HAS_BIAS: tl.constexpr, HAS_EARLIER: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program takes `span` tokens of BLOCK channels, AHEAD at a time, and loads the next ones before it needs
    them."""
    batch = (tl.program_id(0) // blocks // spans).to(tl.int64)
    begin = (tl.program_id(0) // blocks % spans * span).to(tl.int64)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    x += batch * x_batch
    out += batch * T * C
    if HAS_EARLIER:
        earlier += batch * (WIDTH - 1) * C
    taps, b = _taps(weight, channel, inside, WIDTH), _bias(bias, channel, inside, HAS_BIAS)
    before = _inputs(x, x_token, earlier, begin, channel, inside, C, HAS_EARLIER, WIDTH)
    end = tl.minimum(begin + span, T)
    following = _rows(x, x_token, begin, end, channel, inside, AHEAD)
    for start in range(begin, end, AHEAD):
        rows = following
        following = _rows(x, x_token, start + AHEAD, end, channel, inside, AHEAD)
        for place in tl.static_range(AHEAD):
            t = start + place
            inputs = before
            inputs += (rows[place].to(tl.float32),)
            y, _ = _convolved(inputs, taps, b, tl.minimum(t, T - 1), first, PACKED, WIDTH)
            if SILU:
                y = y / (1.0 + tl.exp(-y))
            tl.store(out + t * C + channel, y.to(out.dtype.element_ty), mask=inside & (t < end))
            before = inputs[1:]


@kernel
def _conv_backward_kernel(
    dy, dy_batch, dy_token, x, x_batch, x_token, weight, bias, earlier, first, dx, partial, T, C, span, spans, blocks,
    HAS_BIAS: tl.constexpr, HAS_EARLIER: tl.constexpr, PACKED: tl.constexpr, NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program takes `span` tokens of BLOCK channels, as in the forward kernel. The gradient of an input is
    complete WIDTH - 1 tokens later, so a program continues for as many tokens after its own. It writes its own part of
    the gradients of weight and bias, the bias as one more column: no atomics, so equal bits in every run."""
    batch = (tl.program_id(0) // blocks // spans).to(tl.int64)
    begin = (tl.program_id(0) // blocks % spans * span).to(tl.int64)
    end = tl.minimum(begin + span, T)
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    x += batch * x_batch
    dy += batch * dy_batch
    if HAS_EARLIER:
        earlier += batch * (WIDTH - 1) * C
    taps, b = _taps(weight, channel, inside, WIDTH), _bias(bias, channel, inside, HAS_BIAS)
    before = _inputs(x, x_token, earlier, begin, channel, inside, C, HAS_EARLIER, WIDTH)
    db = tl.zeros((BLOCK,), tl.float32)
    dtaps, incomplete = (db,) * WIDTH, (db,) * (WIDTH - 1)  # incomplete gradients of the inputs before t
    following = _rows(x, x_token, begin, T, channel, inside, AHEAD)
    following_dy = _rows(dy, dy_token, begin, T, channel, inside, AHEAD)
    for start in range(begin, end + (WIDTH - 1), AHEAD):
        rows, rows_dy = following, following_dy
        following = _rows(x, x_token, start + AHEAD, T, channel, inside, AHEAD)
        following_dy = _rows(dy, dy_token, start + AHEAD, T, channel, inside, AHEAD)
        for place in tl.static_range(AHEAD):
            t = start + place
            inputs, d = before, rows_dy[place].to(tl.float32)
            inputs += (rows[place].to(tl.float32),)
            # Beyond the last token d is zero, so any document will do.
            y, seen = _convolved(inputs, taps, b, tl.minimum(t, T - 1), first, PACKED, WIDTH)
            if SILU:
                e = tl.exp(-tl.abs(y))  # no overflow
                r = 1.0 / (1.0 + e)
                part = tl.where(y < 0, e * r, r)
                d = d * (part + y * e * r * r)
            if NEED_WEIGHT:
                own = tl.where(t < end, d, 0.0)
                db += own
                sums = dtaps[:0]
                for column in tl.static_range(WIDTH):
                    sums += (dtaps[column] + own * seen[column],)
                dtaps = sums
            if NEED_X:
                if PACKED:
                    document = tl.load(first + tl.minimum(t, T - 1))
                gradients = incomplete[:0]
                for column in tl.static_range(WIDTH - 1):
                    of_document = d
                    if PACKED:
                        of_document = tl.where(t - (WIDTH - 1 - column) >= document, d, 0.0)
                    gradients += (incomplete[column] + taps[column] * of_document,)
                gradients += (taps[WIDTH - 1] * d,)
                complete = t - (WIDTH - 1)
                ours = inside & (complete >= begin) & (complete < end)
                target = dx + (batch * T + t - (WIDTH - 1)) * C + channel
                tl.store(target, gradients[0].to(dx.dtype.element_ty), mask=ours)
                incomplete = gradients[1:]
            before = inputs[1:]
    if NEED_WEIGHT:
        place = partial + ((tl.program_id(0) // blocks).to(tl.int64) * C + channel) * (WIDTH + HAS_BIAS)
        if HAS_BIAS:
            tl.store(place + WIDTH, db, mask=inside)
        for column in tl.static_range(WIDTH):
            tl.store(place + column, dtaps[column], mask=inside)


@kernel
def _tree_conv_kernel(
    x, x_batch, x_token, weight, bias, earlier, parent, depth, tree_batch, out, N, C, blocks,
    HAS_BIAS: tl.constexpr, HAS_EARLIER: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK channels of a node, and goes up from it; above the root are the earlier inputs."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, node = row // N, row % N
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    x += batch * x_batch
    if HAS_EARLIER:
        earlier += batch * (WIDTH - 1) * C
    parent += batch * tree_batch
    level = tl.load(depth + batch * tree_batch + node)
    total = _bias(bias, channel, inside, HAS_BIAS)
    at = node
    for back in tl.static_range(WIDTH):
        place = tl.where(level >= back, at, level - back)
        seen = _input(x, x_token, earlier, place, channel, inside, C, HAS_EARLIER, WIDTH)
        total += seen * _tap(weight, channel, inside, WIDTH - 1 - back, WIDTH)
        at = tl.load(parent + at)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * C + channel, total.to(out.dtype.element_ty), mask=inside)


def _channels_last(x: Tensor) -> tuple[Tensor, int, int]:
    """x (B, T, C) with a contiguous last dimension, and the other strides."""
    x = x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1)


def _spans(tokens: int, channels: int, most: int) -> tuple[int, int, int]:
    """Tokens per program, `most` or fewer, programs along the tokens, and programs along the channels."""
    span = min(power_of_2_above(tokens), most)
    return span, -(-tokens // span), -(-channels // BLOCK)


@custom_op()
def _causal_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor | None, first: Tensor | None, silu: bool
) -> Tensor:
    out = empty_like(x)
    if is_fake(out):
        return out
    batch, tokens, channels = x.shape
    span, spans, blocks = _spans(tokens, channels, SPAN)
    _conv_forward_kernel[(batch * spans * blocks,)](
        *_channels_last(x), weight.contiguous(), contiguous(bias), contiguous(earlier), first, out,
        tokens, channels, span, spans, blocks,
        HAS_BIAS=bias is not None, HAS_EARLIER=earlier is not None, PACKED=first is not None, SILU=silu,
        WIDTH=weight.shape[1], BLOCK=BLOCK, AHEAD=AHEAD, num_warps=WARPS,
    )  # fmt: skip
    return out


@custom_op()
def _causal_conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor | None, first: Tensor | None,
    silu: bool, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias; a gradient that is not needed is empty."""
    dx, dw = empty_gradient(x, need_x, x), empty_gradient(weight, need_weight, weight)
    db = empty_gradient(bias, need_bias, weight)
    if is_fake(dx):
        return dx, dw, db
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    span, spans, blocks = _spans(tokens, channels, BACKWARD_SPAN)
    need_weight, columns = need_weight or need_bias, width + (bias is not None)
    partial = x.new_empty((batch * spans if need_weight else 0, channels, columns), dtype=torch.float32)
    _conv_backward_kernel[(batch * spans * blocks,)](
        *_channels_last(dy), *_channels_last(x), weight.contiguous(), contiguous(bias), contiguous(earlier), first,
        dx, partial, tokens, channels, span, spans, blocks,
        HAS_BIAS=bias is not None, HAS_EARLIER=earlier is not None, PACKED=first is not None, NEED_X=need_x,
        NEED_WEIGHT=need_weight, SILU=silu, WIDTH=width, BLOCK=BLOCK, AHEAD=BACKWARD_AHEAD, num_warps=WARPS,
    )  # fmt: skip
    if need_weight:
        total = partial.sum(0)
        for gradient, own in ((dw, total[:, :width]), (db, total[:, -1])):
            if gradient.numel():
                gradient.copy_(own)
    return dx, dw, db


@custom_op()
def _causal_conv_tree(
    x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor | None, parent: Tensor, depth: Tensor, silu: bool
) -> Tensor:
    out = empty_like(x)
    if is_fake(out):
        return out
    batch, nodes, channels = x.shape
    blocks = -(-channels // BLOCK)
    _tree_conv_kernel[(batch * nodes * blocks,)](
        *_channels_last(x), weight.contiguous(), contiguous(bias), contiguous(earlier), parent.contiguous(),
        depth.contiguous(), nodes if parent.dim() == 2 else 0, out, nodes, channels, blocks,
        HAS_BIAS=bias is not None, HAS_EARLIER=earlier is not None, SILU=silu, WIDTH=weight.shape[1], BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def tree_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, earlier: Tensor | None, parent: Tensor, depth: Tensor, silu: bool
) -> Tensor:
    """`causal_conv` of a tree, by the kernel; no gradient.

    Args:
        x: (B, N, C), the inputs of the N nodes.
        weight: (C, W), W up to MAX_KERNEL_WIDTH.
        bias: (C,), or None.
        earlier: (B, W - 1, C), the inputs before the root; zeros when None.
        parent, depth: long (N,) or (B, N), each node's parent and its distance from the root.
        silu: whether SiLU follows.

    Returns:
        Contiguous (B, N, C) of x's dtype.
    """
    return _causal_conv_tree(x, weight, bias, earlier, parent, depth, silu)


class CausalConv(torch.autograd.Function):
    """`causal_conv` of sequences, by the kernels; `first` (T,): first token of each token's packed document, or
    None; `silu`: whether SiLU follows."""

    @staticmethod
    def forward(ctx, x, weight, bias, earlier, first, silu):
        ctx.save_for_backward(x, weight, bias, earlier, first)
        ctx.silu = silu
        return _causal_conv_forward(x, weight, bias, earlier, first, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return _causal_conv_backward(dy, *ctx.saved_tensors, ctx.silu, *ctx.needs_input_grad[:3])
