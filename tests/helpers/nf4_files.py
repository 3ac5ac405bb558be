"""Checkpoints with linear layers in the 4 bits of bitsandbytes."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import make_checkpoint

from ligermodels.convert.files import SINGLE
from ligermodels.ops.quantized.weights import NF4_LEVELS

QUANTIZATION = {
    "quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None,
}  # fmt: skip
STATE = "quant_state.bitsandbytes__nf4"
NF4: dict[str, Any] = {"table": NF4_LEVELS, "block": 64}
"""Options of `quantised` for the table and the blocks that `quantize="nf4"` keeps."""


def quantised(
    shape: tuple[int, int], *, nested: bool, seed: int = 0, table: Any = None, block: int = 32
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors of the format for a matrix of this shape, by the ends of their names, and the matrix that they
    stand for in float32: table[code] x scale of its block of elements, scales in blocks of 5."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    blocks = -(-count // block)
    table = torch.rand(16, generator=generator) - 0.5 if table is None else torch.tensor(table)
    codes = torch.randint(16, (count + count % 2,), dtype=torch.uint8, generator=generator)
    absmax = torch.rand(blocks, generator=generator) + 0.5
    sizes: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
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
    values = table[codes.long()][:count] * absmax.repeat_interleave(block)[:count]
    return parts, values.view(shape)


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{end}".rstrip("."): tensor for end, tensor in parts.items()}


def make_pair(folder: Path, config: dict[str, Any], skip: str = "", **options: Any) -> dict[str, dict[str, Tensor]]:
    """Write folder/nf4, a checkpoint with linear layers in 4 bits, except names with `skip`, and folder/plain with the
    values that they stand for. Returns the parts of each layer by its name."""
    make_checkpoint(folder / "plain", config)
    tensors, layers, stored = load_file(folder / "plain" / SINGLE), {}, dict[str, Tensor]()
    for seed, (name, tensor) in enumerate(tensors.items()):
        parts = {"": tensor}
        if name.endswith("_proj.weight") and not (skip and skip in name):
            rows, columns = tensor.shape
            parts, tensors[name] = quantised((rows, columns), seed=seed, **options)
            layers[name] = parts
        stored |= named(name, parts)
    save_file(tensors, folder / "plain" / SINGLE)
    shutil.copytree(folder / "plain", folder / "nf4")
    save_file(stored, folder / "nf4" / SINGLE)
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "nf4" / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return layers
