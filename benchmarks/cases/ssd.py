"""Cases of `python -m benchmarks ops ssd`: the recurrence of Mamba2 over sequences, beside mamba-ssm's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.timing.case import Case, of_tokens, optional, providers, random
from ligermodels import ops
from ligermodels.ops.linear_attention.ssd import ssd_reference

PEER_CHUNK = 256
"""Tokens of a chunk of mamba-ssm, as in the configs of Granite 4."""


@of_tokens
def ssd(tokens: int, heads: int, dim: int, size: int, groups: int = 1) -> Case:
    """The recurrence from zero, without the last state.

    Args:
        tokens: Number of tokens of the sequence.
        heads: Number of heads; 48 and 128 in Granite 4.0 Tiny and Small.
        dim: Channels of a head.
        size: Channels of the state per channel of a head.
        groups: Number of groups of B and C.
    """
    peer = optional("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")

    def inputs() -> tuple[Tensor, ...]:
        steps = (random(1, tokens, heads).abs() + 1) * 0.05
        rates = -torch.linspace(1, 16, heads, device=steps.device).to(steps.dtype)
        of_groups = (random(1, tokens, groups, size) for _ in range(2))
        return random(1, tokens, heads, dim), steps, rates, *of_groups, random(heads)

    values, states = tokens * heads * dim, tokens * groups * size
    forward = 2 * (2 * values + 2 * states + tokens * heads)
    backward = 2 * (3 * values + 4 * states + 2 * tokens * heads)
    return Case(
        f"ssd {tokens}x{heads}x{dim}, state {size}, groups {groups}",
        inputs,
        (forward, forward + backward),
        providers(
            lambda x, dt, a, b, c, d: ops.ssd(x, dt, a, b, c, d, final_state=False)[0],
            lambda x, dt, a, b, c, d: ssd_reference(x, dt, a, b, c, d)[0],
            compiled=False,  # a loop over all chunks
            mamba_ssm=peer and (lambda x, dt, a, b, c, d: peer(x, dt, a.float(), b, c, PEER_CHUNK, D=d.float())),
        ),
    )
