"""Checkpoints with experts in mxfp4."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from zoo import GPT_OSS, make_checkpoint

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")


def make_mxfp4(folder: Path, **fields: Any) -> dict[str, Tensor]:
    """Write gpt_oss as on the hub, with more config `fields`; returns the tensors that transformers dequantises."""
    config = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96, "dtype": "bfloat16", **fields}
    make_checkpoint(folder, config, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [each for each in tensors if each.endswith(PROJECTIONS)]:
        experts, rows, columns = stored.pop(name).shape
        shape = experts, columns, rows // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
