"""Quantised checkpoints that are refused: the error names the method, the field or the tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_keep import stored
from test_quantized import COMPRESSED, FP8, groups, make_quantised
from torch import Tensor
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert.files import SINGLE
from ligermodels.convert.quantization import Quantization, without_quantization
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method = 'awq' is not implemented; implemented: fp8.*Load the"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq' is not implemented"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "only load_in_4bit = true is implemented"),
        ({"bits": 4}, "names no quant_method"),
        ({"quant_method": ["fp8"]}, r"quant_method = \['fp8'\] is not implemented"),
        ("fp8", "must be an object, got 'fp8'"),
        ({**FP8, "fmt": "int8"}, "fmt = 'int8' is not implemented"),
        ({**FP8, "scale_fmt": "log"}, "scale_fmt = 'log' is not implemented"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4' is not implemented"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size: a block must have two sizes above 0.* got \[128\]"),
        ({**FP8, "weight_block_size": [0, 4]}, r"weight_block_size: a block .* got \[0, 4\]"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size: a block .* got 128"),
        ({**groups("tensor"), "format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized' is not implemented"),
        (groups("tensor", num_bits=4, type="int"), r"group_0\.weights: must be of type 'float' with num_bits 8"),
        (groups("token"), r"group_0\.weights: strategy = 'token' is not implemented; implemented: tensor, channel"),
        (groups("block"), r"group_0\.weights: a block must have two sizes above 0, rows and columns; got None"),
        (groups("group"), r"group_0\.weights: a block must have two sizes above 0, rows and columns; got \[1, None\]"),
        ({**groups("tensor"), "transform_config": {"r1": {}}}, "transform_config is not implemented"),
        ({**groups("tensor"), "sparsity_config": {"format": "bitmask"}}, "sparsity_config: format = 'bitmask' is not"),
        (COMPRESSED, r"config_groups: must have groups of one block size, got set\(\)"),
        ({**COMPRESSED, "config_groups": {"g": 1}}, r"config_groups\.g\.weights: must be of type 'float'"),
        ({**COMPRESSED, "config_groups": [1]}, r"config_groups: must be an object, got \[1\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["quantization_config", "text_config.quantization_config"])
def test_configs_that_are_refused(config: Any, message: str, where: str) -> None:
    whole: dict[str, Any] = {"model_type": "llama", "quantization_config": config}
    if where.startswith("text_config"):
        whole = {"model_type": "gemma3", "text_config": whole}
    with pytest.raises(ConfigError, match=rf"config\.json: {where}.*{message}"):
        lm.from_config(whole)


def test_two_configs_and_unknown_fields() -> None:
    both = {"quantization_config": {**FP8, "weight_block_size": None}, "text_config": {"quantization_config": FP8}}
    with pytest.raises(ConfigError, match=r"quantization_config and text_config\.quantization_config contradict"):
        without_quantization(both)
    both["quantization_config"] = FP8
    assert without_quantization(both) == ({"text_config": {}}, Quantization("fp8", (128, 128)))
    with pytest.warns(ConfigWarning, match="quantization_config: rotation: unknown and not used"):
        without_quantization({"quantization_config": {**FP8, "rotation": 1}})
    assert without_quantization({"quantization_config": None}) == ({}, None)


NAME = "model.layers.1.mlp.up_proj.weight"
SCALE = NAME + "_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALE: None}, rf"1 in FP8 without scales, which are called \.\.\._scale_inv or \.\.\._scale: {NAME}$"),
        ({NAME: None}, rf"1 scales without a tensor in FP8: {SCALE}$"),
        ({NAME: torch.zeros(97, 60)}, rf"1 scales without a tensor in FP8: {SCALE}$"),
        ({SCALE: torch.ones(7, 2)}, rf"wrong shape: {SCALE} \[7, 2\] of {NAME} \[97, 60\] in blocks of \[16, 24\]"),
        ({SCALE: torch.ones(7)}, rf"1 scales of the wrong shape: {SCALE} \[7\]"),
        ({SCALE: torch.ones(7, 3).int()}, rf"1 of a dtype that scales and blocks do not have: {SCALE} int32$"),
        ({SCALE: torch.ones(7, 3).to(torch.float8_e4m3fn)}, f"not have: {SCALE} float8_e4m3fn$"),
        ({NAME: torch.zeros(97, 61).to(torch.float8_e4m3fn)}, rf"wrong shape: {NAME} \[97, 61\] instead of \[97, 60\]"),
        ({"model.layers.1.mlp.up_proj.weight_zero_point": torch.ones(7, 3)}, "not expected in the checkpoint: .*point"),
        ({"model.layers.1.mlp.up_proj.weight_scale": torch.ones(7, 3)}, "1 scales without a tensor in FP8: .*scale$"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    config = CONFIGS["llama-3"]
    make_checkpoint(tmp_path, config)
    make_quantised(tmp_path, config, "block")
    tensors = {name: tensor for name, tensor in {**stored(tmp_path), **change}.items() if tensor is not None}
    for file in tmp_path.glob("model*"):
        file.unlink()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=message):
        lm.from_pretrained(tmp_path)


def test_fp8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama-3"]
    make_checkpoint(tmp_path, config)
    make_quantised(tmp_path, config, "block")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3"]))
    with pytest.raises(
        CheckpointError,
        match=r"quantised tensors load from files with a quantization_config\): .*float8_e4m3fn to float32",
    ):
        lm.from_pretrained(tmp_path)
