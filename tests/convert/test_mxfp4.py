"""Tensors in mxfp4, as gpt_oss has them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ligermodels.convert import dequantize
from ligermodels.convert.dequantize import Dequantized
from ligermodels.convert.files import SINGLE
from ligermodels.convert.quantization import Quantization, without_quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_as_transformers_dequantises_it(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of gpt_oss, whole and in slices that begin within a block of 32 rows."""
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 50)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 7, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 7, 5), dtype=torch.uint8, generator=generator)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales, "bias": torch.randn(3)}
    save_file(tensors, tmp_path / SINGLE)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, Quantization("mxfp4"), dtype)
        assert {name: tuple(each.shape) for name, each in reader.headers.items()} == {
            "bias": (3,), "experts.down_proj": (3, 160, 7)
        }  # fmt: skip
        assert torch.equal(reader.read("experts.down_proj"), wanted)
        for start, count in ((0, 1), (7 * 33 + 2, 700), (7 * 160 - 3, 9)):
            found = reader.read_slice("experts.down_proj", start, count)
            assert torch.equal(found, wanted.reshape(-1)[start : start + count])
    assert without_quantization({"quantization_config": {"quant_method": "mxfp4"}})[1] == Quantization("mxfp4")
    for change, message in (
        ({"experts.down_proj_scales": None}, "1 missing from the checkpoint: experts.down_proj_scales"),
        ({"experts.down_proj_scales": scales[:, :, :4].contiguous()}, r"do not match: .*_blocks \[3, 7, 5, 16\] and"),
        ({"experts.down_proj_scales": scales.int()}, "experts.down_proj_scales int32"),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        (tmp_path / "bad").mkdir()
        save_file({n: t for n, t in {**tensors, **change}.items() if t is not None}, tmp_path / "bad" / SINGLE)
        with Checkpoint(tmp_path / "bad") as files, pytest.raises(CheckpointError, match=message):
            Dequantized(files, Quantization("mxfp4"), dtype)
