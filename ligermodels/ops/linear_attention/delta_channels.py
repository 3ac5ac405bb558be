"""The gated delta rule with a decay for each key channel (Kimi Delta Attention) over sequences, by the project's Triton
kernels.

The forward pass saves only the operands, and the backward pass recomputes everything else. In bfloat16 the forward
pass takes 10 K + 256 bytes per token and value head, while it runs, for values within chunks. The backward pass takes
12 K + 4 V + 4 K V / 64 + 388 bytes: states and their gradients, gradients of normalised queries and keys, and before
these the values within chunks. In float32 these are float32 too, or TF32 where `torch.set_float32_matmul_precision`
allows it, and decays are float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ligermodels.ops.linear_attention.delta_channels_backward import (
    channel_finish_kernel,
    channel_pairs_backward_kernel,
    channel_squares_kernel,
    channel_states_backward_kernel,
)
from ligermodels.ops.linear_attention.delta_channels_forward import (
    LEAST_GATE,
    channel_pairs_kernel,
    channel_paths_kernel,
    channel_states_kernel,
)
from ligermodels.ops.linear_attention.delta_chunks import EPS, empty_state, fitted, most_stages, operand_dtype
from ligermodels.ops.linear_attention.delta_chunks_forward import CHUNK
from ligermodels.ops.runtime.library import custom_op, is_symbolic
from ligermodels.ops.runtime.tensors import contiguous, heads_and_strides

TILES: dict[str, dict[str, int]] = {
    "paths": {"BLOCK_K": 64, "num_warps": 4},
    "pairs": {"BLOCK_K": 64, "num_warps": 4},
    "states": {"BLOCK_V": 32, "STAGES": 3, "num_warps": 4},
    "states_backward": {"BLOCK_V": 32, "STAGES": 2, "num_warps": 4},
    "squares": {"BLOCK_V": 64, "STAGES": 2, "num_warps": 4},
    "pairs_backward": {"BLOCK_K": 64, "BLOCK_V": 64, "STAGES": 2, "num_warps": 8},
    "finish": {"num_warps": 8},
}
"""Most channels of a tile of keys and of values, most stages of the loop's pipeline, and warps. Kernels of products
take at least `delta_chunks.MIN_WIDTH` keys: on Hopper "pairs_backward" writes out of bounds with 32."""


class _Launch:
    """State shared by the kernels of one call: operands in the form of kernel arguments, sizes, and shared buffers.
    Buffers have the shape (B * R, chunks, ...), and the dtype of products' operands unless stated otherwise."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, first: Tensor | None) -> None:
        self.batch, self.tokens, self.heads, self.value_dim = v.shape
        self.key_dim, self.repeats = q.shape[3], self.heads // q.shape[2]
        self.chunks = -(-self.tokens // CHUNK)
        self.keys = *heads_and_strides(q), *heads_and_strides(k)
        self.v, self.beta, self.first = heads_and_strides(v), beta.contiguous(), first
        self.scale = self.key_dim**-0.5
        self.dtype, operand = operand_dtype(q.dtype)
        self.options = {
            "PACKED": first is not None, "OPERAND": operand, "EPS": EPS, "LEVELS": CHUNK.bit_length() - 1,
            "CHUNK": CHUNK,
        }  # fmt: skip
        self.fitted = partial(fitted, sizes=(self.key_dim, self.value_dim), stages=most_stages(q))
        wide = torch.float64 if self.dtype == torch.float32 else torch.float32
        keys = CHUNK, self.key_dim
        self.path = self.of_chunks(*keys, dtype=wide)
        self.of_states = [*(self.of_chunks(*keys) for _ in range(3)), self.of_chunks(self.key_dim, dtype=torch.float32)]
        self.solved, self.attending = self.of_chunks(CHUNK, CHUNK), self.of_chunks(CHUNK, CHUNK)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launches a kernel; on the meta device, where plans of memory count the buffers, nothing."""
        if not self.beta.is_meta:
            kernel[grid](*arguments, **constants)

    def of_chunks(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of this shape for each chunk and value head."""
        return self.beta.new_empty(self.batch * self.heads, self.chunks, *shape, dtype=dtype or self.dtype)

    def tiles(self, name: str, *options: str) -> dict[str, Any]:
        """Constants of the named kernel, with these options; tiles are no wider than its tensors."""
        return {**{option: self.options[option] for option in options}, **self.fitted(TILES[name])}

    def pairs(self, g: Tensor, alike: Tensor | None = None) -> None:
        """Fills the buffers. alike: buffer for L, or None."""
        tiles = TILES["paths"]
        programs = self.batch * self.heads * self.chunks
        self.launch(
            channel_paths_kernel, (programs, -(-self.key_dim // tiles["BLOCK_K"])),
            g.contiguous(), self.path, self.tokens, self.key_dim, self.heads, self.chunks,
            LEAST_GATE=LEAST_GATE, CHUNK=CHUNK, **tiles,
        )  # fmt: skip
        self.launch(
            channel_pairs_kernel, (programs,),
            *self.keys, self.path, self.beta, self.first, *self.of_states, self.solved, self.attending, alike,
            self.tokens, self.key_dim, self.heads, self.repeats, self.chunks, self.scale,
            **self.tiles("pairs", *self.options), ALIKE=alike is not None,
        )  # fmt: skip

    def states(
        self, initial: Tensor | None, out: Tensor | None, final: Tensor | None, states: Tensor | None = None,
        updates: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes the outputs to `out` and the last state to `final`; without `out`, writes the state before each chunk
        to `states`, and U to `updates`."""
        tiles = self.tiles("states", "OPERAND", "CHUNK")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        self.launch(
            channel_states_kernel, (self.batch * self.heads * blocks,),
            *self.of_states, self.solved, self.attending, *self.v, self.beta, initial, out, final, states, updates,
            self.tokens, self.key_dim, self.value_dim, self.heads, self.chunks * CHUNK, blocks, **tiles,
            INITIAL=initial is not None, FINAL=final is not None, OUTPUT=out is not None,
        )  # fmt: skip

    def states_backward(
        self, dout: Any, dfinal: Tensor | None, dv: Tensor, dstates: Tensor, dx: Tensor, dinitial: Tensor | None
    ) -> None:
        """Writes dV, the gradient of the state after each chunk, dX, and the gradient of the first state; then frees
        the buffers that only kernels of states read.

        dout: gradient of the outputs (B, T, R, V), and its strides: a result of `heads_and_strides`."""
        tiles = self.tiles("states_backward", "OPERAND", "CHUNK")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        self.launch(
            channel_states_backward_kernel, (self.batch * self.heads * blocks,),
            *self.of_states, self.solved, self.attending, *dout, self.beta, dfinal, dv, dstates, dx, dinitial,
            self.tokens, self.key_dim, self.value_dim, self.heads, self.chunks * CHUNK, blocks, **tiles,
            FINAL=dfinal is not None, INITIAL=dinitial is not None,
        )  # fmt: skip
        self.of_states.clear()

    def squares(self, dout: Any, updates: Tensor, dx: Tensor, alike: Tensor, dweight: Tensor) -> None:
        """Overwrites T and M, no longer needed, with the gradients of L and M, and writes a part of the gradient of
        beta to dweight. dout: as in `states_backward`."""
        tiles = self.tiles("squares", "PACKED", "OPERAND", "CHUNK")
        del tiles["BLOCK_K"]
        self.launch(
            channel_squares_kernel, (self.batch * self.heads * self.chunks,),
            *self.v, *dout, self.beta, self.first, updates, dx, alike, self.solved, self.attending, dweight,
            self.tokens, self.value_dim, self.heads, self.chunks, **tiles,
        )  # fmt: skip

    def pairs_backward(self, dout: Any, *buffers: Tensor) -> None:
        """dout: as in `states_backward`. buffers: states, dstates, updates, dx, read; the gradients of L and M and a
        part of that of beta, read; gradients of the normalised q and k, of g and of beta, written."""
        states, dstates, updates, dx, dweight, *gradients = buffers
        self.launch(
            channel_pairs_backward_kernel, (self.batch * self.heads * self.chunks,),
            *self.keys, *dout, self.path, self.beta, self.first, states, dstates, updates, dx, self.solved,
            self.attending, dweight, *gradients, self.tokens, self.key_dim, self.value_dim, self.heads, self.repeats,
            self.chunks, self.scale, **self.tiles("pairs_backward", *self.options),
        )  # fmt: skip

    def finish(self, *buffers: Tensor) -> None:
        """buffers: gradients of the normalised q and k, read; of q and k, written."""
        self.launch(
            channel_finish_kernel, (self.batch * self.heads // self.repeats * self.chunks,),
            *self.keys, *buffers, self.tokens, self.key_dim, self.heads, self.repeats, self.chunks, self.scale,
            **self.tiles("finish", "EPS", "CHUNK"),
        )  # fmt: skip


@custom_op(runs_on_meta=True)
def channel_delta_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, first: Tensor | None,
    final_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, and the state after the last token, empty without final_state.

    q, k, v, g, beta: of `gated_delta_rule`. initial: the state before them, float32, or None. first: int32 (T,), the
    first token of each token's packed document, or None."""
    out, final = v.new_empty(v.shape), empty_state(q, v, final_state)
    if is_symbolic(out) or not v.shape[0]:
        return out, final
    launch = _Launch(q, k, v, beta, first)
    launch.pairs(g)
    launch.states(contiguous(initial), out, final if final_state else None)
    return out, final


@custom_op(runs_on_meta=True)
def channel_delta_backward(
    dout: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial: Tensor | None, first: Tensor | None, need_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, g, beta and, with need_initial, of the initial state, from those of o, `dout`, and of
    the last state, `dfinal` or None. initial, first: as in the forward pass."""
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    dinitial = empty_state(q, v, need_initial)
    if is_symbolic(dv) or not v.shape[0]:
        return dq, dk, dv, dg, dbeta, dinitial
    launch = _Launch(q, k, v, beta, first)
    keys, values, state, of_out = (
        (CHUNK, q.shape[3]),
        (CHUNK, v.shape[3]),
        (q.shape[3], v.shape[3]),
        heads_and_strides(dout),
    )
    alike = launch.of_chunks(CHUNK, CHUNK)
    launch.pairs(g, alike)
    states, updates = launch.of_chunks(*state), launch.of_chunks(*values)
    launch.states(contiguous(initial), None, None, states, updates)
    dstates, dx = launch.of_chunks(*state), launch.of_chunks(*values)
    launch.states_backward(of_out, contiguous(dfinal), dv, dstates, dx, dinitial if need_initial else None)
    dweight, dquery, dkey = (launch.of_chunks(*shape, dtype=torch.float32) for shape in ((CHUNK,), keys, keys))
    launch.squares(of_out, updates, dx, alike, dweight)
    launch.pairs_backward(of_out, states, dstates, updates, dx, dweight, dquery, dkey, dg, dbeta)
    launch.finish(dquery, dkey, dq, dk)
    return dq, dk, dv, dg, dbeta, dinitial
