"""`python -m benchmarks ops [OP ...] [--out FILE]`: time and memory of the ops, beside their peers.

- `both` is forward and backward.
- `..._ms`: time of a single call from Python. `..._row_ms`: time of a call back to back with others in a CUDA graph,
  each with its own tensors: no launches from Python, and memory as busy as in a model.
- `..._of_copy`: the rate of the fewest bytes that the op must move, as a fraction of the rate of a large device copy.
- `..._of_copy_at_size`: speed as a fraction of a copy of as many bytes, timed in the same way; one copy per pass.
- `..._limit_ms`: a lower bound (for the linear losses and attention: their GEMMs), measured in turns with the op.

`benchmarks.timing.checks` describes the checks of every timed call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.cases import losses
from benchmarks.cases.block_context import block_context_attention
from benchmarks.cases.causal_conv import causal_conv
from benchmarks.cases.experts import LAYERS, QWEN3, mix_experts
from benchmarks.cases.ssd import ssd
from benchmarks.reporting import recording
from benchmarks.timing import measure, op
from benchmarks.timing.case import Case, of_tokens, optional, providers, random
from ligermodels import ops

COLUMNS = (
    *("forward_ms", "both_ms", "forward_of_copy", "both_of_copy", "forward_row_of_copy", "both_row_of_copy"),
    *("both_of_copy_at_size", "both_of_limit", "eager_us", "graph_us", "peak_mib", "error"),
)


@of_tokens
def rms_norm(tokens: int, hidden: int) -> Case:
    """Root mean square norm."""
    liger = optional("liger_kernel.ops", "LigerRMSNormFunction")
    quack = optional("quack", "rmsnorm")
    return Case(
        f"rms_norm {tokens}x{hidden}",
        lambda: (random(tokens, hidden), random(hidden)),
        (4 * tokens * hidden, 10 * tokens * hidden),
        providers(
            lambda x, w: ops.rms_norm(x, w, 1e-5),
            lambda x, w: F.rms_norm(x, (hidden,), w, 1e-5),
            liger=liger and (lambda x, w: liger.apply(x, w, 1e-5, 0.0, "llama", False)),
            quack=quack and (lambda x, w: quack(x, w, eps=1e-5)),
        ),
    )


@of_tokens
def add_rms_norm(tokens: int, hidden: int) -> Case:
    """Root mean square norm of a sum; returns the sum too."""
    liger = optional("liger_kernel.ops", "LigerFusedAddRMSNormFunction")

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return F.rms_norm(total, (hidden,), weight, 1e-5), total

    return Case(
        f"add_rms_norm {tokens}x{hidden}",
        lambda: (random(tokens, hidden), random(tokens, hidden), random(hidden)),
        (8 * tokens * hidden, 16 * tokens * hidden),
        providers(
            lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5),
            eager,
            liger=liger and (lambda x, r, w: liger.apply(x, r, w, 1e-5, 0.0, "llama", False)),
        ),
    )


@of_tokens
def layer_norm(tokens: int, hidden: int) -> Case:
    """Layer norm with weight and bias."""
    liger = optional("liger_kernel.ops", "LigerLayerNormFunction")
    return Case(
        f"layer_norm {tokens}x{hidden}",
        lambda: (random(tokens, hidden), random(hidden), random(hidden)),
        (4 * tokens * hidden, 10 * tokens * hidden),
        providers(
            lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, (hidden,), w, b, 1e-5),
            liger=liger and (lambda x, w, b: liger.apply(x, w, b, 1e-5)),
        ),
    )


@of_tokens
def glu(name: str, tokens: int, size: int, packed: bool = True) -> Case:
    """SwiGLU or GeGLU of a packed projection (pairs of gate and up), or of two tensors as Liger takes them."""
    liger = optional("liger_kernel.ops", {"swiglu": "LigerSiLUMulFunction", "geglu": "LigerGELUMulFunction"}[name])
    activation = {"swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh")}[name]

    def eager(gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, up = (gate[..., ::2], gate[..., 1::2]) if up is None else (gate, up)
        return activation(gate) * up

    return Case(
        f"{name} {tokens}x{size}" + ("" if packed else " of two"),
        lambda: (random(tokens, 2 * size),) if packed else (random(tokens, size), random(tokens, size)),
        (6 * tokens * size, 16 * tokens * size),
        providers(getattr(ops, name), eager, liger=None if packed else liger and liger.apply),
    )


def _tables(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (1, T, dim / 2) of rotary positions."""
    angles = torch.outer(torch.arange(tokens), 1e4 ** -torch.linspace(0, 1, dim // 2)).to(measure.DEVICE)
    return angles.cos()[None].bfloat16(), angles.sin()[None].bfloat16()


@of_tokens
def rope(tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    """Rotary position embedding of queries and keys."""
    liger = optional("liger_kernel.ops", "LigerRopeFunction")
    cos, sin = _tables(tokens, dim)
    both_cos, both_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        def rotate(x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=-1)
            return x * both_cos[:, :, None] + torch.cat([-b, a], dim=-1) * both_sin[:, :, None]

        return rotate(q), rotate(k)

    def peer(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        # Liger rotates in place: copies of its inputs make every call the same work.
        q, k = liger.apply(q.transpose(1, 2).clone(), k.transpose(1, 2).clone(), both_cos, both_sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    bytes_one_way = 4 * tokens * (heads + kv_heads) * dim
    return Case(
        f"rope {tokens}x({heads}+{kv_heads})x{dim}",
        lambda: (random(1, tokens, heads, dim), random(1, tokens, kv_heads, dim)),
        (bytes_one_way, 2 * bytes_one_way),
        providers(lambda q, k: ops.rope(q, k, cos, sin), eager, liger_cloned=liger and peer),
    )


@of_tokens
def qk_norm_rope(tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    """Norms and rotary position embedding of queries and keys, from the packed projection."""
    cos, sin = _tables(tokens, dim)
    shape = kv_heads, heads // kv_heads, dim
    values = tokens * (heads + 2 * kv_heads) * dim
    return Case(
        f"qk_norm_rope {tokens}x({heads}+{kv_heads})x{dim}",
        lambda: (random(1, tokens, (heads + 2 * kv_heads) * dim), random(dim), random(dim)),
        (4 * values, 8 * values + 2 * tokens * (heads + kv_heads) * dim),
        providers(
            lambda x, q, k: ops.rope_qkv(x, cos, sin, *shape, q, k),
            lambda x, q, k: ops.rope_qkv_reference(x, cos, sin, *shape, q, k),
        ),
    )


def small(tokens: int, hidden: int) -> list[Case]:
    """Cases of few tokens."""
    cases = [
        rms_norm(tokens, hidden),
        add_rms_norm(tokens, hidden),
        glu("swiglu", tokens, hidden),
        rope(tokens, hidden // 128, hidden // 512, 128),
    ]
    plain = ("ligermodels", "torch", "liger", "liger_cloned")
    return [
        replace(c, name=f"small {c.name}", small=True, providers={p: c.providers[p] for p in plain if p in c.providers})
        for c in cases
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "rms_norm": lambda: [rms_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "add_rms_norm": lambda: [add_rms_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "layer_norm": lambda: [layer_norm(16384, hidden) for hidden in (2048, 4096, 8192)],
    "swiglu": lambda: [glu("swiglu", 16384, 14336, packed) for packed in (True, False)],
    "geglu": lambda: [glu("geglu", 16384, 14336, packed) for packed in (True, False)],
    "rope": lambda: [rope(16384, 32, 8, 128)],
    "qk_norm_rope": lambda: [qk_norm_rope(16384, 32, 8, 128)],
    "block_context_attention": lambda: [block_context_attention(4096, 512, length, 32, 8, 128) for length in (7, 16)],
    "causal_conv": lambda: [
        causal_conv(8192, 2048, 3, activation=None),
        causal_conv(8192, 8192, 4),
        causal_conv(8192, 3328, 4, bias=True),
    ],
    "ssd": lambda: [ssd(8192, heads, 64, 128) for heads in (48, 128)],
    "experts": lambda: [
        *(mix_experts(layer, 8192) for layer in LAYERS),
        mix_experts(QWEN3, 8192, skewed=True),
        mix_experts(QWEN3, 8192, halves=True),
    ],
    "small": lambda: [case for tokens in (1, 32, 512) for case in small(tokens, 4096)],
    "cross_entropy": lambda: [losses.cross_entropy(8192, 128256)],
    "linear_cross_entropy": lambda: [
        losses.linear_cross_entropy(8192, 4096, 128256),
        losses.linear_cross_entropy(8192, 4096, 128256, ignored=0.5),
        losses.linear_cross_entropy(8192, 4096, 128256, frozen="head"),
        losses.linear_cross_entropy(8192, 4096, 128256, frozen="hidden"),
        losses.linear_cross_entropy(32768, 4096, 128256),
        losses.linear_cross_entropy(16384, 2048, 128256),
        losses.linear_cross_entropy(8192, 2304, 256000),
        losses.linear_cross_entropy(8192, 4096, 32000),
    ],
    "linear_log_probs": lambda: [
        losses.linear_log_probs(8192, 4096, 151936),
        losses.linear_log_probs(8192, 4096, 151936, frozen=True),
        losses.linear_log_probs(8192, 4096, 151936, frozen=True, logged=True),
        losses.linear_log_probs(8192, 4096, 151936, entropy=False),
        losses.linear_log_probs(8192, 4096, 151936, frozen=True, entropy=False),
    ],
}


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"names of ops: {', '.join(CASES)} (all)")
    parser.add_argument("--providers", nargs="*", help="names of providers (all that are installed)")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(CASES):
        parser.error(f"unknown ops: {', '.join(sorted(unknown))}; give names from {', '.join(CASES)}")
    common, copy_rate, records = recording.facts(), measure.copy_rate(), []
    for turn, case in enumerate(case for name in arguments.ops or CASES for case in CASES[name]()):
        for record in op.measured(case, arguments.providers, copy_rate, turn):
            records.append(record)
            recording.write(arguments.out, [{**record, **common}])
            print(record["case"], record["provider"], record.get("failed", ""), flush=True)
    shown = [c for c in COLUMNS if any(c in record for record in records)]
    table = Table("case", "provider", *shown, title=f"{common['gpu']}, bf16")
    for record in records:
        cells = [f"{record[c]:.3g}" if c in record else "-" for c in shown]
        table.add_row(record["case"], record["provider"], *cells)
    Console(width=240).print(table)
    recording.end(records)
