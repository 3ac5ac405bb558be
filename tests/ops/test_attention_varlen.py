"""The backend "varlen" on a CPU, where two functions written here stand in for those of aten; and the choice of
backends on a GPU, by the properties of calls."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.ops.attention import varlen
from ligermodels.ops.attention.attention import BACKENDS, AttentionRequest, choose
from ligermodels.ops.attention.reference import REFERENCE
from ligermodels.ops.attention.varlen import VARLEN


def sequences(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, left: int | None) -> Any:
    """As the documentation of flash-attn has it: in each sequence the last query sees the last key. Slices of queries
    and keys, and which queries see which keys."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and q.shape[2] % 8 == 0
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert b - a <= max_q and d - c <= max_k
        query = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        key = torch.arange(d - c)
        yield slice(a, b), slice(c, d), (key <= query) & (left is None or key >= query - left)


def weights(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return scores.masked_fill(~seen, float("-inf"))


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (dropout, causal, debug) == (0.0, True, False) and (window_size_right == 0 or window_size_left is None)
    out, lse = torch.full_like(q, float("nan")), q.new_full((q.shape[1], q.shape[0]), float("nan"))
    for queries, keys, seen in sequences(q, k, cu_q, cu_k, max_q, max_k, window_size_left):
        scores = weights(q[queries], k[keys], seen, scale)
        lse[:, queries] = scores.logsumexp(-1)
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[queries] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
    return out, lse, q.new_empty(2), q.new_empty(0), q.new_empty(0)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys, seen in sequences(q, k, cu_q, cu_k, max_q, max_k, window_size_left):
        share = (weights(q[queries], k[keys], seen, scale) - lse[:, queries, None]).exp()
        delta = (out[queries] * dout[queries]).sum(-1).T[..., None]
        dweights = torch.einsum("thd,shd->hts", dout[queries], v[keys].repeat_interleave(group, 1))
        dscores = share * (dweights - delta) * scale
        dq[queries] = torch.einsum("hts,shd->thd", dscores, k[keys].repeat_interleave(group, 1))
        dk[keys] = torch.einsum("hts,thd->shd", dscores, q[queries]).unflatten(1, (-1, group)).sum(2)
        dv[keys] = torch.einsum("hts,thd->shd", share, dout[queries]).unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.fixture
def aten_on_a_cpu() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


CASES: dict[str, dict[str, Any]] = {
    "packed": {"bounds": [0, 3, 3, 9, 13]},
    "packed window": {"bounds": [0, 9, 13], "window": 4},
    "packed last places": {"bounds": [0, 3, 5, 5, 11, 13], "queries": 6, "window": 3},
    "packed one last place": {"bounds": [0, 3, 13, 13], "queries": 1},
    "window": {"window": 3},
    "last places": {"queries": 4},
    "narrow values": {"dim": 24, "value_dim": 16, "bounds": [0, 5, 13]},
    "wide values": {"dim": 8, "value_dim": 16, "window": 5},
    "odd widths": {"dim": 10, "value_dim": 3, "queries": 7},
    "wide heads": {"dim": 200, "value_dim": 200, "window": 5},
}


def operands(
    dtype: torch.dtype, *, queries: int = 13, dim: int = 16, value_dim: int = 16, window: int | None = None,
    bounds: list[int] | None = None,
) -> tuple[list[Tensor], AttentionRequest, Tensor | None]:  # fmt: skip
    batch = 1 if bounds else 2
    sizes = (queries, 4, dim), (13, 2, dim), (13, 2, value_dim)
    tensors = [torch.randn(batch, *size, dtype=dtype, requires_grad=True) for size in sizes]
    request = AttentionRequest(
        "cpu", dtype, dim, queries, 13, 0.3, window, None, False, bounds is not None,
        value_dim=None if value_dim == dim else value_dim,
    )  # fmt: skip
    return tensors, request, torch.tensor(bounds, dtype=torch.int32) if bounds else None


@pytest.mark.parametrize("case", CASES)
def test_packed_calls_of_aten(aten_on_a_cpu: None, case: str) -> None:
    """Results and gradients, to the last digits of float64."""
    inputs, request, cu_seqlens = operands(torch.float64, **CASES[case])
    found = varlen.VARLEN.run(*inputs, request, None, cu_seqlens, None)
    expected = REFERENCE.run(*inputs, request, None, cu_seqlens, None)
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, inputs, seed), torch.autograd.grad(expected, inputs, seed), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_in_one_compiled_graph_for_every_length(aten_on_a_cpu: None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, request: AttentionRequest) -> Tensor:
        request = request._replace(query_length=q.shape[1], key_length=k.shape[1])
        return varlen.VARLEN.run(q, k, v, request, None, cu_seqlens, None)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for options in ({"bounds": [0, 3, 9, 13], "window": 3}, {"queries": 4}):
        inputs, request, cu_seqlens = operands(torch.float32, **options)
        found, expected = (f(*inputs, cu_seqlens, request) for f in (compiled, call))
        torch.testing.assert_close(found, expected)
        for one, other in zip(
            torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_aten_has_the_parameters_that_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the installed torch, if it were built for CUDA; and another signature is a refusal that names it."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert varlen._missing() is None
    monkeypatch.setitem(varlen._PARAMETERS, "_flash_attention_backward", "grad_out query other")
    assert "has another aten::_flash_attention_backward" in str(varlen._missing())


BF16, FP32 = torch.bfloat16, torch.float32
CHOICES = [
    # head_dim, queries, keys, options -> backend without flash-attn on an H100
    (BF16, 128, 700, 700, {}, "sdpa"),
    (BF16, 128, 1, 700, {}, "sdpa"),
    (BF16, 128, 700, 700, {"packed": True}, "triton"),
    (BF16, 80, 700, 700, {"packed": True, "window": 30}, "triton"),
    (BF16, 128, 700, 700, {"window": 30}, "triton"),
    (BF16, 128, 300, 700, {}, "triton"),
    (BF16, 192, 700, 700, {"packed": True, "value_dim": 128}, "triton"),
    (BF16, 192, 700, 700, {"value_dim": 128}, "sdpa"),
    (BF16, 256, 700, 700, {"softcap": 50.0, "window": 400}, "triton"),
    (BF16, 512, 700, 700, {"packed": True}, "triton"),
    (BF16, 64, 700, 700, {"sinks": True, "window": 128}, "triton"),
    (BF16, 64, 700, 700, {"sinks": True}, "triton"),
    (FP32, 128, 700, 700, {}, "sdpa"),
    (FP32, 128, 700, 700, {"packed": True}, "sdpa"),
    (FP32, 128, 700, 700, {"softcap": 50.0}, "reference"),
    (BF16, 128, 700, 700, {"masked": True}, "sdpa"),
    (BF16, 576, 700, 700, {"packed": True}, "sdpa"),
    (BF16, 128, 700, 700, {"masked": True, "softcap": 50.0}, "reference"),
    (torch.float64, 128, 700, 700, {"packed": True}, "sdpa"),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "head_dim", "queries", "keys", "options", "name"), CHOICES)
def test_choice_on_a_gpu_without_flash_attn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, queries: int, keys: int,
    options: dict[str, Any], name: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(varlen, "MISSING", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
    for backend in ("flash-attn-4", "flash-attn-3", "flash-attn-2"):
        monkeypatch.delitem(BACKENDS, backend)
    basic: dict[str, Any] = {"window": None, "softcap": None, "masked": False, "packed": False}
    request = AttentionRequest("cuda", dtype, head_dim, queries, keys, 0.1, **basic | options)
    assert choose(request).name == name
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8))
    assert choose(request).name == ("varlen" if VARLEN.refuses(request) is None and name == "triton" else name)


def test_an_older_gpu_has_no_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "MISSING", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=7))
    request = AttentionRequest("cuda", torch.float16, 64, 700, 700, 0.1, None, None, False, True)
    assert "compute capability 8.0" in str(varlen.VARLEN.refuses(request))
