"""The gated delta rule with a decay for each key channel (Kimi Delta Attention) over sequences, by the project's Triton
kernels.

The forward pass saves only the operands, and the backward pass recomputes everything else. In bfloat16 both take 14 K +
256 bytes per token and value head, while they run, for values within chunks. The backward pass also takes 4 K V / 64
bytes for states and their gradients, and some 20 K + 8 V + 256 bytes for gradients within chunks: products of torch. In
float32 these are float32 too, or TF32 where `torch.set_float32_matmul_precision` allows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.ops.linear_attention.delta_channels_kernels import (
    channel_pairs_backward_kernel,
    channel_pairs_kernel,
    channel_paths_kernel,
    channel_states_backward_kernel,
    channel_states_kernel,
)
from ligermodels.ops.linear_attention.delta_chunks import EPS, empty_state, fitted, most_stages, operand_dtype
from ligermodels.ops.linear_attention.delta_chunks_forward import CHUNK
from ligermodels.ops.runtime.library import custom_op, is_symbolic
from ligermodels.ops.runtime.tensors import contiguous, heads_and_strides, without_autocast

TILES: dict[str, dict[str, int]] = {
    "paths": {"BLOCK_K": 64, "num_warps": 4},
    "pairs": {"BLOCK_K": 64, "num_warps": 4},
    "pairs_backward": {"BLOCK_K": 64, "num_warps": 8},
    "states": {"BLOCK_V": 32, "STAGES": 2, "num_warps": 4},
    "states_backward": {"BLOCK_V": 32, "STAGES": 2, "num_warps": 4},
}
"""Most channels of a tile of keys and of values, most stages of the loop's pipeline, and warps. Kernels of products
take at least `delta_chunks.MIN_WIDTH` keys: on Hopper "pairs_backward" writes out of bounds with 32."""


class _Launch:
    """State shared by the kernels of one call: operands in the form of kernel arguments, sizes, and shared buffers.
    Buffers have the shape (B * R, chunks, ...), and the dtype of products' operands unless stated otherwise."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> None:
        self.batch, self.tokens, self.heads, self.value_dim = v.shape
        self.key_dim, self.repeats = q.shape[3], self.heads // q.shape[2]
        self.chunks = -(-self.tokens // CHUNK)
        self.keys = *heads_and_strides(q), *heads_and_strides(k)
        self.v, self.beta, self.first = heads_and_strides(v), beta.contiguous(), first
        self.dtype, self.operand = operand_dtype(q.dtype)
        self.fitted = partial(fitted, sizes=(self.key_dim, self.value_dim), stages=most_stages(q))
        self.path = g.new_empty(self.batch * self.heads, self.chunks, CHUNK, self.key_dim, dtype=torch.float64)
        keys, square = (CHUNK, self.key_dim), (CHUNK, CHUNK)
        self.reads, self.known, self.late = (self.of_chunks(*keys) for _ in range(3))
        self.kept_last = self.of_chunks(self.key_dim, dtype=torch.float32)
        self.solved, self.attending = self.of_chunks(*square), self.of_chunks(*square)
        self._pairs(g.contiguous())

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launches a kernel; on the meta device, where plans of memory count the buffers, nothing."""
        if not self.path.is_meta:
            kernel[grid](*arguments, **constants)

    def of_chunks(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer of this shape for each chunk and value head."""
        return self.path.new_empty(self.batch * self.heads, self.chunks, *shape, dtype=dtype or self.dtype)

    def in_chunks(self, x: Tensor) -> Tensor:
        """x (B, T, R, ...) as a buffer, zero after the last token."""
        x = x.to(self.dtype).transpose(1, 2).flatten(0, 1)
        after = self.chunks * CHUNK - self.tokens
        x = F.pad(x, (*[0] * (2 * x.dim() - 4), 0, after)) if after else x
        return x.unflatten(1, (self.chunks, CHUNK))

    def in_tokens(self, x: Tensor) -> Tensor:
        """A buffer (B * R, chunks, CHUNK, ...) -> (B, T, R, ...)."""
        return x.flatten(1, 2)[:, : self.tokens].unflatten(0, (self.batch, self.heads)).transpose(1, 2)

    def tiles(self, name: str) -> dict[str, Any]:
        """Constants of the named kernel; tiles are no wider than its tensors."""
        constants = {"OPERAND": self.operand, "CHUNK": CHUNK, **self.fitted(TILES[name])}
        if "BLOCK_V" in constants:
            return constants
        return {**constants, "PACKED": self.first is not None, "EPS": EPS, "LEVELS": CHUNK.bit_length() - 1}

    def _pairs(self, g: Tensor) -> None:
        """Fills the buffers."""
        tiles = TILES["paths"]
        blocks = -(-self.key_dim // tiles["BLOCK_K"])
        programs = self.batch * self.heads * self.chunks
        self.launch(
            channel_paths_kernel, (programs, blocks), g, self.path, self.tokens, self.key_dim, self.heads, self.chunks,
            CHUNK=CHUNK, **tiles,
        )  # fmt: skip
        self.launch(
            channel_pairs_kernel, (programs,),
            *self.keys, self.path, self.beta, self.first, self.reads, self.known, self.late, self.kept_last,
            self.solved, self.attending, self.tokens, self.key_dim, self.heads, self.repeats, self.chunks,
            self.key_dim**-0.5, **self.tiles("pairs"),
        )  # fmt: skip

    def states(
        self, initial: Tensor | None, out: Tensor | None, final: Tensor | None, states: Tensor | None = None,
        updates: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes the outputs to `out` and the last state to `final`; without `out`, writes the state before each chunk
        to `states`, and U to `updates`."""
        tiles = self.tiles("states")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        self.launch(
            channel_states_kernel, (self.batch * self.heads * blocks,),
            self.reads, self.known, self.late, self.kept_last, self.solved, self.attending, *self.v, self.beta,
            initial, out, final, states, updates, self.tokens, self.key_dim, self.value_dim, self.heads,
            self.chunks * CHUNK, blocks, **tiles, INITIAL=initial is not None, FINAL=final is not None,
            OUTPUT=out is not None,
        )  # fmt: skip

    def states_backward(
        self, dout: Tensor, dfinal: Tensor | None, dv: Tensor, dstates: Tensor, dx: Tensor, dinitial: Tensor | None
    ) -> None:
        """Writes dV, the gradient of the state after each chunk, dX, and the gradient of the first state."""
        tiles = self.tiles("states_backward")
        blocks = -(-self.value_dim // tiles["BLOCK_V"])
        self.launch(
            channel_states_backward_kernel, (self.batch * self.heads * blocks,),
            self.reads, self.known, self.late, self.kept_last, self.solved, self.attending, *heads_and_strides(dout),
            self.beta, dfinal, dv, dstates, dx, dinitial, self.tokens, self.key_dim, self.value_dim, self.heads,
            self.chunks * CHUNK, blocks, **tiles, FINAL=dfinal is not None, INITIAL=dinitial is not None,
        )  # fmt: skip

    def pairs_backward(self, *gradients: Tensor) -> None:
        """gradients: of Q', K', K'', kept_last, A and M, read; of the normalised q and k, g and beta, written."""
        self.launch(
            channel_pairs_backward_kernel, (self.batch * self.heads * self.chunks,),
            *self.keys, self.path, self.beta, self.first, *gradients, self.tokens, self.key_dim, self.heads,
            self.repeats, self.chunks, self.key_dim**-0.5, **self.tiles("pairs_backward"),
        )  # fmt: skip

    def gradient_of_heads(self, x: Tensor, d: Tensor, scale: float) -> Tensor:
        """The gradient of queries or keys x (B, T, G, K), of x's dtype.

        d: a buffer with the gradient of scale * x / |x|."""
        d = self.in_tokens(d).unflatten(2, (x.shape[2], -1)).sum(3)
        wide = x.float()
        factor = torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
        unit = wide * factor
        return (scale * factor * (d - unit * (unit * d).sum(-1, keepdim=True))).to(x.dtype)


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
    launch = _Launch(q, k, v, g, beta, first)
    launch.states(contiguous(initial), out, final if final_state else None)
    return out, final


@custom_op(runs_on_meta=True)
def channel_delta_backward(
    dout: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    initial: Tensor | None, first: Tensor | None, need_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, g, beta and, with need_initial, of the initial state, from those of o, `dout`, and of
    the last state, `dfinal` or None. initial, first: as in the forward pass."""
    dv, dg, dinitial = v.new_empty(v.shape), g.new_empty(g.shape), empty_state(q, v, need_initial)
    if is_symbolic(dv) or not v.shape[0]:
        return q.new_empty(q.shape), k.new_empty(k.shape), dv, dg, beta.new_empty(beta.shape), dinitial
    launch = _Launch(q, k, v, g, beta, first)
    keys, values, state = (CHUNK, q.shape[3]), (CHUNK, v.shape[3]), (q.shape[3], v.shape[3])
    states, updates = launch.of_chunks(*state), launch.of_chunks(*values)
    launch.states(contiguous(initial), None, None, states, updates)
    dstates, dx = launch.of_chunks(*state), launch.of_chunks(*values)
    launch.states_backward(dout, contiguous(dfinal), dv, dstates, dx, dinitial if need_initial else None)
    do = launch.in_chunks(dout)
    with without_autocast(v):
        da, dm = (dx @ updates.mT).neg_(), do @ updates.mT
        dread, dknown, dlate = do @ states.mT, dx @ states.mT, updates @ dstates.mT
    wide = torch.float32
    dkept_last = (states * dstates).sum(-1, dtype=wide)
    dweight = (dx * launch.in_chunks(v)).sum(-1, dtype=wide) - (dknown * launch.known).sum(-1, dtype=wide)
    dknown *= -launch.in_chunks(beta)[..., None]
    dquery, dkey, of_pairs = (launch.of_chunks(*shape, dtype=wide) for shape in (keys, keys, (CHUNK,)))
    launch.pairs_backward(dread, dknown, dlate, dkept_last, da, dm, dquery, dkey, dg, of_pairs)
    dbeta = launch.in_tokens(dweight + of_pairs).to(beta.dtype).contiguous()
    dq = launch.gradient_of_heads(q, dquery, q.shape[3] ** -0.5)
    dk = launch.gradient_of_heads(k, dkey, 1.0)
    return dq, dk, dv, dg, dbeta, dinitial
