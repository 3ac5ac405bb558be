"""The gated delta rule over sequences by the project's Triton kernels.

The forward pass saves only the operands, and the backward pass recomputes everything else. In bfloat16 both take 256
bytes per token and value head, while they run, for matrices within chunks. The backward pass also takes 4 (K V / 64 +
V) bytes per token and value head for states and updates, and 8 K bytes per token and key head. At the sizes of
Qwen3.5-9B this is 8 KiB per token in the forward pass and 72 KiB per token in the backward pass, for one layer at a
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.linear_attention.delta_chunks_backward import (
    finish_kernel,
    pairs_kernel,
    states_backward_kernel,
    with_states_kernel,
    within_chunks_kernel,
)
from ligermodels.ops.linear_attention.delta_chunks_forward import (
    CHUNK,
    paths_kernel,
    prepare_kernel,
    segments_kernel,
    states_kernel,
)
from ligermodels.ops.runtime.devices import gpu_of, num_sms, power_of_2_above, shared_memory
from ligermodels.ops.runtime.dispatch import INTERPRETED, tl
from ligermodels.ops.runtime.library import custom_op, is_fake
from ligermodels.ops.runtime.tensors import contiguous, heads_and_strides

EPS = 1e-6
"""Added to the squared lengths of queries and keys."""

MAX_KEY_DIM = 128  # a tile of the state, of all keys, is held in registers; the reference serves wider heads
ALIGNED = 16  # elements; see MIN_WIDTH and aligned_heads

TILES: dict[str, Mapping[str, int]] = {
    "paths": {"num_warps": 1},
    "prepare": {"num_warps": 4},
    "segments": {"BLOCK_V": 64, "STAGES": 3, "num_warps": 4},
    "states_of_sums": {"BLOCK_V": 64, "STAGES": 2, "num_warps": 4},
    "states": {"BLOCK_V": 32, "STAGES": 3, "num_warps": 4},
    "states_backward": {"BLOCK_V": 32, "STAGES": 3, "num_warps": 4},
    "pairs": {"BLOCK_V": 64, "STAGES": 2, "num_warps": 4},
    "within_chunks": {"BLOCK_K": 64, "num_warps": 4},
    "with_states": {"BLOCK_K": 64, "BLOCK_V": 64, "STAGES": 3, "num_warps": 4},
    "finish": {"HEADS": 8, "num_warps": 4},
    "values": {"BLOCK_V": 64, "STAGES": 1, "num_warps": 4},
    "group_pairs": {"BLOCK_V": 64, "STAGES": 3, "num_warps": 8},
}
"""Most columns of a tile, most stages of the loop's pipeline, and warps. Tuned for Hopper and K = 128."""

MIN_WIDTH = 64
"""Fewest channels of a tile, except for blocks of a loop, so that its rows in shared memory take 128 bytes or more.

ptxas of CUDA 12.8, shipped with Triton 3.6 and 3.7, computes wrong WGMMA descriptors if two operands use the same
shared memory one after the other, with rows of different lengths and so with different swizzling: the descriptors of
the second operand, except for its first part, are sums with a wrong register. So all operands of a kernel have rows of
128 bytes or more, with the same swizzling. Loops over chunks have shorter rows too: there the second operand of a
product has rows of BLOCK_V channels, and the first operand is in registers or is pipelined, so that its address changes
from chunk to chunk, and no descriptor shares it."""

PROGRAMS = 4
"""Programs per multiprocessor that loops over chunks should have."""

SEGMENT = 2
"""Fewest chunks of a segment."""

PIPELINED = 110 * 2**10, 200 * 2**10
"""Bytes of shared memory from which loops are pipelined in two, and in three stages."""


def refuses(q: Tensor, *, in_parts: bool = False) -> str | None:
    """Why the kernels cannot serve a call, or None. in_parts: calls with wide states are divided into several."""
    width = q.shape[3]
    gpu = gpu_of(q.device)
    if gpu is not None and not gpu.chains_products:
        return f"its kernels do not run on {gpu.name}"
    if width > MAX_KEY_DIM and not in_parts:
        return f"queries and keys of {width} channels are more than {MAX_KEY_DIM}"
    if gpu is not None and q.dtype != torch.float32 and width % ALIGNED:
        return f"queries and keys of 16 bits and {width} channels: not a multiple of {ALIGNED}"
    return None


def aligned_heads(x: Tensor) -> tuple[Any, ...]:
    """`heads_and_strides` of queries or keys. x is copied if its rows have a multiple of ALIGNED elements, but do not
    begin at multiples of ALIGNED: Triton only pipelines aligned loads."""
    heads = heads_and_strides(x)
    if x.shape[3] % ALIGNED == 0 and any(number % ALIGNED for number in (heads[0].data_ptr(), *heads[1:])):
        heads = heads_and_strides(x.clone(memory_format=torch.contiguous_format))
    return heads


def operand_dtype(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The dtype of the operands of products for queries of `dtype`, for torch and for kernels. float16 is no such dtype
    on a GPU: states may be larger than its largest number."""
    if dtype != torch.bfloat16:
        return torch.float32, tl.float32
    # The interpreter has no products of bfloat16.
    return (torch.float16, tl.float16) if INTERPRETED else (torch.bfloat16, tl.bfloat16)


def most_stages(q: Tensor) -> int:
    """Most stages of the pipelines of loops over chunks, by the operands' dtype and the GPU's shared memory."""
    if operand_dtype(q.dtype)[0] == torch.float32:
        return 1
    return sum(shared_memory(q.device) >= least for least in (0, *PIPELINED))


def fitted(tiles: Mapping[str, int], sizes: tuple[int, int], stages: int) -> dict[str, Any]:
    """Constants of a kernel: its tiles, no wider than keys and values of these sizes, and at most `stages`."""
    constants = dict(tiles)
    keys, values = (max(power_of_2_above(size), MIN_WIDTH) for size in sizes)
    constants["BLOCK_K"] = min(constants.get("BLOCK_K", keys), keys)
    for name, most in (("BLOCK_V", values), ("STAGES", stages)):
        if name in constants:
            constants[name] = min(constants[name], most)
    return constants


class Launch:
    """State shared by the kernels of one call: operands in the form of kernel arguments, sizes, and shared buffers.
    Without `delta` the call is of `ssd`, with its D as `skip`."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, first: Tensor | None,
        *, delta: bool = True, skip: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.batch, self.tokens, self.heads, self.value_dim = v.shape
        self.groups, self.key_dim = q.shape[2:]
        self.repeats, self.chunks = self.heads // self.groups, -(-self.tokens // CHUNK)
        self.rows = self.batch * self.heads
        self.keys = *aligned_heads(q), *aligned_heads(k)
        self.v, self.g, self.beta = heads_and_strides(v), g.contiguous(), beta.contiguous()
        self.initial, self.first, self.scale = contiguous(initial), first, self.key_dim**-0.5
        self.dtype, operand = operand_dtype(q.dtype)
        self.options = {"DELTA": delta, "PACKED": first is not None, "OPERAND": operand, "CHUNK": CHUNK}
        self.stages = most_stages(q)
        padded = self.chunks * CHUNK
        self.path = q.new_empty(self.rows, padded, dtype=torch.float64)
        groups = self.batch * self.groups
        self.factors = [q.new_empty(groups, padded, dtype=torch.float32) if delta else None for _ in range(2)]
        self.squares = [self.of_chunks(CHUNK, CHUNK) if delta else None for _ in range(2)]
        self.skip = contiguous(skip)

    def of_chunks(self, *shape: int) -> Tensor:
        """A buffer for a matrix of this shape per chunk and value head."""
        return self.path.new_empty(self.rows, self.chunks, *shape, dtype=self.dtype)

    def tiles(self, name: str, *without: str) -> dict[str, Any]:
        """Constants of the named kernel, `without` the options that it does not take; tiles are no wider than its
        tensors."""
        options = {option: value for option, value in self.options.items() if option not in without}
        return {**options, **fitted(TILES[name], (self.key_dim, self.value_dim), self.stages)}

    def prepare(self) -> None:
        """Fills the buffers."""
        if not self.options["DELTA"]:
            paths_kernel[(self.rows * self.chunks,)](
                self.g, self.first, self.path, self.tokens, self.heads, self.chunks, PACKED=self.options["PACKED"],
                CHUNK=CHUNK, **TILES["paths"],
            )  # fmt: skip
            return
        prepare_kernel[(self.rows * self.chunks,)](
            *self.keys, self.g, self.beta, self.first, self.path, *self.factors, *self.squares,
            self.tokens, self.key_dim, self.heads, self.repeats, self.chunks, self.scale,
            **self.tiles("prepare", "DELTA"), EPS=EPS,
        )  # fmt: skip

    def states(
        self, out: Tensor | None, final: Tensor | None, states: Tensor | None = None, updates: Tensor | None = None
    ) -> None:
        """Writes the outputs to `out` and the last state to `final`; without `out`, writes the state before each chunk
        to `states` and, with `delta`, the updates of the tokens to `updates`."""
        tiles = self.tiles("states" if self.options["DELTA"] else "states_of_sums")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        segments, *of_segments = self.segments(self.keys[4:], self.v, backward=False)
        states_kernel[(self.rows * blocks * segments,)](
            *self.keys, *self.v, self.beta, self.skip, self.first, self.path, *self.factors, *self.squares,
            self.initial, *of_segments, out, final, states, updates, self.tokens, self.key_dim, self.value_dim,
            self.heads, self.repeats, self.chunks * CHUNK, blocks, segments, **tiles, SKIP=self.skip is not None,
            INITIAL=self.initial is not None, FINAL=final is not None, OUTPUT=out is not None, SEGMENTED=segments > 1,
        )  # fmt: skip

    def segments(self, keys: Any, values: Any, *, backward: bool) -> tuple[int, Tensor | None, Tensor | None]:
        """The number of segments in which states are computed side by side, and for each the state after it and the
        decay of a state over it, see `segments_kernel`: without the delta rule, and where there are not enough heads
        for all multiprocessors. Else (1, None, None).

        keys, values: operands and strides of the sums. backward: whether states are gradients."""
        tiles = self.tiles("segments", "DELTA")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        wanted = 1 if self.options["DELTA"] else PROGRAMS * num_sms(self.path.device) // (self.rows * blocks)
        length = -(-self.chunks // max(1, min(wanted, self.chunks // SEGMENT)))
        segments = -(-self.chunks // length)
        if segments == 1:
            return 1, None, None
        sums = self.path.new_empty(self.rows, segments, self.key_dim, self.value_dim, dtype=torch.float32)
        decays = self.path.new_empty(self.rows, segments, dtype=torch.float32)
        segments_kernel[(self.rows * blocks * (segments - 1),)](
            *keys, *values, self.beta, self.first, self.path, sums, decays, self.tokens, self.key_dim, self.value_dim,
            self.heads, self.repeats, self.chunks * CHUNK, blocks, segments, **tiles, BACKWARD=backward,
        )  # fmt: skip
        return segments, sums, decays

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Buffers for a state per chunk, and for a row of V channels per token."""
        return self.of_chunks(self.key_dim, self.value_dim), self.of_chunks(CHUNK, self.value_dim)

    def states_backward(
        self, dout: Any, dfinal: Tensor | None, dstates: Tensor, dinitial: Tensor | None, dv: Tensor | None = None,
        dx: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes the gradients of states and, with `delta`, of values.

        Args:
            dout: gradient of the outputs (B, T, R, V), and its strides: a result of `heads_and_strides`.
            dfinal: float32 (B, R, K, V), gradient of the last state, or None.
            dstates: buffer for the gradient of the state after each chunk; written.
            dinitial: float32 (B, R, K, V), gradient of the first state, or None; written.
            dv: (B, T, R, V); written with `delta`.
            dx: buffer for dX; written with `delta`.
        """
        tiles = self.tiles("states_backward")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        segments, *of_segments = self.segments(self.keys[:4], dout, backward=True)
        states_backward_kernel[(self.rows * blocks * segments,)](
            *self.keys, *dout, self.beta, self.first, self.path, *self.factors, *self.squares, dfinal, *of_segments, dv,
            dstates, dx, dinitial, self.tokens, self.key_dim, self.value_dim, self.heads, self.repeats,
            self.chunks * CHUNK, blocks, segments, **tiles, FINAL=dfinal is not None, INITIAL=dinitial is not None,
            SEGMENTED=segments > 1,
        )  # fmt: skip

    def pairs(self, dout: Any, updates: Tensor, dx: Tensor, dpath: Tensor, dbeta: Tensor) -> None:
        """Overwrites T and M, no longer needed, with the gradients of A and M, from dout, updates, dx, dpath, dbeta."""
        pairs_kernel[(self.rows * self.chunks,)](
            *self.keys, *self.v, *dout, self.beta, self.first, self.path, *self.factors, updates, dx,
            *self.squares, dpath, dbeta, self.tokens, self.key_dim, self.value_dim, self.heads, self.repeats,
            self.chunks, **self.tiles("pairs", "DELTA"),
        )  # fmt: skip

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Buffers for the parts of dG and of dbeta, and for dq and dk: the last part is from within chunks, the others
        are from `with_states`."""
        parts = self.blocks("with_states") + 1, *self.path.shape
        rows = self.batch * self.groups, self.path.shape[1], self.key_dim
        dpath, dweight, dq, dk = (self.path.new_empty(s, dtype=torch.float32) for s in (parts, parts, rows, rows))
        return dpath, dweight, dq, dk

    def blocks(self, name: str) -> int:
        """Number of blocks into which the named kernel splits the channels of keys; each block gives a part of the
        gradients of the gates."""
        return -(-self.key_dim // int(self.tiles(name)["BLOCK_K"]))

    def within_chunks(self, repeats: int, *buffers: Tensor | None) -> None:
        """repeats: matrices of each group and chunk. buffers: dA, dM, read; dq, dk, written."""
        blocks = self.blocks("within_chunks")
        within_chunks_kernel[(self.batch * self.groups * self.chunks * blocks,)](
            *self.keys, *buffers, self.tokens, self.key_dim, self.groups * repeats, repeats, self.chunks, blocks,
            **self.tiles("within_chunks", "PACKED"),
        )  # fmt: skip

    def with_states(self, dout: Any, *buffers: Tensor | None) -> None:
        """buffers: states, dstates, updates, dx, read; dq and dk, added to; dpath, dbeta, written."""
        blocks = self.blocks("with_states")
        with_states_kernel[(self.batch * self.groups * self.chunks * blocks,)](
            *self.keys, *self.v, *dout, self.beta, self.first, self.path, *self.factors, *buffers, self.tokens,
            self.key_dim, self.value_dim, self.heads, self.repeats, self.chunks, blocks, self.path.numel(),
            **self.tiles("with_states"),
        )  # fmt: skip

    def finish(self, *buffers: Tensor) -> None:
        """buffers: dq and dk, parts of dpath and of dbeta, read; dq, dk, dg, dbeta, written."""
        tiles = self.tiles("finish", "OPERAND")
        slices = -(-self.repeats // tiles["HEADS"])
        finish_kernel[(self.batch * self.groups * slices * self.chunks,)](
            *self.keys, self.first, *self.factors, *buffers, self.tokens, self.key_dim, self.heads, self.repeats,
            self.chunks, slices, len(buffers[2]), self.path.numel(), self.scale, **tiles,
        )  # fmt: skip


def empty_state(q: Tensor, v: Tensor, needed: bool) -> Tensor:
    """For the state (B, R, K, V) of a result or a gradient, float32; without elements unless `needed`."""
    return v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if needed else (0,), dtype=torch.float32)


@custom_op()
def gated_delta_chunks_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, first: Tensor | None,
    final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, and the state after the last token, empty without final_state.

    q, k, v, g, beta: of `gated_delta_rule`. initial: the state before them, float32, or None. first: int32 (T,), the
    first token of each token's packed document, or None."""
    out, final = v.new_empty(v.shape), empty_state(q, v, final_state)
    if is_fake(out) or not v.shape[0]:
        return out, final
    launch = Launch(q, k, v, g, beta, initial, first)
    launch.prepare()
    launch.states(out, final if final_state else None)
    return out, final


@custom_op()
def gated_delta_chunks_backward(
    dout: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial: Tensor | None, first: Tensor | None, need_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, g, beta and, with need_initial, of the initial state, from those of o, `dout`, and of
    the last state, `dfinal` or None. initial, first: as in the forward pass."""
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    dinitial = empty_state(q, v, need_initial)
    if is_fake(dq) or not v.shape[0]:
        return dq, dk, dv, dg, dbeta, dinitial
    launch = Launch(q, k, v, g, beta, initial, first)
    launch.prepare()
    states, updates = launch.buffers()
    launch.states(None, None, states, updates)
    dstates, dx = launch.buffers()
    of_out = heads_and_strides(dout)
    launch.states_backward(of_out, contiguous(dfinal), dstates, dinitial if need_initial else None, dv, dx)
    dpath, dweight, dquery, dkey = launch.gradients()
    launch.pairs(of_out, updates, dx, dpath[-1], dweight[-1])
    launch.within_chunks(launch.repeats, *launch.squares, dquery, dkey)
    launch.with_states(of_out, states, dstates, updates, dx, dquery, dkey, dpath, dweight)
    launch.finish(dquery, dkey, dpath, dweight, dq, dk, dg, dbeta)
    return dq, dk, dv, dg, dbeta, dinitial
