"""Ops under `set_batch_invariant`: the bits of a row or document alone, and in any batch."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Where
from interpreter import NUMPY_SUMS_ROWS_ALIKE
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.glu.glu import GLUOptions

SIZES = [(34, 33), (70, 130), (4, 97), (2, 1)]
"""(N, K): less than a tile, several tiles and steps, few rows as of LoRA."""
BOUNDS = [0, 5, 5, 6, 39]
"""Of documents: one without tokens, of one token, of several tiles."""


@pytest.fixture(autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    place, _ = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("where", ("", None))
    if place == "interpreter" and not NUMPY_SUMS_ROWS_ALIKE:
        pytest.skip("numpy, which is the interpreter's tl.dot, sums rows of a tile in different orders on this CPU")
    with ops.set_batch_invariant(True):
        yield


def randn(where: Where, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(where.device, where.dtype)


@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_linear_for_every_number_of_rows(where: Where, threads: int) -> None:
    """Wherever the rows begin, so at any address too."""
    if threads > 1 and where.place != "reference":
        pytest.skip("threads are of the CPU")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in {where.dtype, torch.float64} if where.place == "reference" else {where.dtype}:
            for N, K in SIZES:
                x, weight = randn(where, 40, K).to(dtype), randn(where, N, K, scale=0.1).to(dtype)
                bias = randn(where, N).to(dtype)
                for options in ({}, {"activation": GLUOptions("silu")}):
                    every = ops.linear(x, weight, bias, **options)
                    for rows in range(1, 41) if where.place == "reference" and threads == 1 else (1, 17, 40):
                        for start in {0, 40 - rows}:
                            found = ops.linear(x[start : start + rows], weight, bias, **options)
                            assert torch.equal(found, every[start : start + rows]), (dtype, N, K, rows, start)
    finally:
        torch.set_num_threads(before)


def test_operands_that_do_not_fit(where: Where) -> None:
    """The kernel would read beyond them."""
    x, weight, bias = randn(where, 3, 16), randn(where, 5, 16), randn(where, 5)
    for operands, message in (
        ((x, weight[:, :8], bias), "weight must be"),
        ((x, weight.double(), bias), "weight must be"),
        ((x, weight, bias[:1]), "bias must be"),
    ):
        with pytest.raises(InputError, match=f"linear: {message}"):
            ops.linear(*operands)


@pytest.mark.parametrize("rows", [(5,), (3, 7), (0,)], ids=str)
def test_linear_against_float64(where: Where, rows: tuple[int, ...]) -> None:
    """Result and gradients, no further from float64 than 1.5 times torch's own."""
    for N, K in SIZES:
        given = [randn(where, *rows, K), randn(where, N, K, scale=0.1), randn(where, N)]
        dy = randn(where, *rows, N, seed=1)

        def of(function: Any, dtype: torch.dtype, given: Any = given, dy: Tensor = dy) -> list[Tensor]:
            leaves = [x.to(dtype).detach().requires_grad_() for x in given]
            y = function(*leaves)
            return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

        exact, torchs = of(F.linear, torch.float64), of(F.linear, where.dtype)
        for found, wanted, theirs in zip(of(ops.linear, where.dtype), exact, torchs, strict=True):
            slack = 16 * torch.finfo(torch.float32).eps * (1 + wanted.norm())
            assert found.dtype == where.dtype
            assert (found.double() - wanted).norm() <= 1.5 * (theirs.double() - wanted).norm() + slack


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "long window and sinks": {"window": 20, "sinks": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
}


def inputs_of_attention(where: Where, name: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    q, k, v = (randn(where, 1, BOUNDS[-1], heads, 24, seed=heads) for heads in (6, 2, 2))
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks"] = randn(where, 6)
    return q, k, v + 1, options


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_attention_of_documents(where: Where, name: str) -> None:
    """Packed, alone, and decoded from a cache token by token, beside another sequence: equal bits."""
    q, k, v, options = inputs_of_attention(where, name)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=where.device)
    packed = ops.attention(q, k, v, cu_seqlens=bounds, **options)
    last = ops.attention(q[:, -20:], k, v, cu_seqlens=bounds, **options)
    assert torch.equal(last, packed[:, -20:])
    exact = ops.attention(*(x.double() for x in (q, k, v)), cu_seqlens=bounds, backend="reference", **options)
    assert (packed.double() - exact).abs().max() <= 20 * torch.finfo(where.dtype).eps
    for start, end in pairwise(BOUNDS):
        alone = ops.attention(q[:, start:end], k[:, start:end], v[:, start:end], **options)
        assert torch.equal(alone, packed[:, start:end])
        cache = [torch.full((2, 80, 2, 24), float("nan"), device=where.device, dtype=where.dtype) for _ in range(2)]
        for each, new in zip(cache, (k, v), strict=True):
            each[1, : end - start], each[0] = new[0, start:end], 0.5
        for t in {0, end - start - 1} if end > start else ():
            queries = q[:, start + t : start + t + 1].expand(2, -1, -1, -1)
            lengths = torch.tensor([17, t], device=where.device)
            assert torch.equal(ops.decode_attention(queries, *cache, lengths, **options)[1:], alone[:, t : t + 1])


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_attention(where: Where, name: str) -> None:
    q, k, v, options = inputs_of_attention(where, name)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=where.device)
    names = ["sinks"] if "sinks" in options else []
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *(options[each] for each in names))]

    def gradients(leaves: list[Tensor]) -> list[Tensor]:
        of_names = dict(zip(names, leaves[3:], strict=True))
        out = ops.attention(*leaves[:3], cu_seqlens=bounds, **{**options, **of_names})
        return list(torch.autograd.grad(out, leaves, torch.cos(out.detach().double()).to(out.dtype)))

    found = gradients(leaves)
    with ops.set_batch_invariant(False), ops.set_backend("reference"):
        exact = gradients([x.detach().double().requires_grad_() for x in leaves])
    for each, wanted in zip(found, exact, strict=True):
        assert (each.double() - wanted).norm() <= 20 * torch.finfo(where.dtype).eps * wanted.norm()


@pytest.mark.parametrize("value_norm_eps", [None, 1e-5])
@torch.no_grad()
def test_heads_in_a_cache(where: Where, value_norm_eps: float | None) -> None:
    """Norms of heads, and rotations, of decoding and of training."""
    groups, size, width, tokens = 8, 4, 128, 5
    qkv, norms = (
        randn(where, 1, tokens, groups * (size + 2) * width),
        (randn(where, width), randn(where, width, seed=1)),
    )
    angles = randn(where, 1, tokens, 48)
    shape, tables = (groups, size, width), (angles.cos(), angles.sin())
    q, k, v = ops.rope_qkv(qkv, *tables, *shape, *norms)
    v = v if value_norm_eps is None else ops.rms_norm(v, None, value_norm_eps)
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    for token in range(tokens):
        own = slice(token, token + 1)
        slots = torch.tensor([token], device=where.device)
        here = [table[:, own] for table in tables]
        cached = ops.rope_qkv_cached(
            qkv[:, own], *here, *shape, keys, values, slots, *norms, value_norm_eps=value_norm_eps
        )  # fmt: skip
        assert torch.equal(cached, q[:, own])
    assert torch.equal(keys, k) and torch.equal(values, v)


@torch.no_grad()
def test_experts(where: Where) -> None:
    x, weights = randn(where, 30, 33), randn(where, 30, 2).float()
    experts = torch.randint(5, (30, 2), generator=torch.Generator().manual_seed(0)).to(where.device)
    gate_up, down = randn(where, 5, 34, 33, scale=0.1), randn(where, 5, 33, 17, scale=0.1)
    mix = {"gate_up": gate_up, "down": down, "activation": GLUOptions("silu")}
    every = ops.mix_experts(x, weights, experts, **mix)
    for rows in (slice(0, 1), slice(3, 10), slice(11, 30)):
        assert torch.equal(ops.mix_experts(x[rows], weights[rows], experts[rows], **mix), every[rows])


@pytest.mark.parametrize("budget", [2**30, 2**12])
def test_log_probs_and_losses(where: Where, budget: int) -> None:
    """Of one row, of many, and in chunks of a few rows; with a trained head too, which keeps logits."""
    hidden, weight = randn(where, 30, 33), randn(where, 301, 33).requires_grad_()
    target, options = torch.arange(30, device=where.device), {"softcap": 3.0, "memory_budget": budget}
    every = ops.linear_log_probs(hidden, weight, target, **options)
    losses = ops.linear_cross_entropy(hidden, weight.detach(), target, reduction="none", **options)
    for rows in (slice(0, 1), slice(3, 10), slice(11, 30)):
        alone = ops.linear_log_probs(hidden[rows], weight.detach(), target[rows], softcap=3.0)
        assert torch.equal(alone, every[rows])
        alone = ops.linear_cross_entropy(hidden[rows], weight, target[rows], reduction="none", softcap=3.0)
        assert torch.equal(alone, losses[rows])


def test_lora(where: Where) -> None:
    x, weight, a, b = (randn(where, *shape) for shape in ((9, 33), (20, 33), (4, 33), (20, 4)))
    every = ops.lora_linear(x, weight, a, b, scaling=0.3)
    assert torch.equal(ops.lora_linear(x[4:5], weight, a, b, scaling=0.3), every[4:5])


def test_refusals() -> None:
    """Ops whose sums depend on the batch name themselves and the mode."""
    x, weight = torch.ones(3, 32), torch.ones(32, 32)
    tree = torch.ones(1, 1, dtype=torch.bool)
    q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8)
    quantized = ops.quantize_weight(weight, "int4")
    with torch.no_grad(), pytest.raises(BackendError, match="batch_invariant: decode_attention with a tree_mask"):
        ops.decode_attention(q, cache, cache, torch.tensor([1]), tree_mask=tree)
    with pytest.raises(BackendError, match="batch_invariant: quantized_linear"):
        ops.quantized_linear(x, *quantized)
    with pytest.raises(BackendError, match=r"batch_invariant: no attention backend serves this call.*mask"):
        ops.attention(q, q, q, mask=torch.ones(1, 1, 1, dtype=torch.bool))
    with pytest.raises(BackendError, match=r"sdpa.*batch_invariant"):
        ops.attention(q, q, q, backend="sdpa")
    with pytest.raises(BackendError, match=r"few_tokens.*batch_invariant"):
        experts = torch.zeros(3, 1, dtype=torch.long)
        operands = torch.ones(1, 8, 32), torch.ones(1, 32, 4)
        ops.mix_experts(
            x, x[:, :1], experts, *operands, activation=GLUOptions("silu"), backend="few_tokens"
        )  # fmt: skip
