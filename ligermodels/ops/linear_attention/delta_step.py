"""One token of the gated delta rule, or of Mamba2 (`ssd_step`), on a state that is updated in place: read once, and
written once."""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.delta_chunks import EPS
from ligermodels.ops.linear_attention.gated_delta_rule import check_operands, gated_delta_rule_reference
from ligermodels.ops.runtime.checks import check_tensor, check_tensors
from ligermodels.ops.runtime.devices import num_sms, power_of_2_above
from ligermodels.ops.runtime.dispatch import refuse_batch_invariant, tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import heads_and_strides

MAX_KEY_DIM = 256  # a tile of the state, of all keys, is held in registers; the reference serves wider heads
BLOCK_VALUES = 32  # columns of the state per program; fewer if there would be too few programs


def gated_delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """`gated_delta_rule` of one token per sequence. A CUDA graph can capture the call. Equal bits in every run. No
    gradient.

    Args:
        q: (B, 1, G, K), any floating dtype; the op normalises it.
        k: (B, 1, G, K), of q's dtype; the op normalises it.
        v: (B, 1, R, V), of q's dtype, R a multiple of G.
        g: (B, 1, R), floating, logarithm of the decay of the state before the token, finite and at most 0; or
            (B, 1, R, K), of a decay for each key channel.
        beta: (B, 1, R), floating, how far the token moves the state to its value, within [0, 1].
        state: contiguous (B, R, K, V), fp32 (fp64 for fp64), the state before the token; updated in place to the state
            after the token.

    Returns:
        Contiguous (B, 1, R, V) of q's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or autograd would need a gradient.
    """
    refuse_batch_invariant("gated_delta_rule_step")
    check_decoding("gated_delta_rule_step", q, k, v, g, beta, state)
    check_tensor("gated_delta_rule_step", "q", q, (q.shape[0], 1, *q.shape[2:]), q.device)
    if not use_kernels(q, state) or q.shape[3] > MAX_KEY_DIM:
        return gated_delta_rule_step_reference(q, k, v, g, beta, state)
    return _gated_delta_rule_step(q, k, v, g, beta, state)


def gated_delta_rule_step_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The specification of `gated_delta_rule_step`, in plain torch, with the same arguments q, k, v, g, beta and
    state."""
    o, last = gated_delta_rule_reference(q, k, v, g, beta, initial_state=state)
    state.copy_(last)
    return o.contiguous()


def check_decoding(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> None:
    """Raises InputError, naming `op`, unless q, k, v, g and beta fit one another and `state`, `state` is contiguous,
    and autograd needs no gradient."""
    check_tensors(op, q=q, state=state)
    check_operands(op, q, k, v, g, beta, state, torch.promote_types(q.dtype, torch.float32))
    if not state.is_contiguous():
        raise InputError(f"{op}: state must be contiguous, it is changed in place: call .contiguous()")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g, beta, state)):
        raise InputError(f"{op} has no gradient: call it under torch.no_grad(), or use ops.gated_delta_rule")


def block_of_values(q: Tensor, values: Tensor, least: int) -> int:
    """Columns of the state per program, at least `least`: with enough of the `values` columns, most multiprocessors get
    a program. q is (B, T, G, K)."""
    batch, _, heads, width = values.shape
    block = min(max(power_of_2_above(width), least), BLOCK_VALUES)
    while block > least and 4 * batch * heads * -(-width // block) < 3 * num_sms(q.device):
        block //= 2
    return block


@kernel
def step_kernel(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, g, beta, skip, state, out,
    heads, repeats, blocks, scale, K, V,
    DELTA: tl.constexpr, BY_CHANNEL: tl.constexpr, SKIP: tl.constexpr, EPS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head.

    Args:
        q, q_batch, q_token, q_head: queries (B, 1, heads / repeats, K), and their strides in elements.
        k, k_batch, k_token, k_head: keys (B, 1, heads / repeats, K), and their strides.
        v, v_batch, v_token, v_head: values (B, 1, heads, V), and their strides.
        g: (B, 1, heads), contiguous, logarithms of the decays; (B, 1, heads, K) with BY_CHANNEL.
        beta: (B, 1, heads), contiguous, weights of the token.
        skip: (heads,), factors of v in the output; read with SKIP.
        state: float32 (B, heads, K, V), contiguous; updated in place.
        out: (B, 1, heads, V), contiguous; written.
        heads, repeats: numbers of value heads, and of value heads per key head.
        blocks: blocks of BLOCK_V columns of a state.
        scale: factor on the normalised queries.
        K, V: channels of a key and of a value.
        DELTA: whether the delta rule is used, with normalised keys and queries.
        BY_CHANNEL: whether g has a decay for each of K channels.
        SKIP: whether skip v is added to the output.
        EPS: added to the squared lengths of queries and keys.
        BLOCK_K: power of 2 from K on.
        BLOCK_V: columns of a state per program.
    """
    wait_for_previous(PDL)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    i, j = tl.arange(0, BLOCK_K), tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    place = state + row * K * V + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    kept = tl.load(place, mask=inside, other=0.0)
    keys = tl.load(k + batch * k_batch + head // repeats * k_head + i, mask=i < K, other=0.0).to(tl.float32)
    queries = tl.load(q + batch * q_batch + head // repeats * q_head + i, mask=i < K, other=0.0).to(tl.float32)
    values = tl.load(v + batch * v_batch + head * v_head + j, mask=j < V, other=0.0).to(tl.float32)
    if DELTA:
        keys = keys / tl.sqrt(tl.sum(keys * keys, axis=0) + EPS)
        queries = queries * (scale / tl.sqrt(tl.sum(queries * queries, axis=0) + EPS))
    if BY_CHANNEL:
        kept *= tl.exp(tl.load(g + row * K + i, mask=i < K, other=0.0).to(tl.float32))[:, None]
    else:
        kept *= tl.exp(tl.load(g + row).to(tl.float32))
    u = values
    if DELTA:
        u = u - tl.sum(kept * keys[:, None], axis=0)
    u = u * tl.load(beta + row).to(tl.float32)
    # S^T q after the token, from the state before the token: both sums over the keys can run at once.
    o = tl.sum(kept * queries[:, None], axis=0) + tl.sum(keys * queries, axis=0) * u
    if SKIP:
        o += tl.load(skip + head).to(tl.float32) * values
    tl.store(place, kept + keys[:, None] * u[None, :], mask=inside)
    tl.store(out + row * V + j, o.to(out.dtype.element_ty), mask=j < V)


@custom_op(mutates_args=("state",))
def _gated_delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    out = v.new_empty(v.shape)
    if is_fake(out):
        return out
    (batch, _, heads, width), key_dim = v.shape, q.shape[3]
    block = block_of_values(q, v, least=8)
    blocks = -(-width // block)
    if batch:
        step_kernel[(batch * heads * blocks,)](
            *heads_and_strides(q), *heads_and_strides(k), *heads_and_strides(v), g.contiguous(), beta.contiguous(),
            None, state, out, heads, heads // q.shape[2], blocks, key_dim**-0.5, key_dim, width,
            DELTA=True, BY_CHANNEL=g.dim() == 4, SKIP=False, EPS=EPS, BLOCK_K=power_of_2_above(key_dim),
            BLOCK_V=block, num_warps=4,
        )  # fmt: skip
    return out
