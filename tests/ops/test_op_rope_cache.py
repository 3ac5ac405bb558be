from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Where
from forward_only import check_forward
from op_harness import LAYOUTS, contiguous, middle_transposed, plain_rms_norm, strided_rows
from test_op_rope import plain_qkv, tables

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import rope_qkv, rope_qkv_cached
from ligermodels.ops.runtime import dispatch

CASES: dict[str, dict[str, Any]] = {  # B, T, kv heads, group, head_dim, rotated; slots of the cache, first slots
    "Llama": {"sizes": (1, 1, 2, 4, 64, 64), "slots": (9, [8])},
    "tree": {"sizes": (2, 3, 1, 3, 16, 16), "slots": (12, [9, 2]), "tables": 2},
    "Qwen": {"sizes": (2, 2, 2, 2, 64, 64), "slots": (7, [5, 0]), "norms": "qk"},
    "Gemma": {"sizes": (1, 1, 1, 2, 96, 96), "slots": (3, [1]), "norms": "qk", "offset": 1.0, "casting_mode": "gemma"},
    "partial": {"sizes": (1, 2, 3, 1, 60, 40), "slots": (3, [0]), "norms": "k"},
    "odd": {"sizes": (1, 2, 1, 7, 37, 20), "slots": (4, [1]), "norms": "q"},
    "not rotated": {"sizes": (1, 2, 2, 2, 50, None), "slots": (4, [2])},
    "values": {"sizes": (2, 2, 2, 3, 36, 20), "slots": (7, [5, 6]), "norms": "qk", "value_norm_eps": 0.1},
    "past the end": {"sizes": (4, 3, 1, 1, 6, 4), "slots": (5, [3, 5, 1000, -2])},
    "no tokens": {"sizes": (2, 0, 1, 1, 4, 4), "slots": (5, [3, 5])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("qkv_layout", "cache_layout"), [*zip(LAYOUTS, (contiguous, middle_transposed, strided_rows), strict=True)]
)
def test_rope_qkv_cached(where: Where, case: str, qkv_layout: Callable, cache_layout: Callable) -> None:
    """q, the slots written, and all the others, which keep what they hold."""
    norm = {"eps": 1e-5} | CASES[case]
    B, T, Hkv, G, D, R = norm.pop("sizes")
    S, first_slots = norm.pop("slots")
    names, shape = norm.pop("norms", ""), (Hkv, G, D)
    table = (None, None) if R is None else tables(norm.pop("tables", 1), T, R // 2, where.device)
    slots = torch.tensor(first_slots, device=where.device, dtype=torch.int32 if B == 2 else torch.int64)
    qkv = qkv_layout(3 * torch.randn(B, T, Hkv * (G + 2) * D, dtype=where.dtype, device=where.device))
    caches = [torch.randn(B, S, Hkv, D, dtype=where.dtype, device=where.device) for _ in range(2)]
    weights = {name: torch.randn(D, dtype=where.dtype, device=where.device) for name in names}

    value_norm_eps = norm.pop("value_norm_eps", None)

    def op(qkv: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = (cache_layout(x.clone()) for x in rest[:2])
        given = [dict(zip(names, rest[2:], strict=True)).get(name) for name in "qk"]
        q = rope_qkv_cached(qkv, *table, *shape, k, v, slots, *given, value_norm_eps=value_norm_eps, **norm)
        return q, k.contiguous(), v.contiguous()

    def expected(qkv: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [dict(zip(names, rest[2:], strict=True)).get(name) for name in "qk"]
        q, *new = plain_qkv(table, *shape, **norm)(qkv, *given)
        if value_norm_eps is not None:
            new[1] = plain_rms_norm(new[1], None, value_norm_eps, 0.0, "llama")
        old = [x.clone() for x in rest[:2]]
        for b, start in enumerate(first_slots):
            for t in range(T):
                if 0 <= start + t < S:
                    for x, y in zip(old, new, strict=True):
                        x[b, start + t] = y[b, t]
        return q.contiguous(), *old

    check_forward(op, expected, [qkv, *caches, *weights.values()])


def test_bits_of_rope_qkv(where: Where) -> None:
    shape, B, T = (2, 3, 64), 2, 4
    qkv = torch.randn(B, T, 640, dtype=where.dtype, device=where.device)
    table, weight = tables(1, T, 32, where.device), torch.randn(64, dtype=where.dtype, device=where.device)
    caches = [torch.empty(B, 9, 2, 64, dtype=where.dtype, device=where.device) for _ in range(2)]
    slots = torch.tensor([5, 0], device=where.device)
    q = rope_qkv_cached(qkv, *table, *shape, *caches, slots, weight, weight)
    k, v = (torch.stack([x[0, 5:9], x[1, 0:4]]) for x in caches)
    for ours, other in zip((q, k, v), rope_qkv(qkv, *table, *shape, weight, weight), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.kernels)])
def test_compiled(backend: str) -> None:
    """One graph for all slots, in which the op stays opaque, and which changes the caches: views of one tensor."""
    device = torch.device("cuda" if backend == "triton" and not dispatch.INTERPRETED else "cpu")

    def step(qkv: torch.Tensor, layer: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = layer
        q = rope_qkv_cached(qkv, *table, 2, 3, 8, k, v, slots)
        return q + 1, k.sum() + v.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    table, start = tables(1, 2, 4, device), torch.randn(2, 3, 9, 2, 8, device=device)
    with ops.set_backend(backend):
        for number, slots in enumerate(([0, 1, 7], [3, 7, 2])):
            qkv, at = torch.randn(3, 2, 80, device=device), torch.tensor(slots, device=device)
            one, two = start.clone(), start.clone()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                results = step(qkv, one, at), compiled(qkv, two, at)
            assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
            assert torch.equal(one, two) and not torch.equal(one, start)
        torch.library.opcheck(
            torch.ops.ligermodels.rope_cached.default,
            (
                qkv,
                *table,
                *one,
                at,
                None,
                torch.ones(8, device=device),
                2,
                3,
                8,
                1e-6,
                0.0,
                True,
                0.1,
                backend == "triton",
            ),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_autograd_sees_that_the_cache_changed(where: Where) -> None:
    """What saved the cache for its gradient refuses to go on with other values."""
    k, v = (torch.ones(1, 3, 1, 4, dtype=where.dtype, device=where.device) for _ in range(2))
    x = torch.ones_like(k, requires_grad=True)
    y = (x * v).sum()
    qkv, slots = torch.ones(1, 1, 12, dtype=where.dtype, device=where.device), torch.tensor([1], device=where.device)
    rope_qkv_cached(qkv, None, None, 1, 1, 4, k, v, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


QKV, CACHE, SLOTS, TABLE = torch.ones(2, 3, 24), torch.ones(2, 9, 1, 6), torch.tensor([1, 2]), torch.ones(1, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": QKV[..., 1:]}, "rope_qkv_cached: qkv must be .*head_dim = 24"),
        ({"k_cache": CACHE[:1]}, r"k_cache must be torch.float32 of shape \(2, S, 1, 6\)"),
        ({"v_cache": CACHE[:, 1:]}, "v_cache must be"),
        ({"v_cache": CACHE.half()}, "v_cache must be"),
        ({"k_cache": torch.ones(2, 9, 1, 12)[..., ::2]}, "last dimension of k_cache must be contiguous"),
        ({"slots": SLOTS[:1]}, r"slots must be torch.int32 or torch.int64 of shape \(2\)"),
        ({"slots": SLOTS.float()}, "slots must be"),
        ({"slots": SLOTS.to("meta")}, "on cpu; got torch.int64 .* on meta"),
        ({"sin": None}, "rope_qkv_cached: cos and sin must be given together"),
        ({"cos": TABLE[:, 1:]}, "rope_qkv_cached: cos must be"),
        ({"k_norm": torch.ones(5)}, "rope_qkv_cached: k_norm must be"),
        ({"q_norm": torch.ones(5)}, "rope_qkv_cached: q_norm must be"),
        ({"casting_mode": "never"}, "rope_qkv_cached: casting_mode must be"),
        ({"q_norm": torch.ones(6, requires_grad=True)}, "has no gradient"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    arguments = {"num_kv_heads": 1, "group_size": 2, "head_dim": 6, "k_cache": CACHE, "v_cache": CACHE, "slots": SLOTS}
    with pytest.raises(InputError, match=message):
        rope_qkv_cached(**({"qkv": QKV, "cos": TABLE, "sin": TABLE} | arguments | change))
