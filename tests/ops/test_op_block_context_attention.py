"""Attention of blocks to the tokens before their anchors, against one softmax under a mask of all slots and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import op_harness
import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.attention import triton_attention
from ligermodels.ops.attention.block_context import context_starts
from ligermodels.ops.attention.triton_attention_tiles import Tiles

SPREAD = [0, 17, 41, 42, 70]  # 0: no context; 70: after the last token
BOUNDS = [0, 3, 3, 40, 41, 70]
CASES: dict[str, dict[str, Any]] = {
    "no documents": {},
    "two rows": {"anchors": [SPREAD[1:4], [5] * 3], "kv_heads": 2},
    "documents": {"bounds": BOUNDS, "anchors": [[0, 2, 3, 4, 39, 40, 41, 55, 70]]},
    "more tokens than bounds tell": {"bounds": BOUNDS[:-1], "anchors": [[40, 41, 60]]},
    "anchors in any order": {"anchors": [[64, 3, 70, 0, 42, 3]]},
    "window in documents": {"window": 30, "bounds": [0, 3, 70], "anchors": [[2, 3, 40, 41, 42, 43, 44, 45]]},
    "window below a block": {"window": 3, "block": 9},
    "window of one key": {"window": 1},
    "causal in a window": {"window": 5, "causal": True},
    "one slot": {"block": 1, "softmax_scale": 0.5, "slack": 8.0},
    "one block larger than a tile": {"block": 37, "anchors": [[50]], "causal": True},
    "negative scale": {"softmax_scale": -0.3, "tokens": 20, "anchors": [[0, 9, 20]]},
    "scale of 0": {"softmax_scale": 0.0, "tokens": 20, "anchors": [[0, 9, 20]]},
    "many blocks": {"block": 1, "tokens": 20, "anchors": [[0] * 250 + [*range(20)]], "slack": 8.0},
    "no context": {"tokens": 0, "anchors": [[0, 0]]},
    "heads of 80": {"dim": 80},
}
DEFAULTS = {"anchors": [SPREAD], "tokens": 70, "block": 7, "kv_heads": 1, "dim": 16, "bounds": None}
# slack: the backward pass starts from rounded results; the rounding shows in slots that see few keys. Where the only
# key has the probability 1, its gradient is the difference of two equal sums, which GPUs round differently.


def by_mask(
    q: Tensor, k_block: Tensor, v_block: Tensor, k_context: Tensor, v_context: Tensor, anchors: Tensor, *,
    bounds: list[int] | None = None, softmax_scale: float | None = None, causal: bool = False,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """All keys of a row in one sequence, each with its position, block and document; eager attention under a mask."""
    (_, blocks, length, heads, dim), tokens = q.shape, k_context.shape[1]
    group, slots = heads // k_block.shape[3], torch.arange(length, device=q.device)
    context = torch.arange(tokens, device=q.device)
    documents = sum(((context >= bound).long() for bound in (bounds or [])[1:]), torch.zeros_like(context))
    documents = torch.cat([documents, documents[-1:]])  # an anchor after the last token
    rows = []
    for row, of_row in enumerate(anchors):
        at = (of_row[:, None] + slots).flatten()
        block = torch.arange(blocks, device=q.device).repeat_interleave(length)
        allowed = context < of_row[block][:, None]
        if tokens:
            allowed &= documents[context] == documents[of_row[block]][:, None]
        own = block == block[:, None]
        if causal:
            own &= at <= at[:, None]
        allowed = torch.cat([allowed, own], dim=1)
        if window is not None:
            allowed &= at[:, None] - torch.cat([context, at]) < window
        keys, values = (
            torch.cat([x[row], y[row].flatten(0, 1)]).repeat_interleave(group, dim=1)
            for x, y in ((k_context, k_block), (v_context, v_block))
        )
        scores = torch.einsum("thd,shd->hts", q[row].flatten(0, 1), keys)
        scores = op_harness.wide(scores) * (dim**-0.5 if softmax_scale is None else softmax_scale)
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).to(q.dtype)
        rows.append(torch.einsum("hts,shd->thd", weights, values))
    return torch.stack(rows).view(q.shape)


def operands(
    where: Where, anchors: list[list[int]], tokens: int, block: int, kv_heads: int, dim: int,
    layout: Callable[[Tensor], Tensor] = op_harness.contiguous,
) -> list[Tensor]:  # fmt: skip
    own, context = (len(anchors), len(anchors[0]), block, kv_heads, dim), (len(anchors), tokens, kv_heads, dim)
    shapes = (*own[:3], 2 * kv_heads, dim), own, own, context, context
    tensors = [layout(torch.randn(shape, dtype=where.dtype, device=where.device)) for shape in shapes]
    return [*tensors, torch.tensor(anchors, device=where.device)]


def check(where: Where, inputs: list[Tensor], bounds: list[int] | None, slack: float = 1.0, **options: Any) -> None:
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=where.device)
    op = partial(ops.block_context_attention, cu_seqlens=cu_seqlens, **options)
    op_harness.check(op, partial(by_mask, bounds=bounds, **options), inputs, slack=slack)


@pytest.fixture
def small_tiles(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, tiles so small that few keys are several tiles."""
    if where.place == "interpreter":
        tiles = (Tiles(queries=32, keys=16, warps=4, stages=1),)
        monkeypatch.setattr(triton_attention, "tile_options", lambda *_: tiles)


@pytest.mark.parametrize("case", CASES)
def test_one_softmax_over_all_keys(where: Where, small_tiles: None, case: str) -> None:
    options = DEFAULTS | CASES[case]
    anchors, tokens, block, kv_heads, dim, bounds = (options.pop(name) for name in DEFAULTS)
    check(where, operands(where, anchors, tokens, block, kv_heads, dim), bounds, **options)


@pytest.mark.parametrize("layout", [op_harness.strided_rows, op_harness.transposed, op_harness.middle_transposed])
def test_layouts(where: Where, layout: Any) -> None:
    *inputs, anchors = operands(where, [[2, 9, 11], [0, 13, 14]], 14, 5, 2, 24, layout)
    check(where, [*inputs, anchors.t().contiguous().t()], None)


def test_frozen_operands(where: Where) -> None:
    """Each operand frozen alone, and all but one frozen: the other gradients stay the same."""
    inputs = operands(where, [[2, 9]], 14, 3, 1, 16)
    _, whole = op_harness.run(ops.block_context_attention, inputs, range(5))
    for one in range(5):
        for needs in ([one], [i for i in range(5) if i != one]):
            _, gradients = op_harness.run(ops.block_context_attention, inputs, needs)
            for i, (found, wanted) in enumerate(zip(gradients, whole, strict=True)):
                assert torch.equal(found, wanted) if i in needs else found is None


MANY_TILES = [
    *((128, 7, case) for case in ("no documents", "documents", "any order", "window", "causal")),
    *((dim, 16, case) for dim in (64, 128) for case in ("documents", "window")),
    *((dim, block, case) for dim, block in ((80, 7), (256, 16)) for case in ("any order", "causal")),
]


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize(("dim", "block", "case"), MANY_TILES)
def test_many_tiles(dim: int, block: int, case: str) -> None:
    """Sizes of training, for the tiles of a GPU."""
    where = Where(torch.device("cuda"), torch.bfloat16, "cuda")
    anchors = torch.randperm(1400)[:150]
    anchors = (anchors if case == "any order" else anchors.sort()[0]).tolist()
    bounds = [0, 700, 701, 1200, 1400] if case in ("documents", "any order") else None
    options = {"window": {"window": 300}, "causal": {"causal": True}}.get(case, {})
    check(where, operands(where, [anchors], 1400, block, 2, dim), bounds, **options)


def test_given_starts(where: Where) -> None:
    """As with the bounds from which they come, of any strides."""
    *inputs, anchors = operands(where, [[2, 9, 11]], 14, 5, 2, 16)
    bounds = torch.tensor([0, 4, 10, 14], dtype=torch.int32, device=where.device)
    wanted = ops.block_context_attention(*inputs, anchors, cu_seqlens=bounds)
    starts = torch.tensor([[0, 7, 4, 7, 10, 7]], dtype=torch.int32, device=where.device)[:, ::2]
    assert torch.equal(context_starts(anchors, bounds, 14), starts)
    assert torch.equal(ops.block_context_attention(*inputs, anchors, starts=starts), wanted)
    with pytest.raises(InputError, match="starts: give no cu_seqlens with it"):
        ops.block_context_attention(*inputs, anchors, cu_seqlens=bounds, starts=starts)


def test_no_blocks(where: Where) -> None:
    """Their context still gets gradients: zeros."""
    inputs = [x.requires_grad_() for x in operands(where, [[]], 9, 3, 1, 16)[:5]]
    out = ops.block_context_attention(*inputs, torch.zeros(1, 0, dtype=torch.long, device=where.device))
    assert out.shape == inputs[0].shape
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


def test_bad_arguments() -> None:
    where = Where(torch.device("cpu"), torch.float32)
    q, k, v, keys, values, anchors = operands(where, [[2, 9]], 14, 3, 2, 16)
    bounds = torch.tensor([0, 14], dtype=torch.int32)
    for arguments, options, message in (
        ((q[0], k, v, keys, values, anchors), {}, "q must be"),
        ((q, k[:, :1], v, keys, values, anchors), {}, "k_block must be"),
        ((q[..., :1, :], k, v, keys, values, anchors), {}, "heads of k_block must divide"),
        ((q, k, v[..., :8], keys, values, anchors), {}, "v_block must be"),
        ((q, k, v, keys[:, :, :1], values, anchors), {}, "k_context must be"),
        ((q, k, v, keys, values.double(), anchors), {}, "v_context must be"),
        ((q, k, v, keys, values, anchors.float()), {}, "anchors must be torch.int64"),
        ((q, k, v, keys, values, anchors + 6), {}, r"anchors must be in \[0, 14\].* got 15"),
        ((q, k, v, keys, values, anchors - 3), {}, r"anchors must be in \[0, 14\].* got -1"),
        ((q, k, v, keys, values, anchors), {"cu_seqlens": bounds.long()}, "cu_seqlens must be"),
        ((q, k, v, keys, values, anchors), {"window": 0}, "window: must be a whole number"),
    ):
        with pytest.raises(InputError, match=f"block_context_attention: .*{message}"):
            ops.block_context_attention(*arguments, **options)
    with pytest.raises(InputError, match="one row"):
        ops.block_context_attention(*operands(where, [[2], [9]], 14, 3, 2, 16), cu_seqlens=bounds)
