"""The gated delta rule, or Mamba2 (`ssd_tree`), over a tree of candidate tokens, with one read of the
state; and the step to an accepted node.

A program computes one chunk of `gated_delta_rule`: all nodes' outputs, from the state before the root and the products
of pairs of nodes. It solves the triangular system by repeating U = W - A U once per level of the tree: after n
repetitions the nodes of the first n levels are exact.

With a decay for each key channel, the kernels of `delta_tree_channels` first compute the sums of g along paths, and the
products of pairs.
"""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.delta_chunks import EPS
from ligermodels.ops.linear_attention.delta_step import MAX_KEY_DIM, block_of_values, check_decoding
from ligermodels.ops.linear_attention.delta_tree_channels import channel_pairs
from ligermodels.ops.linear_attention.gated_delta_rule import gated_delta_rule_tree_reference
from ligermodels.ops.linear_attention.scan import TreeUpdates, tree_state
from ligermodels.ops.runtime.checks import Signature, check_tensor, check_tensors
from ligermodels.ops.runtime.devices import gpu_of, power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, triton, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import heads_and_strides

MAX_NODES = 64  # a program holds all pairs of nodes; the reference serves larger trees
BLOCK_K = 32  # channels of a key that a program takes at once


def gated_delta_rule_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, TreeUpdates]:
    """The gated delta rule over trees of tokens: each node follows its ancestors, and no other node. A CUDA graph can
    capture the call. Equal bits in every run. No gradient.

    Args:
        q: (B, N, G, K) for N nodes, any floating dtype; the op normalises it.
        k: (B, N, G, K), of q's dtype; the op normalises it.
        v: (B, N, R, V), of q's dtype, R a multiple of G.
        g: (B, N, R), floating, logarithm of the decay of the state before each node, finite and at most 0; or
            (B, N, R, K), of a decay for each key channel.
        beta: (B, N, R), floating, how far each node moves the state to its value, within [0, 1].
        state: contiguous (B, R, K, V), fp32 (fp64 for fp64), the state before the root; it is not changed.
        ancestors: bool (N, N), or (B, N, N) where each sequence has a tree of its own: True at [i, j] if node j is
            node i or one of its ancestors; j <= i.

    Returns:
        o (B, N, R, V) of q's dtype, and the updates for `commit_tree`.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or autograd would need a gradient.
    """
    check_decoding("gated_delta_rule_tree", q, k, v, g, beta, state)
    nodes = q.shape[1]
    check_ancestors("gated_delta_rule_tree", ancestors, q.shape[0], nodes, q.device)
    if not use_kernels(q, state) or nodes > MAX_NODES:
        return gated_delta_rule_tree_reference(q, k, v, g, beta, state, ancestors)
    o, *updates = _gated_delta_rule_tree(q, k, v, g, beta, state, ancestors)
    return o, TreeUpdates(*updates)


_COMMIT = Signature(state="B R K V", decay="B N R float64", keys="B N G K", values="B N R V =keys", node="B int64")
_COMMIT_CHANNELS = Signature(
    state="B R K V", decay="B N R K float64", keys="B N G K", values="B N R V =keys", node="B int64"
)


def commit_tree(state: Tensor, updates: TreeUpdates, node: Tensor, ancestors: Tensor) -> None:
    """Moves the state from before the root of each tree to after one of its nodes, in place: see `tree_state`. A CUDA
    graph can capture the call.

    Args:
        state: contiguous (B, R, K, V), the state before the root; updated in place.
        updates: the updates that `gated_delta_rule_tree` returned.
        node: long (B,), the accepted node of each sequence.
        ancestors: bool (N, N) or (B, N, N), True at [i, j] if node j is node i or one of its ancestors.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    op, (decay, keys, values) = "commit_tree", updates
    (_COMMIT_CHANNELS if decay.dim() == 4 else _COMMIT).check(op, state, decay, keys, values, node)
    (batch, heads, key_dim, _), nodes = state.shape, decay.shape[1]
    check_ancestors(op, ancestors, batch, nodes, state.device)
    if not state.is_contiguous() or not nodes or not keys.shape[2] or heads % keys.shape[2]:
        raise InputError(
            f"{op}: needs a contiguous state, at least one node, and a multiple of the keys' heads; got state "
            f"{tuple(state.shape)}, keys {tuple(keys.shape)}"
        )
    if not use_kernels(state, values) or key_dim > MAX_KEY_DIM:
        state.copy_(tree_state(state, updates, node, ancestors))
    else:
        _commit_tree(state, decay, keys, values, node, ancestors)


def check_ancestors(op: str, ancestors: Tensor, batch: int, nodes: int, device: torch.device) -> None:
    check_tensors(op, ancestors=ancestors)
    shape = (nodes, nodes) if ancestors.dim() == 2 else (batch, nodes, nodes)
    check_tensor(op, "ancestors", ancestors, shape, device, torch.bool)


def tree_and_stride(ancestors: Tensor) -> tuple[Tensor, int]:
    """The ancestors as bytes, and their stride along the sequences, 0 for a tree that all share."""
    return ancestors.contiguous().view(torch.uint8), 0 if ancestors.dim() == 2 else ancestors.shape[1] ** 2


@kernel
def tree_kernel(
    q, q_batch, q_node, q_head, k, k_batch, k_node, k_head, v, v_batch, v_node, v_head, g, beta, skip, state,
    ancestors, tree_batch, pairs, parts, out, decay, keys, values, N, K, V, heads, repeats, blocks, scale,
    DELTA: tl.constexpr, BY_CHANNEL: tl.constexpr, SKIP: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, and BLOCK_K keys at once. Products of q and k before
    the normalisation are exact for 16 bits; products with the state and with updates are float32.

    Args:
        q, q_batch, q_node, q_head: queries (B, N, heads / repeats, K), and their strides in elements.
        k, k_batch, k_node, k_head: keys (B, N, heads / repeats, K), and their strides.
        v, v_batch, v_node, v_head: values (B, N, heads, V), and their strides.
        g: (B, N, heads), contiguous, logarithms of the decays; not read with BY_CHANNEL.
        beta: (B, N, heads), contiguous, weights of the nodes.
        skip: (heads,), factors of v in the outputs; read with SKIP.
        state: float32 (B, heads, K, V), contiguous, the state before the root.
        ancestors, tree_batch: bytes (B or 1, N, N), 1 at [i, j] if node j is node i or above it; elements from tree to
            tree.
        pairs, parts: the products of `channel_pairs`, and the number of their parts; read with BY_CHANNEL.
        out: (B, N, heads, V), contiguous; written.
        decay, keys, values: the tensors of `TreeUpdates`, contiguous; written, but decay is read with BY_CHANNEL.
        N, K, V: numbers of nodes, of channels of a key, and of channels of a value.
        heads, repeats: numbers of value heads, and of value heads per key head.
        blocks: blocks of BLOCK_V columns of a state.
        scale: factor on the normalised queries.
        DELTA, BY_CHANNEL, SKIP, EPS: see `step_kernel`.
        PRECISION: of products with the state and with updates.
        BLOCK_N: power of 2 from N on.
        BLOCK_K, BLOCK_V: channels of a key per step, and columns of a state per program.
        STAGES: stages of the loop's pipeline.
    """
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    group = head // repeats
    n, j = tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V)
    node, other = n[:, None], n[None, :]
    of_values = (node < N) & (j < V)[None, :]
    ours = (batch * N + n) * heads + head
    k += batch * k_batch + group * k_head
    q += batch * q_batch + group * q_head

    alike, attending = tl.zeros((BLOCK_N, BLOCK_N), tl.float32), tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    known, o = tl.zeros((BLOCK_N, BLOCK_V), tl.float32), tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    key_length, query_length = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_K)
        there = (node < N) & (i < K)[None, :]
        key = tl.load(k + node * k_node + i[None, :], mask=there, other=0.0)
        query = tl.load(q + node * q_node + i[None, :], mask=there, other=0.0)
        of_state = (i < K)[:, None] & (j < V)[None, :]
        before = tl.load(state + row * K * V + i[:, None] * V + j[None, :], mask=of_state, other=0.0)
        wide_key, wide_query = key.to(tl.float32), query.to(tl.float32)
        if DELTA:
            key_length += tl.sum(wide_key * wide_key, axis=1)
            query_length += tl.sum(wide_query * wide_query, axis=1)
        if BY_CHANNEL:
            path = tl.load(decay + ours[:, None] * K + i[None, :], mask=there, other=0.0)
            kept = tl.exp(path.to(tl.float32))
            wide_key, wide_query = wide_key * kept, wide_query * kept
        else:
            if DELTA:
                alike = tl.dot(key, tl.trans(key), alike, input_precision="ieee")
            attending = tl.dot(query, tl.trans(key), attending, input_precision="ieee")
        if DELTA:
            known = tl.dot(wide_key, before, known, input_precision=PRECISION)
        o = tl.dot(wide_query, before, o, input_precision=PRECISION)
    key_factor, query_factor = key_length + 1.0, query_length + 1.0  # lengths are 0 without DELTA
    if DELTA:
        key_factor = 1.0 / tl.sqrt(key_length + EPS)
        query_factor = scale / tl.sqrt(query_length + EPS)
    if block == 0 and head % repeats == 0:
        for start in range(0, K, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            there = (node < N) & (i < K)[None, :]
            key = tl.load(k + node * k_node + i[None, :], mask=there, other=0.0).to(tl.float32)
            place = keys + ((batch * N + n) * (heads // repeats) + group)[:, None] * K + i[None, :]
            tl.store(place, key * key_factor[:, None], mask=there)

    in_tree = (node < N) & (other < N)
    is_above = tl.load(ancestors + batch * tree_batch + node * N + other, mask=in_tree, other=0) != 0
    if BY_CHANNEL:  # the products have the decays
        for part in range(parts):
            place = pairs + ((row * parts + part) * 2 * N + node) * N + other
            alike += tl.load(place, mask=is_above, other=0.0)
            attending += tl.load(place + N * N, mask=is_above, other=0.0)
        left, reached = 1.0, 1.0
    else:
        # Sums along paths are fp64: their differences are small compared to the sums.
        gate = tl.load(g + ours, mask=n < N, other=0.0).to(tl.float64)
        path = tl.sum(tl.where(is_above, gate[None, :], 0.0), axis=1)
        if block == 0:
            tl.store(decay + ours, path, mask=n < N)
        left = tl.where(is_above, tl.exp((path[:, None] - path[None, :]).to(tl.float32)), 0.0)
        reached = tl.exp(path.to(tl.float32))
    weight = tl.load(beta + ours, mask=n < N, other=0.0).to(tl.float32)
    levels = tl.max(tl.sum(is_above.to(tl.int32), axis=1), axis=0)

    value = tl.load(v + batch * v_batch + head * v_head + node * v_node + j[None, :], mask=of_values, other=0.0).to(
        tl.float32
    )
    u = weight[:, None] * value
    if DELTA:
        alike = alike * left * key_factor[:, None] * key_factor[None, :]
        a = tl.where(node > other, weight[:, None] * alike, 0.0)
        wanted = weight[:, None] * (value - known * (key_factor * reached)[:, None])
        u = wanted
        for _ in range(1, levels):
            u = wanted - tl.dot(a, u, input_precision=PRECISION)
    tl.store(values + ours[:, None] * V + j[None, :], u, mask=of_values)
    attending = attending * left * query_factor[:, None] * key_factor[None, :]
    o = tl.dot(attending, u, o * (query_factor * reached)[:, None], input_precision=PRECISION)
    if SKIP:
        o += tl.load(skip + head).to(tl.float32) * value
    tl.store(out + ours[:, None] * V + j[None, :], o.to(out.dtype.element_ty), mask=of_values)


@triton.jit
def _path_decay(decay, ours, i, K, BY_CHANNEL: tl.constexpr):
    """The logarithm of the decay of a head from the root to a node: a number, or (channels, 1)."""
    return tl.load(decay + ours * K + i, mask=i < K, other=0.0)[:, None] if BY_CHANNEL else tl.load(decay + ours)


@kernel
def _commit_kernel(
    state, decay, keys, values, node, ancestors, tree_batch, N, K, V, heads, repeats, blocks,
    BY_CHANNEL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_V columns of the state of a head, and adds the nodes of the path, the last node
    first."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    n, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    at = tl.load(node + batch).to(tl.int32)
    path = tl.load(ancestors + batch * tree_batch + at * N + n, mask=n < N, other=0) != 0
    last = _path_decay(decay, (batch * N + at) * heads + head, i, K, BY_CHANNEL)
    place = state + row * K * V + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    total = tl.load(place, mask=inside, other=0.0) * tl.exp(last.to(tl.float32))
    for _ in range(tl.sum(path.to(tl.int32), axis=0)):
        ours = (batch * N + at) * heads + head
        left = tl.exp((last - _path_decay(decay, ours, i, K, BY_CHANNEL)).to(tl.float32))
        group = (batch * N + at) * (heads // repeats) + head // repeats
        key = tl.load(keys + group * K + i, mask=i < K, other=0.0)
        u = tl.load(values + ours * V + j, mask=j < V, other=0.0)
        total += key[:, None] * left * u[None, :]
        at = tl.max(tl.where(path & (n < at), n, 0), axis=0)
    tl.store(place, total, mask=inside)


@custom_op()
def _gated_delta_rule_tree(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, and the three tensors of `TreeUpdates`."""
    out, decay = v.new_empty(v.shape), g.new_empty(g.shape, dtype=torch.float64)
    keys, values = k.new_empty(k.shape, dtype=torch.float32), v.new_empty(v.shape, dtype=torch.float32)
    if is_fake(out):
        return out, decay, keys, values
    (batch, nodes, heads, width), key_dim = v.shape, q.shape[3]
    block = block_of_values(q, v, least=16)
    blocks, block_nodes = -(-width // block), max(power_of_2_above(nodes), 16)
    by_channel, repeats, num_warps = g.dim() == 4, heads // q.shape[2], 8 if block_nodes > 32 else 4
    keys_and_queries = *heads_and_strides(q), *heads_and_strides(k)
    tree, g, pairs, parts = tree_and_stride(ancestors), g.contiguous(), None, 0
    if batch and by_channel:
        pairs = channel_pairs(q, k, g, tree, decay)
        parts = pairs.shape[2]
    if batch:
        tree_kernel[(batch * heads * blocks,)](
            *keys_and_queries, *heads_and_strides(v), g, beta.contiguous(), None, state, *tree, pairs,
            parts, out, decay, keys, values, nodes, key_dim, width, heads, repeats, blocks, key_dim**-0.5,
            DELTA=True, BY_CHANNEL=by_channel, SKIP=False, EPS=EPS, PRECISION=tree_precision(q),
            BLOCK_N=block_nodes, BLOCK_K=BLOCK_K, BLOCK_V=block, STAGES=3, num_warps=num_warps,
        )  # fmt: skip
    return out, decay, keys, values


def tree_precision(q: Tensor) -> str:
    """Precision of products of float32: all bits for float32 operands, and on GPUs without right tf32x3."""
    gpu = gpu_of(q.device)
    return "ieee" if q.dtype == torch.float32 or not (gpu is None or gpu.chains_products) else "tf32x3"


@custom_op(mutates_args=("state",))
def _commit_tree(state: Tensor, decay: Tensor, keys: Tensor, values: Tensor, node: Tensor, ancestors: Tensor) -> None:
    if is_fake(state):
        return
    (batch, nodes, heads, width), key_dim = values.shape, state.shape[2]
    block = block_of_values(values, values, least=8)
    blocks = -(-width // block)
    if batch:
        _commit_kernel[(batch * heads * blocks,)](
            state, decay.contiguous(), keys.contiguous(), values.contiguous(), node.contiguous(),
            *tree_and_stride(ancestors), nodes, key_dim, width, heads, heads // keys.shape[2], blocks,
            BY_CHANNEL=decay.dim() == 4, BLOCK_N=power_of_2_above(nodes), BLOCK_K=power_of_2_above(key_dim),
            BLOCK_V=block, num_warps=4,
        )  # fmt: skip
