"""Tensors in the 4 bits of bitsandbytes, in plain scales and in quantised ones."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert import dequantize
from ligermodels.convert.dequantize import Dequantized
from ligermodels.convert.files import SINGLE
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import CheckpointError

BITS4 = Quantization("bitsandbytes 4 bits")
CONFIG = {
    "quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None,
}  # fmt: skip
STATE = "quant_state.bitsandbytes__nf4"


def quantised(shape: tuple[int, int], *, nested: bool, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of the format for a matrix of this shape, by the ends of their names, and the matrix that they
    stand for in float32: table[code] x scale of its block of 32 elements, scales in blocks of 5."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    blocks = -(-count // 32)
    table = torch.rand(16, generator=generator) - 0.5
    codes = torch.randint(16, (count + count % 2,), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(blocks, generator=generator) + 0.5
    sizes: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(shape)}
    parts = {"": (codes[::2] << 4 | codes[1::2])[:, None], "quant_map": table}
    if nested:
        indices = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
        inner, outer = torch.rand(256, generator=generator), torch.rand(-(-blocks // 5), generator=generator)
        absmax = inner[indices.long()] * outer.repeat_interleave(5)[:blocks] + 0.25
        sizes |= {"nested_blocksize": 5, "nested_dtype": "float32", "nested_offset": 0.25}
        parts |= {"absmax": indices, "nested_quant_map": inner, "nested_absmax": outer}
    else:
        parts["absmax"] = absmax
    parts[STATE] = torch.tensor(list(json.dumps(sizes).encode()), dtype=torch.uint8)
    values = table[codes.long()][:count] * absmax.repeat_interleave(32)[:count]
    return parts, values.view(shape)


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{end}".rstrip("."): tensor for end, tensor in parts.items()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (24, 40)])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_reads_whole_tensors_and_slices(
    nested: bool, shape: tuple[int, int], storage: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end within a byte and within a block. `storage`: bnb_4bit_quant_storage, how the bytes are declared."""
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 50)
    parts, wanted = quantised(shape, nested=nested)
    parts[""] = parts[""].view(-1).view(storage)[:, None] if parts[""].numel() % 2 == 0 else parts[""]
    save_file({**named("x.weight", parts), "norm": torch.ones(3)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, BITS4, torch.float32)
        assert {n: tuple(each.shape) for n, each in reader.headers.items()} == {"norm": (3,), "x.weight": shape}
        assert torch.equal(reader.read("x.weight"), wanted)
        for start, count in ((0, 1), (shape[1] * 3 + 2, 70), (wanted.numel() - 3, 3)):
            assert torch.equal(reader.read_slice("x.weight", start, count), wanted.reshape(-1)[start : start + count])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absmax": None}, r"missing from the checkpoint: x\.weight\.absmax"),
        ({"nested_absmax": None}, r"missing from the checkpoint: x\.weight\.nested_absmax"),
        ({"": None}, r"missing from the checkpoint: x\.weight$"),
        ({"": torch.zeros(9, 1, dtype=torch.uint8)}, r"do not fit \[7, 33\]: x\.weight$"),
        ({"absmax": torch.ones(8)}, r"absmax float32"),
        ({"quant_map": torch.ones(15)}, r"do not fit \[7, 33\]: x\.weight\.quant_map"),
        ({STATE: torch.zeros(3, dtype=torch.uint8)}, "without readable sizes: x.weight.quant_state"),
        ({STATE: {"shape": [7, 0]}}, "without readable sizes"),
        ({STATE: {"shape": [7, 33, 1]}}, "without readable sizes"),
        ({STATE: {"shape": 231}}, "without readable sizes"),
        ({STATE: {"blocksize": True}}, "without readable sizes"),
        ({STATE: {"nested_offset": math.nan}}, "without readable sizes"),
    ],
)  # fmt: skip
def test_faults_name_the_tensors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts, _ = quantised((7, 33), nested=True)
    for end, value in change.items():
        if isinstance(value, dict):
            sizes = {**json.loads(bytes(parts[end].tolist())), **value}
            change = {end: torch.tensor(list(json.dumps(sizes).encode()), dtype=torch.uint8)}
    save_file(named("x.weight", {e: t for e, t in {**parts, **change}.items() if t is not None}), tmp_path / SINGLE)
    with Checkpoint(tmp_path) as files, pytest.raises(CheckpointError, match=message):
        Dequantized(files, BITS4, torch.float32)


def test_models_load_and_fine_tune(tmp_path: Path) -> None:
    """A checkpoint in nf4 is the model of its dequantised weights; with `quantize=`, LoRA trains over int4."""
    make_checkpoint(tmp_path / "plain", CONFIGS["llama-3"])
    tensors = load_file(tmp_path / "plain" / SINGLE)
    stored = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        parts = {"": tensor}
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            parts, tensors[name] = quantised((rows, columns), nested=True, seed=seed)
        stored |= named(name, parts)
    save_file(tensors, tmp_path / "plain" / SINGLE)
    shutil.copytree(tmp_path / "plain", tmp_path / "nf4")
    save_file(stored, tmp_path / "nf4" / SINGLE)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "nf4" / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    plain, model = (lm.from_pretrained(tmp_path / folder, dtype=torch.float32) for folder in ("plain", "nf4"))
    wanted = plain.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())

    tuned = lm.add_lora(lm.from_pretrained(tmp_path / "nf4", dtype=torch.float32, quantize="int4"), r=4)
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    tuned(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in tuned.named_parameters() if p.requires_grad}
    assert gradients and all(grad is not None for grad in gradients.values())
    assert any(grad.any() for grad in gradients.values() if grad is not None)
