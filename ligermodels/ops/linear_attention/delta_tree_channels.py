"""A tree of candidate tokens with a decay for each key channel: sums of the decays along the paths, and the products of
pairs of nodes with the decay between them.

The decay between two nodes is the exponential of a difference, computed for each pair and channel: a product of two
exponentials, of one node each, overflows.
"""

import torch
from torch import Tensor

from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.tensors import heads_and_strides

PATHS = {"BLOCK_K": 16, "AHEAD": 16, "num_warps": 4}
PAIRS = {"NODES": 8, "BLOCK_K": 32, "CHANNELS": 16, "num_warps": 4}


@kernel
def paths_kernel(
    g, ancestors, tree_batch, decay, N, K, heads, blocks,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK_K channels of a head, and adds the decay of AHEAD nodes at a time to the nodes below.

    Args:
        g: (B, N, heads, K), contiguous, logarithms of the decays.
        ancestors, tree_batch: bytes (B or 1, N, N), 1 at [i, j] if node j is node i or above it; elements from tree to
            tree.
        decay: float64 (B, N, heads, K), contiguous; written.
        N, K, heads, blocks: numbers of nodes, of channels of a key, of value heads, and of blocks of BLOCK_K channels.
        BLOCK_N: power of 2 from N on.
    """
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = row // heads, row % heads
    n, i = tl.arange(0, BLOCK_N), block * BLOCK_K + tl.arange(0, BLOCK_K)
    ancestors += batch * tree_batch
    first = batch * N * heads + head
    # Sums along paths are fp64: their differences are small compared to the sums.
    path = tl.zeros((BLOCK_N, BLOCK_K), tl.float64)
    for start in range(0, N, AHEAD):
        for ahead in tl.static_range(AHEAD):
            m = start + ahead
            gate = tl.load(g + (first + m * heads) * K + i, mask=(m < N) & (i < K), other=0.0).to(tl.float64)
            gate = tl.maximum(gate, -1e30)  # sums stay within float32
            is_below = tl.load(ancestors + n * N + m, mask=(m < N) & (n < N), other=0) != 0
            path += tl.where(is_below[:, None], gate[None, :], 0.0)
    ours = (first + n * heads)[:, None] * K + i[None, :]
    tl.store(decay + ours, path, mask=(n < N)[:, None] & (i < K)[None, :])


@kernel
def pairs_kernel(
    q, q_batch, q_node, q_head, k, k_batch, k_node, k_head, decay, ancestors, tree_batch, pairs, N, K, heads, repeats,
    tiles, parts,
    NODES: tl.constexpr, BLOCK_K: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Each program takes the pairs of NODES nodes i and NODES nodes j of a head, and its part of
    sum_c k_ic k_jc exp(G_ic - G_jc) and of sum_c q_ic k_jc exp(G_ic - G_jc), before the normalisation of q and k: the
    sums over BLOCK_K channels, CHANNELS at once.

    Args:
        q, q_batch, q_node, q_head: queries (B, N, heads / repeats, K), and their strides in elements.
        k, k_batch, k_node, k_head: keys (B, N, heads / repeats, K), and their strides.
        decay, ancestors, tree_batch, N, K, heads: see `paths_kernel`.
        pairs: float32 (B, heads, parts, 2, N, N), contiguous; written where node j may be above node i.
        repeats: number of value heads per key head.
        tiles, parts: numbers of tiles of NODES nodes, and of blocks of BLOCK_K channels.
    """
    second, first = tl.program_id(0) % tiles * NODES, tl.program_id(0) // tiles % tiles * NODES
    pair = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    part, row = pair % parts, pair // parts
    if second <= first:  # no node is above an earlier one
        batch, head = row // heads, row % heads
        node, other = first + tl.arange(0, NODES), second + tl.arange(0, NODES)
        in_tree = (node < N)[:, None] & (other < N)[None, :]
        of_pair = node[:, None] * N + other[None, :]
        is_above = (tl.load(ancestors + batch * tree_batch + of_pair, mask=in_tree, other=0) != 0)[:, :, None]
        k += batch * k_batch + head // repeats * k_head
        q += batch * q_batch + head // repeats * q_head
        decay += (batch * N * heads + head) * K
        alike = tl.zeros((NODES, NODES, CHANNELS), tl.float32)
        attending = tl.zeros((NODES, NODES, CHANNELS), tl.float32)
        for start in range(part * BLOCK_K, tl.minimum(part * BLOCK_K + BLOCK_K, K), CHANNELS):
            i = start + tl.arange(0, CHANNELS)
            of_node, of_other = (node < N)[:, None] & (i < K)[None, :], (other < N)[:, None] & (i < K)[None, :]
            path = tl.load(decay + node[:, None] * heads * K + i[None, :], mask=of_node, other=0.0)
            above = tl.load(decay + other[:, None] * heads * K + i[None, :], mask=of_other, other=0.0)
            # Differences of numbers that are two float32 numbers each: many GPUs compute fp64 slowly.
            high, above_high = path.to(tl.float32), above.to(tl.float32)
            low = (path - high.to(tl.float64)).to(tl.float32)
            above_low = (above - above_high.to(tl.float64)).to(tl.float32)
            key = tl.load(k + node[:, None] * k_node + i[None, :], mask=of_node, other=0.0).to(tl.float32)
            query = tl.load(q + node[:, None] * q_node + i[None, :], mask=of_node, other=0.0).to(tl.float32)
            earlier = tl.load(k + other[:, None] * k_node + i[None, :], mask=of_other, other=0.0).to(tl.float32)
            left = (high[:, None, :] - above_high[None, :, :]) + (low[:, None, :] - above_low[None, :, :])
            kept = tl.exp(tl.where(is_above, left, float("-inf"))) * earlier[None, :, :]
            alike += key[:, None, :] * kept
            attending += query[:, None, :] * kept
        place = pairs + pair * 2 * N * N + of_pair
        tl.store(place, tl.sum(alike, axis=2), mask=in_tree)
        tl.store(place + N * N, tl.sum(attending, axis=2), mask=in_tree)


def channel_pairs(q: Tensor, k: Tensor, g: Tensor, tree: tuple[Tensor, int], decay: Tensor) -> Tensor:
    """The products of pairs of nodes with the decay between them; writes the sums of the decays along the paths.

    Args:
        q: (B, N, G, K), the queries, not normalised.
        k: (B, N, G, K), the keys, not normalised.
        g: (B, N, R, K), contiguous, logarithms of the decays.
        tree: bytes (B or 1, N, N), the ancestors of each node, and the elements from tree to tree.
        decay: float64 (B, N, R, K), contiguous; written.

    Returns:
        float32 (B, R, parts, 2, N, N), to be summed over the parts: at [..., 0, i, j] the products of keys i and j, at
        [..., 1, i, j] the products of query i and key j; not written where node j cannot be above node i.
    """
    batch, nodes, heads, key_dim = g.shape
    blocks, parts = (-(-key_dim // tile["BLOCK_K"]) for tile in (PATHS, PAIRS))
    tiles = -(-nodes // PAIRS["NODES"])
    pairs = q.new_empty(batch, heads, parts, 2, nodes, nodes, dtype=torch.float32)
    paths_kernel[(batch * heads * blocks,)](
        g, *tree, decay, nodes, key_dim, heads, blocks, BLOCK_N=max(power_of_2_above(nodes), 16), **PATHS
    )
    pairs_kernel[(batch * heads * parts * tiles * tiles,)](
        *heads_and_strides(q), *heads_and_strides(k), decay, *tree, pairs, nodes, key_dim, heads,
        heads // q.shape[2], tiles, parts, **PAIRS,
    )  # fmt: skip
    return pairs
