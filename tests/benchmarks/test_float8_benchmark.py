"""The float8 block's benchmark, as far as a CPU goes: what it times computes a block, and its checks can fail."""

import pytest
import torch

from benchmarks.cases import float8_block
from benchmarks.timing import measure
from ligermodels.ops import Float8Tensor

SIZES = {"BATCH": 2, "LENGTH": 24, "HIDDEN": 64, "INTERMEDIATE": 96, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}
SIZES["TOKENS"] = 48


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    for name, size in SIZES.items():
        monkeypatch.setattr(float8_block, name, size)
    shapes = {"qkv": (128, 64), "o": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
    monkeypatch.setattr(float8_block, "PROJECTIONS", shapes)


@pytest.mark.parametrize("attention", [True, False])
def test_every_way_computes_the_block(attention: bool) -> None:
    torch.manual_seed(0)
    block = float8_block.Block()
    wanted = block.passes(float8_block.WAYS["bf16"], attention)
    for name, way in float8_block.WAYS.items():
        for a, b in zip(block.passes(way, attention), wanted, strict=True):
            cosine, ratio = float8_block.agreement(a, b)
            assert cosine > 0.97 and 0.9 < ratio < 1.1, name
        assert float8_block.products(way.recipe)() is None


def test_layouts_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    float8_block.check_layouts()
    make = Float8Tensor.__new__

    def broken(cls: type, rows: torch.Tensor, columns: torch.Tensor | None, *rest: object) -> Float8Tensor:
        columns = columns if columns is None else columns.view(torch.uint8).roll(1).view(columns.dtype)
        return make(cls, rows, columns, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Float8Tensor, "__new__", broken)
    with pytest.raises(RuntimeError, match="the transposed layout differs"):
        float8_block.check_layouts()
