"""Every attention backend against the definition in fp64, loops over queries and keys, with gradients."""

import importlib
import math
from functools import lru_cache
from typing import Any

import pytest
import torch

from ligermodels.errors import BackendError, InputError
from ligermodels.ops.attention.attention import AttentionRequest, attention, backends, choose

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "window-wider-than-row": {"window": 100},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "packed": {"bounds": [0, 5, 6, 6, 13]},
    "packed-window": {"bounds": [0, 9, 13], "window": 4},
    "mask": {"masked": True},
    "negative-scale": {"softmax_scale": -0.3},
    "scale-of-0-window": {"softmax_scale": 0.0, "window": 3},
    "decode-one": {"queries": 1},
    "decode-some": {"queries": 4},
    "decode-one-window": {"queries": 1, "window": 5},
    "one-kv-head": {"kv_heads": 1},
    "sinks": {"sinks": True},
    "sinks-window": {"sinks": True, "window": 3, "softmax_scale": 0.7},
    "sinks-softcap": {"sinks": True, "softcap": 1.5},
    "sinks-packed-window": {"sinks": True, "bounds": [0, 5, 6, 6, 13], "window": 4},
    "sinks-mask": {"sinks": True, "masked": True, "kv_heads": 1},
    "sinks-decode-one": {"sinks": True, "queries": 1},
    "sinks-decode-some": {"sinks": True, "queries": 4, "window": 5},
    "sinks-scale-of-0": {"sinks": True, "softmax_scale": 0.0},
    "narrow-values": {"value_dim": 10},
    "wide-values-window": {"value_dim": 22, "window": 3},
    "narrow-values-softcap": {"value_dim": 10, "softcap": 1.5},
    "narrow-values-packed": {"value_dim": 10, "bounds": [0, 5, 6, 6, 13]},
    "wide-values-mask-decode-some": {"value_dim": 22, "masked": True, "queries": 4},
    "narrow-values-sinks": {"value_dim": 10, "sinks": True},
    "packed-last-places": {"bounds": [0, 3, 5, 5, 11, 13], "queries": 6},
    "packed-last-places-window": {"bounds": [0, 3, 5, 5, 13], "queries": 7, "window": 4, "softcap": 1.5},
    "packed-last-places-sinks": {"bounds": [0, 3, 10, 13], "queries": 5, "sinks": True},
    "packed-one-last-place": {"bounds": [0, 3, 13, 13], "queries": 1},
    "all-options": {"window": 6, "softcap": 2.0, "softmax_scale": 0.3, "bounds": [0, 8, 13]},
}
FEW = ["plain", "one-kv-head", "all-options", "sinks-mask", "sinks-packed-window", "wide-values-mask-decode-some"]
FEW += ["narrow-values-softcap", "packed-last-places-window"]
"""Each option in one of them, for heads whose kernels differ from others by their tiles: to compile one of 256 channels
in float32 takes 20 s. Heads of 80 channels, whose tiles have 128, run every case, and so do those of 64 in 16 bits."""
ON_A_GPU = [
    pytest.param(case, dtype, head_dim, id=f"{dtype}-{head_dim}-{case}".removeprefix("torch."))
    for dtype, widths in ((torch.bfloat16, (64, 80)), (torch.float32, (80,)))
    for head_dim in (16, 64, 80, 128, 256)
    for case in (CASES if head_dim in widths else FEW)
]
NAMES = [pytest.param(name, marks=[pytest.mark.kernels] if name == "triton" else []) for name in backends()]
LIMITS = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.5e-2}


def by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    bounds: list[int] | None = None,
) -> torch.Tensor:
    """One query at a time over a list of the keys it may see."""
    batch, length, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    document = [sum(t >= b for b in bounds[1:]) for t in range(keys)] if bounds else [0] * keys
    rows = []
    for b in range(batch):
        for t in range(length):
            place = keys - length + t
            seen = [
                s
                for s in range(keys)
                if (mask[b, t, s] if mask is not None else s <= place and (window is None or place - s < window))
                and document[s] == document[place]
            ]
            for h in range(heads):
                scores = k[b, seen, h // group] @ q[b, t, h] * (dim**-0.5 if softmax_scale is None else softmax_scale)
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h, None]])
                rows.append(scores.softmax(0)[: len(seen)] @ v[b, seen, h // group])
    return torch.stack(rows).view(batch, length, heads, v.shape[3])


class Case:
    """A case's operands, and what the definition makes of them: outputs, then gradients, in float64."""

    def __init__(self, name: str, dtype: torch.dtype, head_dim: int) -> None:
        options = dict(CASES[name])
        self.bounds, queries = options.pop("bounds", None), options.pop("queries", 13)
        self.value_dim, kv_heads = options.pop("value_dim", None), options.pop("kv_heads", 2)
        batch, self.mask = 1 if self.bounds else 2, None
        self.sinks = options.pop("sinks", False)
        if options.pop("masked", False):
            self.mask = (torch.rand(batch, queries, 13) < 0.4) | torch.eye(13, dtype=torch.bool)[-queries:]
        self.options = options
        widths = (head_dim, head_dim, self.value_dim or head_dim)
        sizes = zip((queries, 13, 13), (4, kv_heads, kv_heads), widths, strict=True)
        tensors = [torch.randn(batch, *size) for size in sizes]
        tensors += [2 * torch.randn(4)] if self.sinks else []
        self.inputs = [x.to(dtype) for x in tensors]
        exact = [x.double().requires_grad_() for x in self.inputs]
        wanted = by_definition(*exact, mask=self.mask, bounds=self.bounds, **options)
        self.seed = torch.randn(wanted.shape).to(dtype)
        self.wanted = [wanted.detach(), *torch.autograd.grad(wanted, exact, self.seed.double())]


made = lru_cache(maxsize=4)(Case)
"""All backends share the few cases that were made last."""


def check_backend(name: str, case_name: str, device: str, dtype: torch.dtype, head_dim: int) -> None:
    case = made(case_name, dtype, head_dim)
    request = AttentionRequest(
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        query_length=case.inputs[0].shape[1],
        key_length=13,
        softmax_scale=case.options.get("softmax_scale", head_dim**-0.5),
        window=case.options.get("window"),
        softcap=case.options.get("softcap"),
        masked=case.mask is not None,
        packed=case.bounds is not None,
        sinks=case.sinks,
        value_dim=case.value_dim,
    )
    if name != "reference":  # It serves everything.
        try:
            choose(request, name)
        except BackendError as refusal:
            assert name in str(refusal)
            return
    inputs = [x.to(device, copy=True).requires_grad_() for x in case.inputs]
    options = dict(case.options)
    if case.bounds:
        options["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32, device=device)
    if case.sinks:
        options["sinks"] = inputs[3]
    out = attention(*inputs[:3], mask=None if case.mask is None else case.mask.to(device), backend=name, **options)
    found = [out, *torch.autograd.grad(out, inputs, case.seed.to(device))]
    for a, b in zip(found, case.wanted, strict=True):
        # The gradients of a few sinks are sums over all queries, whose terms' errors meet.
        limit = (2 if b.numel() <= 8 else 1) * LIMITS[dtype]
        assert (a.detach().cpu().double() - b).norm() <= limit * max(float(b.norm()), math.sqrt(b.numel()) / 10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float64, 14), (torch.float32, 16)])
def test_backend_follows_the_definition(name: str, case: str, dtype: torch.dtype, head_dim: int) -> None:
    check_backend(name, case, "cpu", dtype, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("case", "dtype", "head_dim"), ON_A_GPU)
def test_backend_follows_the_definition_on_a_gpu(name: str, case: str, dtype: torch.dtype, head_dim: int) -> None:
    check_backend(name, case, "cuda", dtype, head_dim)


LONG_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 130},
    "softcap": {"softcap": 5.0},
    "softcap in a window": {"softcap": 5.0, "window": 130},
    "packed": {"bounds": (0, 1, 300, 301, 700)},
    "packed window": {"bounds": (0, 1, 300, 301, 700), "window": 130},
    "last places": {"queries": 290},
    "packed last places": {"bounds": (0, 1, 300, 301, 500, 700), "queries": 290},
    "packed last places, window": {"bounds": (0, 1, 300, 301, 500, 700), "queries": 290, "window": 130},
    "sinks": {"sinks": True},
    "sinks in a window": {"sinks": True, "window": 130},
    "packed sinks": {"sinks": True, "bounds": (0, 1, 300, 301, 700)},
}
FEW_LONG = ["causal", "softcap in a window", "packed last places, window", "packed sinks"]
LONG = [
    *((case, head_dim) for head_dim in (64, 128) for case in LONG_CASES),
    *((case, head_dim) for head_dim in (96, 256, 512) for case in FEW_LONG),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] != "reference"])
@pytest.mark.parametrize(("case", "head_dim"), LONG)
def test_long_sequences(name: str, case: str, head_dim: int) -> None:
    """Over many tiles, in bfloat16, against the reference in float32 on the same values."""
    options = dict(LONG_CASES[case])
    bounds, sinks, queries = (options.pop(*each) for each in (("bounds", None), ("sinks", False), ("queries", 700)))
    batch = 1 if bounds else 2
    if bounds:
        options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    inputs = [
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for length, heads in ((queries, 8), (700, 2), (700, 2))
    ]
    if sinks:
        inputs.append(torch.randn(8, device="cuda", dtype=torch.bfloat16, requires_grad=True))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor | None = None, **which: str) -> Any:
        return attention(q, k, v, sinks=s, **options, **which)

    try:
        out = call(*inputs, backend=name)
    except BackendError as refusal:
        pytest.skip(str(refusal))
    exact = [x.detach().float().requires_grad_() for x in inputs]
    wanted = call(*exact, backend="reference")
    seed = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, inputs, seed)]
    expected = [wanted, *torch.autograd.grad(wanted, exact, seed.float())]
    for a, b in zip(found, expected, strict=True):
        assert (a.float() - b).norm() <= 0.01 * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["causal", "window", "packed"])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_sdpa_keeps_no_scores_on_a_gpu(dtype: torch.dtype, case: str, head_dim: int) -> None:
    """Query heads that share keys and values, beyond what torch's fused kernels for them take."""
    length, heads = 8192, 8
    options: dict[str, Any] = {"window": {"window": 1000}, "causal": {}}.get(case) or {}
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 1000, length], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(1, length, n, head_dim, device="cuda", dtype=dtype, requires_grad=True) for n in (heads, 2, 2)
    )
    attention(q, k, v, backend="sdpa", **options).sum().backward()  # what libraries keep for themselves
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, backend="sdpa", **options).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * length * length * torch.float32.itemsize


@pytest.mark.gpu
@pytest.mark.every_case
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] != "reference"])
def test_views_of_any_alignment(name: str, dtype: torch.dtype, value_dim: int) -> None:
    """Queries, keys and values side by side in one tensor, whose heads begin at any multiple of an element's size."""
    parts = [1, 16, 16, 5, value_dim]
    packed = torch.randn(2, 41, 4, sum(parts), device="cuda", dtype=dtype, requires_grad=True)

    def call(packed: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        _, q, k, _, v = packed.split(parts, dim=-1)
        out = attention(q, k, v, backend=backend)
        return out, torch.autograd.grad(out, packed, torch.ones_like(out))[0]

    try:
        found = call(packed, name)
    except BackendError as refusal:
        pytest.skip(str(refusal))
    for a, b in zip(found, call(packed.double(), "reference"), strict=True):
        assert (a.double() - b).norm() <= LIMITS[dtype] * b.norm()


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"bounds": [0, 150, 256, 700]}])
@pytest.mark.parametrize("queries", [300, 700])
def test_no_mask_of_all_pairs_is_kept_on_a_cpu(options: dict[str, Any], queries: int) -> None:
    """Fewer queries than keys, or a window: what autograd keeps grows with their sum."""
    q, k, v = (torch.randn(1, n, 2, 16, requires_grad=True) for n in (queries, 700, 700))
    given = {name: value for name, value in options.items() if name != "bounds"}
    if "bounds" in options:
        given["cu_seqlens"] = torch.tensor(options["bounds"], dtype=torch.int32)
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = attention(q, k, v, backend="sdpa", **given)
    assert sum(kept.values()) < 8 * 700 * 2 * 16 * 4 < 300 * 700 * 4
    torch.testing.assert_close(out, attention(q, k, v, backend="reference", **given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 3}])
def test_every_size_may_be_symbolic_in_torch_compile(options: dict[str, int]) -> None:
    compiled = torch.compile(attention, backend="eager", dynamic=True, fullgraph=True)
    for length, heads in ((5, 4), (7, 6)):
        q, k = torch.randn(2, length, heads, 8), torch.randn(2, length, 2, 8)
        torch.testing.assert_close(compiled(q, k, k, **options), attention(q, k, k, **options))


@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(softmax_scale: float) -> None:
    """Whichever backend "auto" chooses: torch's kernel for causal attention on the CPU returns NaN."""
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    for call in (attention, torch.compile(attention, backend="eager", dynamic=True, fullgraph=True)):
        out = call(q, k, v, softmax_scale=softmax_scale)
        torch.testing.assert_close(out, by_definition(q, k, v, softmax_scale=softmax_scale))


def test_no_tokens_of_packed_documents() -> None:
    q, k, v = torch.randn(1, 0, 4, 16), torch.randn(1, 0, 2, 16), torch.randn(1, 0, 2, 8)
    assert attention(q, k, v, cu_seqlens=torch.zeros(3, dtype=torch.int32)).shape == (1, 0, 4, 8)


def test_a_window_that_hides_no_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends have slower kernels for windows."""
    asked = []
    module = importlib.import_module("ligermodels.ops.attention.attention")  # the op has the module's name
    monkeypatch.setattr(module, "choose", lambda request, name: asked.append(request.window) or choose(request, name))
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 13, 2, 8)
    for window in (12, 13, 14, None):
        attention(q, k, k, window=window)
    assert asked == [12, None, None, None]


def test_tensors_that_do_not_fit_are_refused() -> None:
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(InputError, match=r"q must be floating of shape \(B, T, Hq, D\)"):
        attention(q[0], k, k)
    with pytest.raises(InputError, match=r"k must be torch.float32 of shape \(1, S, Hkv, 8\) .* got .* \(1, 4, 2, 7\)"):
        attention(q, k[..., :7], k[..., :7])
    with pytest.raises(InputError, match=r"v must be torch.float32 of shape \(1, 4, 2, Dv\)"):
        attention(q, k, k[:, :, :1])
    for backend in ("auto", "reference"):  # which computes wider numbers in any case
        with pytest.raises(InputError, match=r"k must be torch.float32 .* got torch.bfloat16"):
            attention(q, k.bfloat16(), k.bfloat16(), backend=backend)
        with pytest.raises(InputError, match=r"v must be torch.float32 .* got torch.bfloat16"):
            attention(q, k, k.bfloat16(), backend=backend)
    with pytest.raises(InputError, match="attention: needs D > 0"):
        attention(q[..., :0], k[..., :0], k)
    with pytest.raises(InputError, match="q has 3 heads, k 2"):
        attention(q[:, :, :3], k, k)
    with pytest.raises(InputError, match="4 queries but only 3 keys"):
        attention(q, k[:, :3], k[:, :3])
    with pytest.raises(InputError, match=r"sinks must be floating of shape \(4\)"):
        attention(q, k, k, sinks=torch.zeros(2))
    with pytest.raises(InputError, match=r"mask must be torch.bool of shape"):
        attention(q, k, k, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(InputError, match="window: a mask replaces the causal rule"):
        attention(q, k, k, mask=torch.ones(1, 4, 4, dtype=torch.bool), window=2)
    with pytest.raises(InputError, match="cu_seqlens needs one row"):
        attention(
            q.expand(2, 4, 4, 8),
            k.expand(2, 4, 2, 8),
            k.expand(2, 4, 2, 8),
            cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        )
