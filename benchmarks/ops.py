"""The ops as cases: inputs, the fewest bytes they must move, and who computes them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops

Call = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """`inputs()` makes tensors, bf16 unless integer; floating ones get gradients. `bytes` are (forward, both passes),
    or None where arithmetic is the limit. `providers` compute the same function."""

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    bytes: tuple[int, int] | None
    providers: dict[str, Call]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def _providers(ours: Call, torch_eager: Call, **peers: Call | None) -> dict[str, Call]:
    compiled = torch.compile(torch_eager)
    found = {name: peer for name, peer in peers.items() if peer is not None}
    return {"ligermodels": ours, "torch": torch_eager, "torch.compile": compiled, **found}


def _rms_norm(tokens: int, hidden: int) -> Case:
    liger = _optional("liger_kernel.ops", "LigerRMSNormFunction")
    quack = _optional("quack", "rmsnorm")
    return Case(
        f"rms_norm {tokens}x{hidden}",
        lambda: (_random(tokens, hidden), _random(hidden)),
        (4 * tokens * hidden, 10 * tokens * hidden),
        _providers(
            lambda x, w: ops.rms_norm(x, w, 1e-5),
            lambda x, w: F.rms_norm(x, (hidden,), w, 1e-5),
            liger=liger and (lambda x, w: liger.apply(x, w, 1e-5, 0.0, "llama", False)),
            quack=quack and (lambda x, w: quack(x, w, eps=1e-5)),
        ),
    )


def _swiglu(tokens: int, size: int) -> Case:
    liger = _optional("liger_kernel.ops", "LigerSiLUMulFunction")

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Case(
        f"swiglu {tokens}x{size}",
        lambda: (_random(tokens, 2 * size),),
        (6 * tokens * size, 16 * tokens * size),
        _providers(ops.swiglu, eager, liger=liger and (lambda x: liger.apply(*x.chunk(2, dim=-1)))),
    )


def _rope(tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    liger = _optional("liger_kernel.ops", "LigerRopeFunction")
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, dim // 2)).cuda()
    cos, sin = angles.cos()[None].bfloat16(), angles.sin()[None].bfloat16()
    both_cos, both_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * both_cos[:, :, None] + torch.cat([-b, a], dim=-1) * both_sin[:, :, None]

        return rotate(q), rotate(k)

    def peer(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # Liger rotates in place: its inputs are copies, so that every call does the same work.
        q, k = liger.apply(q.transpose(1, 2).clone(), k.transpose(1, 2).clone(), both_cos, both_sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    bytes_one_way = 4 * tokens * (heads + kv_heads) * dim
    return Case(
        f"rope {tokens}x({heads}+{kv_heads})x{dim}",
        lambda: (_random(1, tokens, heads, dim), _random(1, tokens, kv_heads, dim)),
        (bytes_one_way, 2 * bytes_one_way),
        _providers(lambda q, k: ops.rope(q, k, cos, sin), eager, liger_cloned=liger and peer),
    )


def _cross_entropy(tokens: int, vocab: int) -> Case:
    quack = _optional("quack", "cross_entropy")
    return Case(
        f"cross_entropy {tokens}x{vocab}",
        lambda: (_random(tokens, vocab), torch.randint(vocab, (tokens,), device="cuda")),
        (2 * tokens * vocab, 6 * tokens * vocab),
        _providers(ops.cross_entropy, lambda x, y: F.cross_entropy(x.float(), y), quack=quack),
    )


def _linear_cross_entropy(tokens: int, hidden: int, vocab: int) -> Case:
    liger = _optional("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction")

    def inputs() -> tuple[Tensor, ...]:
        weight = _random(vocab, hidden) * hidden**-0.5
        return _random(tokens, hidden), weight, torch.randint(vocab, (tokens,), device="cuda")

    return Case(
        f"linear_cross_entropy {tokens}x{hidden}x{vocab}",
        inputs,
        None,
        _providers(
            ops.linear_cross_entropy,
            lambda x, w, y: F.cross_entropy((x @ w.T).float(), y),
            liger=liger and (lambda x, w, y: liger.apply(x, w, y)[0]),
        ),
    )


CASES: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": lambda: [_rms_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "swiglu": lambda: [_swiglu(16384, 14336)],
    "rope": lambda: [_rope(16384, 32, 8, 128)],
    "cross_entropy": lambda: [_cross_entropy(8192, 128256)],
    "linear_cross_entropy": lambda: [
        _linear_cross_entropy(8192, 4096, 128256),
        _linear_cross_entropy(16384, 2048, 128256),
        _linear_cross_entropy(8192, 4096, 32000),
    ],
}
