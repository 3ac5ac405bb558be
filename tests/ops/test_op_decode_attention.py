from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from conftest import Where
from forward_only import check_forward
from op_harness import LAYOUTS, contiguous, middle_transposed, strided_rows, transposed, wide

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops import decode_attention

MODULE = import_module("ligermodels.ops.decoding.decode_attention")  # the package has a function of this name


def sees(
    b: int, t: int, S: int, cache_seqlens: list[int], window: int | None, tree: list[list[list[int]]] | None
) -> list[int]:
    """The slots that token t of row b sees, by the definition."""
    length = cache_seqlens[b]
    place = list(range(S))
    seen = list(range(length + t + 1))
    position = length + t
    if tree is not None:
        for u, row in enumerate(tree[b]):
            place[length + u] = length + sum(row) - 1
        seen = [*range(length), *(length + u for u, named in enumerate(tree[b][t]) if named)]
        position = place[length + t]
    return [s for s in seen if window is None or place[s] > position - window]


def plain_attention(
    cache_seqlens: list[int],
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    tree: torch.Tensor | None = None,
) -> Callable[..., torch.Tensor]:
    """One token at a time over just the keys that it sees; scores and weights in q's dtype, as in eager models."""

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        B, T, heads, D = q.shape
        nodes = None if tree is None else tree.int().expand(B, T, T).tolist()
        out = torch.zeros_like(q)
        for b in range(B):
            for t in range(T):
                slots = sees(b, t, k.shape[1], cache_seqlens, window, nodes)
                if not slots:
                    continue
                keys, values = (x[b, slots].repeat_interleave(heads // k.shape[2], 1) for x in (k, v))
                scores = torch.einsum("hd,shd->hs", q[b, t], keys) * (
                    D**-0.5 if softmax_scale is None else softmax_scale
                )
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None]], dim=1)
                weights = wide(scores).softmax(-1).to(q.dtype)[:, : len(slots)]
                out[b, t] = torch.einsum("hs,shd->hd", weights, values)
        return out

    return expected


def random_tree(nodes: int) -> torch.Tensor:
    """A mask like those of Medusa: each node sees itself and its ancestors."""
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[int(torch.randint(max(node - 3, 0), node, ()))]
    return mask


def make(
    where: Where, T: int, heads: int, kv_heads: int, D: int, S: int, cache_seqlens: list[int]
) -> list[torch.Tensor]:
    """q and caches, in which slots without a token hold NaN."""
    B = len(cache_seqlens)
    q, k, v = (
        torch.randn(s, dtype=where.dtype, device=where.device)
        for s in ((B, T, heads, D), (B, S, kv_heads, D), (B, S, kv_heads, D))
    )
    for b, length in enumerate(cache_seqlens):
        for cache in (k, v):
            cache[b, length + T :] = float("nan")
    return [q, k, v]


def check_attention(
    where: Where,
    T: int,
    heads: int,
    kv_heads: int,
    D: int,
    S: int,
    cache_seqlens: list[int],
    *,
    tree: torch.Tensor | None = None,
    q_layout: Callable = contiguous,
    cache_layout: Callable = contiguous,
    sinks: bool = False,
    **options: Any,
) -> None:
    q, k, v = make(where, T, heads, kv_heads, D, S, cache_seqlens)
    counts = torch.tensor(cache_seqlens, device=where.device)
    mask = None if tree is None else tree.to(where.device)
    extra = [q_layout(3 * torch.randn(heads, dtype=where.dtype, device=where.device))] if sinks else []
    check_forward(
        lambda q, k, v, s=None: decode_attention(q, k, v, counts, tree_mask=mask, sinks=s, **options),
        plain_attention(cache_seqlens, tree=tree, **options),
        [q_layout(q), cache_layout(k), cache_layout(v), *extra],
    )


CASES: dict[str, dict[str, Any]] = {  # T, query heads, kv heads, head_dim, slots, filled slots
    "one token": {"sizes": (1, 4, 2, 64, 150, [0, 149])},
    "nothing before": {"sizes": (1, 1, 1, 2, 1, [0])},
    "three tokens": {"sizes": (3, 6, 2, 80, 90, [50, 87])},
    "odd": {"sizes": (5, 3, 3, 37, 71, [65])},
    "long and short": {"sizes": (2, 2, 1, 16, 300, [200, 64, 290])},
    "window": {"sizes": (4, 2, 1, 16, 300, [290, 0]), "window": 33},
    "window of one": {"sizes": (2, 2, 1, 16, 70, [66, 0]), "window": 1},
    "window wider than the cache": {"sizes": (3, 2, 1, 16, 70, [66, 5]), "window": 70},
    "softcap": {"sizes": (2, 4, 2, 64, 100, [90]), "softcap": 3.0, "softmax_scale": 0.7},
    "wide softcap": {"sizes": (1, 2, 1, 256, 70, [60]), "softcap": 50.0},
    "huge scores": {"sizes": (2, 2, 1, 16, 100, [90, 30]), "softmax_scale": 3e3},
    "tree": {"sizes": (9, 4, 2, 16, 150, [141]), "tree": random_tree},
    "tree of one": {"sizes": (1, 2, 2, 16, 70, [64]), "tree": random_tree},
    "wide tree": {"sizes": (67, 2, 1, 16, 200, [130]), "tree": random_tree},
    "tree in a window": {"sizes": (13, 2, 1, 16, 200, [187, 2]), "tree": random_tree, "window": 3},
    "wide tree in a window": {"sizes": (70, 1, 1, 16, 200, [129]), "tree": random_tree, "window": 66},
    "sinks": {"sizes": (3, 6, 2, 80, 300, [290, 0, 65]), "sinks": True},
    "sinks in a window": {"sizes": (4, 6, 3, 16, 300, [290, 0]), "sinks": True, "window": 33},
    "sinks and a softcap": {"sizes": (1, 3, 1, 64, 100, [90]), "sinks": True, "softcap": 3.0},
    "tree and all else": {
        "sizes": (6, 4, 2, 80, 100, [94, 4]),
        "sinks": True,
        "tree": random_tree,
        "window": 9,
        "softcap": 2.0,
        "softmax_scale": 0.3,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_sms", [1, 64])
def test_decode_attention(where: Where, case: str, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all slots to one program, and with as many programs as there are tiles of slots, some with nothing to do."""
    monkeypatch.setattr(MODULE, "num_sms", lambda device: num_sms)
    options = dict(CASES[case])
    sizes = options.pop("sizes")
    if "tree" in options:
        options["tree"] = options["tree"](sizes[0])
    check_attention(where, *sizes, **options)


@pytest.mark.parametrize("D", [1, 64, 96, 128, 256, 520])
def test_head_dims(where: Where, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "num_sms", lambda device: 3)
    check_attention(where, 2, 6, 2, D, 100, [98, 40])


@pytest.mark.parametrize(("tokens", "heads"), [(1, 42), (7, 10)])
def test_several_tiles_of_rows(where: Where, tokens: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile may hold parts of tokens' groups of heads; the window starts elsewhere in each."""
    monkeypatch.setattr(MODULE, "MAX_ROWS", 16)
    for options in ({}, {"window": 5}, {"tree": random_tree(tokens)}, {"tree": random_tree(tokens), "window": 5}):
        check_attention(where, tokens, heads, 2, 16, 100, [80], sinks=bool(options), **options)


@pytest.mark.parametrize("q_layout", [*LAYOUTS, middle_transposed])
@pytest.mark.parametrize("cache_layout", [contiguous, strided_rows, middle_transposed])
def test_layouts(where: Where, q_layout: Callable, cache_layout: Callable) -> None:
    check_attention(where, 3, 6, 2, 16, 90, [0, 50, 87], q_layout=q_layout, cache_layout=cache_layout)


@pytest.mark.parametrize("window", [None, 4])
def test_each_row_its_own_mask(where: Where, window: int | None) -> None:
    """A mask need not be a tree's, and one that names nothing leaves a token nothing to see."""
    masks = torch.stack([random_tree(5), torch.rand(5, 5) < 0.4, torch.zeros(5, 5, dtype=torch.bool)])
    for tree in (masks, transposed(masks), masks[:1].expand(3, 5, 5)):
        check_attention(where, 5, 4, 2, 16, 80, [70, 66, 0], tree=tree, window=window)
        check_attention(where, 5, 4, 2, 16, 80, [70, 66, 0], tree=tree, window=window, sinks=True)
    alone = decode_attention(
        *make(where, 5, 4, 2, 16, 80, [0]), torch.tensor([0], device=where.device), tree_mask=masks[2].to(where.device)
    )
    assert not alone.any()


def test_a_token_that_does_not_see_itself(where: Where) -> None:
    check_attention(where, 1, 4, 2, 16, 20, [9, 9], tree=torch.zeros(1, 1, dtype=torch.bool))


def test_full_beyond_the_cache(where: Where) -> None:
    """cache_seqlens that are too large are a mistake, but nothing past the end is read."""
    q, *caches = make(where, 2, 2, 1, 16, 80, [68])
    k, v = (x[:, :70] for x in caches)
    for mask in (None, torch.ones(2, 2, dtype=torch.bool, device=where.device)):
        for length in (69, 70, 1000):
            out = decode_attention(q, k, v, torch.tensor([length], device=where.device), tree_mask=mask)
            assert torch.isfinite(out).all()


@pytest.mark.parametrize("num_sms", [1, 64])
def test_nan_shows(where: Where, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a query or in a key reaches the tokens that see it, and no other."""
    monkeypatch.setattr(MODULE, "num_sms", lambda device: num_sms)
    cache_seqlens = torch.tensor([90], device=where.device)
    for slot, tokens in ((None, [0]), (3, [0, 1]), (91, [1])):
        q, k, v = make(where, 2, 2, 1, 16, 100, [90])
        (q[0, 0, 1] if slot is None else k[0, slot, 0])[5] = float("nan")
        nan = decode_attention(q, k, v, cache_seqlens).isnan()
        assert nan.any(-1).any(-1)[0].nonzero().flatten().tolist() == tokens
        assert (nan[0, tokens, 1] & ~nan[0, tokens, 0] if slot is None else nan[0, tokens]).all()


@pytest.mark.parametrize("B", [0, 2])
def test_no_tokens(where: Where, B: int) -> None:
    q, k, v = make(where, 0 if B else 1, 4, 2, 16, 8, [3] * B)
    assert decode_attention(q, k, v, torch.full((B,), 3, device=where.device)).shape == q.shape


def test_as_ops_attention(where: Where) -> None:
    """Where both can serve: one row, the cache just full."""
    q, k, v = make(where, 3, 6, 2, 64, 100, [97])
    cache_seqlens = torch.tensor([97], device=where.device)
    sinks = torch.randn(6, dtype=where.dtype, device=where.device)
    for options in ({}, {"window": 20}, {"softcap": 4.0, "softmax_scale": 0.2}, {"window": 20, "sinks": sinks}):
        ours, other = decode_attention(q, k, v, cache_seqlens, **options), ops.attention(q, k, v, **options)
        tolerance = 1e-4 if where.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "softmax_scale": 0.3,
        "window": 5,
        "softcap": 2.0,
        "tree_mask": random_tree(3),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled(name: str, kernels_device: torch.device) -> None:
    """One graph for all cache_seqlens, without a break; the schema and the fake tell the truth."""
    options = {k: v.to(kernels_device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
    where = Where(kernels_device, torch.float32)
    q, k, v = (x.nan_to_num(0) for x in make(where, 3, 4, 2, 16, 20, [6, 9]))
    torch._dynamo.reset()
    compiled = torch.compile(decode_attention, fullgraph=True, backend="aot_eager")
    for cache_seqlens in ([6, 9], [17, 0]):
        counts = torch.tensor(cache_seqlens, device=kernels_device)
        with torch._dynamo.config.patch(error_on_recompile=cache_seqlens[1] == 0):
            assert torch.equal(compiled(q, k, v, counts, **options), decode_attention(q, k, v, counts, **options))
    given = {"tree_mask": None, "softmax_scale": 0.25, "window": None, "softcap": None, "sinks": None} | options
    given = [given[name] for name in ("tree_mask", "softmax_scale", "window", "softcap", "sinks")]
    torch.library.opcheck(
        torch.ops.ligermodels.decode_attention.default,
        (q.transpose(0, 1).contiguous().transpose(0, 1), k, v, counts, *given),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "dtype"),
    [
        *((*sizes, torch.bfloat16) for sizes in [(32, 8, 128), (32, 8, 64), (8, 4, 256), (32, 32, 80), (32, 32, 96)]),
        *((71, 1, 64, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_large(heads: int, kv_heads: int, D: int, dtype: torch.dtype) -> None:
    where = Where(torch.device("cuda"), dtype)
    for T in (1, 2, 64):
        check_attention(where, T, heads, kv_heads, D, 1500, [1400, 1, 700])
        for options in ({"softcap": 30.0}, {"sinks": True}):
            check_attention(where, T, heads, kv_heads, D, 1500, [1400, 65], tree=random_tree(T), window=300, **options)
    check_attention(where, 1, heads, kv_heads, D, 900, [i * 13 for i in range(64)])


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("heads_first", [False, True])
def test_cache_of_more_than_2_to_the_31(heads_first: bool) -> None:
    """The last slots of the last head of such a cache, against the same slots in a small one."""
    S, kept = (1 << 21) + 9, 100
    shape = (1, 8, S, 128) if heads_first else (1, S, 8, 128)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k, v = (x.transpose(1, 2) if heads_first else x for x in (k, v))
    for cache in (k, v):
        cache[:, -kept:] = torch.randn(1, kept, 8, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(1, 1, 32, 128, dtype=torch.bfloat16, device="cuda")
    length = torch.tensor([S - 1], device="cuda")
    small = [x[:, -kept:].contiguous() for x in (k, v)]
    wanted = decode_attention(q, *small, torch.tensor([kept - 1], device="cuda"))
    torch.testing.assert_close(decode_attention(q, k, v, length, window=kept), wanted)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("tree", [False, True])
def test_step_in_a_cuda_graph(tree: bool) -> None:
    """Rotation into the cache, then attention over it: one graph for all steps, with the bits of the calls alone."""
    T, S, Hkv, G, D = (16 if tree else 1), 300, 2, 4, 64
    mask = random_tree(T).cuda() if tree else None
    qkv, start = torch.randn(3, T, Hkv * (G + 2) * D, device="cuda").bfloat16(), torch.tensor([0, 7, 100]).cuda()
    caches = [torch.randn(3, S, Hkv, D, device="cuda").bfloat16() for _ in range(2)]
    cache_seqlens = start.clone()

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        angle = (cache_seqlens[:, None] + torch.arange(T, device="cuda"))[:, :, None] / torch.arange(
            1, 33, device="cuda"
        )
        q = ops.rope_qkv_cached(qkv, angle.cos(), angle.sin(), Hkv, G, D, k_cache, v_cache, cache_seqlens)
        return decode_attention(q, k_cache, v_cache, cache_seqlens, tree_mask=mask)

    mine = [x.clone() for x in caches]
    step(*mine)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*mine)
    for x, y in zip(mine, caches, strict=True):
        x.copy_(y)
    for _ in range(9):
        qkv.normal_()
        graph.replay()
        assert torch.equal(out, step(*caches))
        cache_seqlens += T
    assert all(torch.equal(x, y) for x, y in zip(mine, caches, strict=True))


Q, CACHE, LENGTHS = torch.ones(2, 3, 4, 8), torch.ones(2, 9, 2, 8), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q must be floating of shape \(B, T, Hq, D\)"),
        ({"q": Q.long()}, "q must be floating"),
        ({"k_cache": CACHE[:1]}, r"k_cache must be torch.float32 of shape \(2, S, Hkv, 8\)"),
        ({"k_cache": CACHE[:, :2], "v_cache": CACHE[:, :2]}, "k_cache must have at least 3 slots"),
        ({"v_cache": CACHE[:, 1:]}, "v_cache must be"),
        ({"v_cache": CACHE.double()}, "v_cache must be"),
        ({"k_cache": torch.ones(2, 9, 3, 8), "v_cache": torch.ones(2, 9, 3, 8)}, "k_cache must .* divides q's 4"),
        ({"k_cache": torch.ones(2, 9, 8, 2).transpose(2, 3)}, "last dimension of k_cache must be contiguous"),
        ({"cache_seqlens": torch.tensor(1)}, r"cache_seqlens must be torch.int32 or torch.int64 of shape \(2\)"),
        ({"cache_seqlens": torch.ones(2)}, "cache_seqlens must be torch.int32"),
        ({"tree_mask": torch.ones(3, 3)}, r"tree_mask must be torch.bool of shape \(3, 3\)"),
        ({"tree_mask": torch.ones(1, 3, 3, dtype=torch.bool)}, "tree_mask must be"),
        ({"sinks": torch.ones(2)}, r"sinks must be floating of shape \(4\)"),
        ({"sinks": torch.ones(4).requires_grad_()}, "has no gradient"),
        ({"window": 0}, "decode_attention: window: must be a whole number of at least 1"),
        (
            {"cache_seqlens": torch.ones(2, dtype=torch.int32, device="meta")},
            "cache_seqlens must be .* on cpu; got .* on meta",
        ),
        ({"q": Q.clone().requires_grad_()}, "has no gradient"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_attention(**({"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": LENGTHS} | change))
