"""Native models inside vLLM with quantised weights: of the checkpoint, or quantised while they are read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_process import EngineProcess, needs_vllm
from mxfp4_files import make_mxfp4
from native_checkpoints import ARCHITECTURE, assert_equal, native, ours, random_checkpoint, servable
from nf4_files import NF4, make_pair
from safetensors.torch import load_file, save_file

import ligermodels as lm

pytestmark = needs_vllm

HALF: dict[str, Any] = {"dtype": "bfloat16"}
BLOCK = 64


def write_fp8(folder: Path) -> None:
    """Store the weights of the linear layers as FP8 with a scale for each block, in place of the plain ones."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor.bfloat16()
            continue
        rows, columns = (-(-size // BLOCK) for size in tensor.shape)
        scale = torch.rand(rows, columns) / 200 + 0.002
        whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: tensor.shape[0], : tensor.shape[1]]
        stored |= {name: (tensor / whole).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(
        json.dumps({**config, "torch_dtype": "bfloat16", "quantization_config": quantization})
    )


def test_an_fp8_checkpoint(engines: EngineProcess, tmp_path: Path) -> None:
    """It is dequantised: bit for bit the model of the checkpoint that is written dequantised. It takes new
    weights, but no quantised ones: then it has some of them and runs on."""
    random_checkpoint(tmp_path / "fp8", servable("qwen3"))
    write_fp8(tmp_path / "fp8")
    lm.from_pretrained(tmp_path / "fp8", dtype="bfloat16").save_pretrained(tmp_path / "plain")
    (plain,) = engines.serve(tmp_path / "plain", **native(HALF))
    random_checkpoint(tmp_path / "new", servable("qwen3"), 1).to(torch.bfloat16).save_pretrained(
        tmp_path / "new", overwrite=True
    )
    fp8, new = str(tmp_path / "fp8"), str(tmp_path / "new")
    steps = [None, ["update_weights", new], ["refused reload", fp8], ["reload_weights", str(tmp_path / "plain")]]
    first, other, _, again = engines.serve(tmp_path / "fp8", **native(HALF, steps=steps))
    for name in ("tokens", "log_probs"):
        assert first[name] == again[name] == plain[name] != other[name]
    steps = [None, ["load_weights", new]]
    _, sent = engines.serve(tmp_path / "fp8", **native({**HALF, "load_format": "dummy"}, steps=steps))
    assert sent["log_probs"] == other["log_probs"]


def write_nf4(folder: Path) -> None:
    make_pair(folder.parent / "pair", servable("qwen3"), nested=True, **NF4)
    (folder.parent / "pair/nf4").rename(folder)


def write_mxfp4(folder: Path) -> None:
    make_mxfp4(folder, **{name: servable("gpt_oss")[name] for name in ("head_dim", "hidden_size")})


UNREAD = {"hf_overrides": {"architectures": [ARCHITECTURE], "quantization_config": None}}
"""vLLM 0.32 does not know bitsandbytes."""


@pytest.mark.parametrize(
    ("write", "kind", "options"), [(write_nf4, "nf4", {**HALF, **UNREAD}), (write_mxfp4, "mxfp4", HALF)]
)
def test_checkpoints_in_4_bits(
    write: Callable[[Path], None], kind: str, options: dict[str, Any], engines: EngineProcess, tmp_path: Path
) -> None:
    """Dequantised; or with the stored codes in the kernels of 4 bits."""
    write(tmp_path / "stored")
    lm.from_pretrained(tmp_path / "stored", dtype="bfloat16").save_pretrained(tmp_path / "plain")
    (plain,) = engines.serve(tmp_path / "plain", **native(HALF))
    (found,) = engines.serve(tmp_path / "stored", **native(options))
    assert (found["tokens"], found["log_probs"]) == (plain["tokens"], plain["log_probs"])
    (found,) = engines.serve(
        tmp_path / "stored", **native({**options, "additional_config": {"ligermodels": {"quantize": kind}}})
    )
    assert found["tokens"] == ours(lm.from_pretrained(tmp_path / "stored", dtype="bfloat16", quantize=kind))["tokens"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {"quantize": "int4", "quantize_exclude": ["mixer"]}),
        ("qwen3_moe", {"quantize": "float8"}),
        ("llama-3", {"quantize": "nf4", "quantize_head": "float8"}),
        ("gpt_oss", {"quantize": "mxfp4"}),
    ],
)
def test_weights_that_are_quantised(
    name: str, settings: dict[str, Any], engines: EngineProcess, tmp_path: Path
) -> None:
    plain = ours(random_checkpoint(tmp_path, servable(name)))
    wanted = ours(lm.from_pretrained(tmp_path, **settings))
    assert wanted["log_probs"] != plain["log_probs"]
    steps = [None, ["refused reload", str(tmp_path)]]
    for found in engines.serve(tmp_path, **native({"additional_config": {"ligermodels": settings}}, steps=steps)):
        assert_equal(found, wanted)


INT4 = {"quantize": "int4"}


@pytest.mark.parametrize(
    ("settings", "options", "steps", "message"),
    [
        ({"quantise": "int4"}, {}, None, "additional_config.ligermodels: quantise is unknown; it may have quantize,"),
        ({"quantize": "int5"}, {}, None, "quantize: .*int5"),
        ({"quantize_head": "int4"}, {}, None, "quantize_head: needs quantize|quantize_head"),
        (INT4, {"load_format": "dummy"}, None, "load_format: must be auto or hf or safetensors for quantised weights"),
        (INT4, {"tensor_parallel_size": 2}, None, ""),
        (INT4, {}, [None, ["update_weights", "."]], "additional_config.ligermodels: the weights have been quantised"),
    ],
)
def test_refusals(
    settings: Any, options: Any, steps: Any, message: str, engines: EngineProcess, tmp_path: Path
) -> None:
    random_checkpoint(tmp_path, servable("qwen3"))
    steps = steps and [step and [step[0], str(tmp_path)] for step in steps]
    given = native({"additional_config": {"ligermodels": settings}, **options}, **({"steps": steps} if steps else {}))
    error, log = engines.error(tmp_path, **given)
    ranks = "tensor_parallel_size: must be 1 for quantised weights, got 2"
    assert re.search(message or f"ConfigError: {ranks}", error if message else log)
