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
    or None where arithmetic is the limit. `providers` compute the same function; `limit`, forward and both passes, only
    what nobody can leave out."""

    name: str
    inputs: Callable[[], tuple[Tensor, ...]]
    bytes: tuple[int, int] | None
    providers: dict[str, Call]
    limit: tuple[Call, Call] | None = None


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


def _add_rms_norm(tokens: int, hidden: int) -> Case:
    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return F.rms_norm(total, (hidden,), weight, 1e-5), total

    return Case(
        f"add_rms_norm {tokens}x{hidden}",
        lambda: (_random(tokens, hidden), _random(tokens, hidden), _random(hidden)),
        (8 * tokens * hidden, 16 * tokens * hidden),
        _providers(lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), eager),
    )


def _glu(name: str, tokens: int, size: int) -> Case:
    liger = _optional("liger_kernel.ops", {"swiglu": "LigerSiLUMulFunction", "geglu": "LigerGELUMulFunction"}[name])
    activation = {"swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh")}[name]

    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return Case(
        f"{name} {tokens}x{size}",
        lambda: (_random(tokens, 2 * size),),
        (6 * tokens * size, 16 * tokens * size),
        _providers(getattr(ops, name), eager, liger=liger and (lambda x: liger.apply(*x.chunk(2, dim=-1)))),
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


def _qk_norm_rope(tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, dim // 2)).cuda()
    cos, sin = angles.cos()[None].bfloat16(), angles.sin()[None].bfloat16()
    shape = kv_heads, heads // kv_heads, dim
    values = tokens * (heads + 2 * kv_heads) * dim
    return Case(
        f"qk_norm_rope {tokens}x({heads}+{kv_heads})x{dim}",
        lambda: (_random(1, tokens, (heads + 2 * kv_heads) * dim), _random(dim), _random(dim)),
        (4 * values, 8 * values + 2 * tokens * (heads + kv_heads) * dim),
        _providers(
            lambda x, q, k: ops.rope_qkv(x, cos, sin, *shape, q, k),
            lambda x, q, k: ops.rope_qkv_reference(x, cos, sin, *shape, q, k),
        ),
    )


def _cross_entropy(tokens: int, vocab: int) -> Case:
    quack = _optional("quack", "cross_entropy")
    return Case(
        f"cross_entropy {tokens}x{vocab}",
        lambda: (_random(tokens, vocab), torch.randint(vocab, (tokens,), device="cuda")),
        (2 * tokens * vocab, 6 * tokens * vocab),
        _providers(ops.cross_entropy, lambda x, y: F.cross_entropy(x.float(), y), quack=quack),
    )


def _cross_entropy_in_place(tokens: int, vocab: int) -> Case:
    """The logits are copied first, as they are lost; the limit is that copy."""
    return Case(
        f"cross_entropy in place {tokens}x{vocab}",
        lambda: (_random(tokens, vocab), torch.randint(vocab, (tokens,), device="cuda")),
        None,
        {
            "ligermodels": lambda x, y: ops.cross_entropy(x.clone(), y, in_place=True),
            "torch": lambda x, y: F.cross_entropy(x.float(), y),
        },
        (lambda x, y: x.clone(), lambda x, y: x.clone()),
    )


def _linear_cross_entropy(tokens: int, hidden: int, vocab: int, ignored: float = 0.0) -> Case:
    liger = _optional("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction")
    count = tokens - int(tokens * ignored)

    def inputs() -> tuple[Tensor, ...]:
        weight = _random(vocab, hidden) * hidden**-0.5
        target = torch.randint(vocab, (tokens,), device="cuda")
        target[torch.randperm(tokens, device="cuda")[count:]] = -100
        return _random(tokens, hidden), weight, target

    def gemms(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach()[:count], w.detach()
        logits = x @ w.t()
        return logits @ w, logits.t() @ x

    return Case(
        f"linear_cross_entropy {tokens}x{hidden}x{vocab}" + (f" {ignored:.0%} ignored" if ignored else ""),
        inputs,
        None,
        _providers(
            lambda x, w, y: ops.linear_cross_entropy(x, w, y, num_targets=count),
            lambda x, w, y: F.cross_entropy((x @ w.T).float(), y),
            liger=liger and (lambda x, w, y: liger.apply(x, w, y)[0]),
        ),
        (lambda x, w, y: x[:count] @ w.t(), gemms),
    )


CASES: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": lambda: [_rms_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "add_rms_norm": lambda: [_add_rms_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "swiglu": lambda: [_glu("swiglu", 16384, 14336)],
    "geglu": lambda: [_glu("geglu", 16384, 14336)],
    "rope": lambda: [_rope(16384, 32, 8, 128)],
    "qk_norm_rope": lambda: [_qk_norm_rope(16384, 32, 8, 128)],
    "cross_entropy": lambda: [_cross_entropy(8192, 128256), _cross_entropy_in_place(8192, 128256)],
    "linear_cross_entropy": lambda: [
        _linear_cross_entropy(8192, 4096, 128256),
        _linear_cross_entropy(8192, 4096, 128256, ignored=0.5),
        _linear_cross_entropy(32768, 4096, 128256),
        _linear_cross_entropy(16384, 2048, 128256),
        _linear_cross_entropy(8192, 2304, 256000),
        _linear_cross_entropy(8192, 4096, 32000),
    ],
}
