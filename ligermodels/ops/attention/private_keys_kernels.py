"""The Triton kernels of `private_key_attention`: private keys merged into the result of causal attention.

The query heads that share a key head are computed together: a program reads the private keys and values of a tile of
tokens once, and writes their gradients without atomics. Logarithms are to base 2, as in `triton_attention_kernels`.
"""

from functools import partial

from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel

ELEMENTS = 2048
"""Query channels of a tile, unless the heads of one token have more."""

kernel_for_any_length = partial(kernel, do_not_specialize=("B", "T", "J"))
"""One compiled kernel serves every batch, every length and every number of private keys."""


def tiles(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> tuple[int, dict[str, int]]:
    """The number of programs, and the constants of the kernels.

    Args:
        batch: number of sequences.
        length: tokens of a sequence.
        heads: number of query heads.
        kv_heads: number of key heads.
        dim: channels of a head.
    """
    group, channels = power_of_2_above(heads // kv_heads), power_of_2_above(dim)
    tokens = max(ELEMENTS // (group * channels), 1)
    constants = {
        "GROUP": heads // kv_heads, "DIM": dim, "BLOCK_T": tokens, "BLOCK_GROUP": group, "BLOCK_DIM": channels,
        "num_warps": min(max(tokens * group * channels // 512, 1), 16),
    }  # fmt: skip
    return -(-length // tokens) * batch * kv_heads, constants


@triton.jit
def _place(
    T, heads, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Of a program: its sequence, and its key head; of its tile (BLOCK_T, BLOCK_GROUP, BLOCK_DIM) the tokens, query
    heads and channels, and masks of the query heads of each token, of all elements, and of its keys."""
    num_tiles, kv_heads = tl.cdiv(T, BLOCK_T), heads // GROUP
    program = tl.program_id(0).to(tl.int64)
    kv_head, batch = program // num_tiles % kv_heads, program // num_tiles // kv_heads
    token = program % num_tiles * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    member, channel = tl.arange(0, BLOCK_GROUP)[None, :, None], tl.arange(0, BLOCK_DIM)[None, None, :]
    is_head = (token < T) & (member < GROUP)
    return (
        batch, kv_head, token, kv_head * GROUP + member, channel, is_head, is_head & (channel < DIM),
        (token < T) & (channel < DIM),
    )  # fmt: skip


@triton.jit
def _load(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@kernel_for_any_length
def private_keys_forward_kernel(
    q, q_batch, q_token, q_head, keys, values, causal, causal_lse, out, lse, B, T, J, heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Writes out and lse of the softmax over the keys of causal attention and J private keys of each token.

    Args:
        q, q_batch, q_token, q_head: queries (B, T, heads, DIM), and their strides in elements.
        keys, values: private keys and values (J, B, T, heads // GROUP, DIM), contiguous.
        causal: (B, T, heads, DIM), contiguous, the result of causal attention.
        causal_lse: float32 (B, heads, T), base-2 logarithm of its softmax denominator.
        out: (B, T, heads, DIM), contiguous; written.
        lse: float32 (B, heads, T), base-2 logarithm of the whole denominator; written.
        B, T, J, heads: numbers of sequences, tokens, private keys of a token, and query heads.
        scale: factor on q·k, for scores to base 2.
        GROUP: query heads per key head.
        DIM: channels of a head.
        BLOCK_T: tokens of a tile.
        BLOCK_GROUP, BLOCK_DIM: powers of 2 from GROUP and from DIM on.
    """
    batch, kv_head, token, head, channel, is_head, is_query, is_key = _place(
        T, heads, GROUP, DIM, BLOCK_T, BLOCK_GROUP, BLOCK_DIM
    )
    query = _load(q, batch * q_batch + token * q_token + head * q_head + channel, is_query)
    own = ((batch * T + token) * heads + head) * DIM + channel
    place = (batch * heads + head) * T + token
    acc = _load(causal, own, is_query)
    top = _load(causal_lse, place, is_head)
    total = tl.full(top.shape, 1.0, dtype=tl.float32)
    at = ((batch * T + token) * (heads // GROUP) + kv_head) * DIM + channel
    step = B.to(tl.int64) * T * (heads // GROUP) * DIM
    for _ in range(0, J):
        score = tl.sum(query * _load(keys, at, is_key), axis=2, keep_dims=True) * scale
        highest = tl.maximum(top, score)
        decay, weight = tl.exp2(top - highest), tl.exp2(score - highest)
        total = total * decay + weight
        acc = acc * decay + weight * _load(values, at, is_key)
        top = highest
        at += step
    tl.store(out + own, (acc / total).to(out.dtype.element_ty), mask=is_query)
    tl.store(lse + place, top + tl.log2(total), mask=is_head)


@kernel_for_any_length
def private_keys_gradient_kernel(
    q, q_batch, q_token, q_head, dout, dout_batch, dout_token, dout_head, keys, values, lse, delta, causal_dq, dq,
    dkeys, dvalues, B, T, J, heads, scale, softmax_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Writes dq, the sum of causal_dq and the private keys' part, dkeys and dvalues.

    Args:
        q, q_batch, q_token, q_head, keys, values: see `private_keys_forward_kernel`.
        dout, dout_batch, dout_token, dout_head: gradient of out (B, T, heads, DIM), and its strides.
        lse: as the forward kernel writes it.
        delta: float32 (B, heads, T), sums of the whole result times dout over channels.
        causal_dq: (B, T, heads, DIM), contiguous, gradient of q by causal attention.
        dq, dkeys, dvalues: contiguous; written.
        softmax_scale: factor on q·k.
        B, T, J, heads, scale, GROUP, DIM, BLOCK_T, BLOCK_GROUP, BLOCK_DIM: see `private_keys_forward_kernel`.
    """
    batch, kv_head, token, head, channel, is_head, is_query, is_key = _place(
        T, heads, GROUP, DIM, BLOCK_T, BLOCK_GROUP, BLOCK_DIM
    )
    query = _load(q, batch * q_batch + token * q_token + head * q_head + channel, is_query)
    gradient = _load(dout, batch * dout_batch + token * dout_token + head * dout_head + channel, is_query)
    own = ((batch * T + token) * heads + head) * DIM + channel
    place = (batch * heads + head) * T + token
    row_lse, row_delta = _load(lse, place, is_head), _load(delta, place, is_head)
    acc = _load(causal_dq, own, is_query)
    at = ((batch * T + token) * (heads // GROUP) + kv_head) * DIM + channel
    step = B.to(tl.int64) * T * (heads // GROUP) * DIM
    for _ in range(0, J):
        key = _load(keys, at, is_key)
        weight = tl.exp2(tl.sum(query * key, axis=2, keep_dims=True) * scale - row_lse)
        slope = tl.sum(gradient * _load(values, at, is_key), axis=2, keep_dims=True) - row_delta
        slope = weight * slope * softmax_scale
        acc += slope * key
        dkey = tl.sum(slope * query, axis=1, keep_dims=True)
        dvalue = tl.sum(weight * gradient, axis=1, keep_dims=True)
        tl.store(dkeys + at, dkey.to(dkeys.dtype.element_ty), mask=is_key)
        tl.store(dvalues + at, dvalue.to(dvalues.dtype.element_ty), mask=is_key)
        at += step
    tl.store(dq + own, acc.to(dq.dtype.element_ty), mask=is_query)
