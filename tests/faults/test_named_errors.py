"""Values that once ended in an error of Python's, took all memory, or were taken in silence: errors that name them."""

import json
import os
import stat
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError
from ligermodels.training import FineTuningRecipe, fine_tune

LLAMA = CONFIGS["llama-3"]
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
KINDS = ["checkpoint", "over a checkpoint", "heads", "run"]


@pytest.fixture(scope="module")
def model() -> lm.CausalLM:
    return lm.from_config(LLAMA)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GB", "1" * 5000, 1e30, float("inf"), "0.0000001KB"])
def test_sizes_of_shards(size: Any, model: lm.CausalLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"max_shard_size: .* is not a size; give bytes, or text such as"):
        model.save_pretrained(tmp_path / "out", max_shard_size=size)
    for largest in (10**30, 10**400, "999999999999999TB"):
        model.save_pretrained(tmp_path / "out", max_shard_size=largest, overwrite=True)


def write(kind: str, model: lm.CausalLM, folder: Path) -> None:
    if kind == "run":
        fine_tune(FineTuningRecipe(base="x", data="y"), folder)
    elif kind == "heads":
        lm.MedusaModel.from_base(lm.from_config(LLAMA), 1).save_pretrained(folder)
    else:
        model.save_pretrained(folder, overwrite=kind == "over a checkpoint")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y", "y/" * 3000], ids=["name", "parent", "path"])
def test_names_that_are_too_long(kind: str, name: str, model: lm.CausalLM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(xxx|/y).*cannot be written: .*[Nn]ame too long"):
        write(kind, model, tmp_path / name)
    assert not list(tmp_path.iterdir())


@contextmanager
def as_a_user() -> Iterator[None]:
    """Root may enter every folder, so it becomes another user."""
    if os.getuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("below", ["", "new"])
def test_folders_that_may_not_be_entered(kind: str, below: str, model: lm.CausalLM, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        with as_a_user(), pytest.raises(CheckpointError, match=r"closed.*cannot be (written|read): .*[Pp]ermission"):
            write(kind, model, closed / below)
    finally:
        closed.chmod(stat.S_IRWXU)
    assert not list(closed.iterdir())


@pytest.mark.parametrize("value", ["a\ud800b", {1, 2}, ["a", {"b": "\udfff"}], torch.float32], ids=range(4))
def test_values_that_json_cannot_hold(value: Any, tmp_path: Path) -> None:
    model = lm.from_config(LLAMA)
    model.hf_config["transformers_version"] = value
    with pytest.raises(ConfigError, match=r"field 'transformers_version': .* cannot be written as JSON"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "gemma4_text-experts"])
def test_mixtures_of_too_many_experts_are_refused_at_once(name: str) -> None:
    config = {name: value for name, value in CONFIGS[name].items() if not isinstance(value, list)}
    field = next(field for field in ("num_experts", "num_local_experts", "n_routed_experts") if field in config)
    start = time.monotonic()
    for layers, named in ((4096, "num_hidden_layers must be at most 1024"), (1000, rf"{field} = 4,096 in num_hidden")):
        with pytest.raises(ConfigError, match=named):
            lm.from_config({**config, field: 4096, "num_hidden_layers": layers}, device="meta")
    assert time.monotonic() - start < 10


def test_heads_of_many_layers_are_refused_before_they_are_made(tmp_path: Path) -> None:
    base = lm.from_config({**LLAMA, "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128})
    lm.MedusaModel.from_base(base, 2).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "blocks.999.layers.999.weight": torch.zeros(4, 4)}, file)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"20 or more missing from the checkpoint: blocks\.0\.layers\.1\.weight"):
        lm.MedusaModel.from_pretrained(base, tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "quantization_config: must be an object, got") for value in ([], "", "fp8", 0, 5, False, True)),
        ({}, "quantization_config: names no quant_method"),
        ({"quant_method": None}, "quantization_config: names no quant_method"),
        ({"quant_method": ["fp8"]}, "quantization_config: quant_method = .* is not implemented"),
    ],
)
def test_quantization_configs(value: Any, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": value}))
    for load in (lm.from_pretrained, lm.from_config):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": None}))
    lm.from_pretrained(tmp_path)


BY_TYPE = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        *(
            ("llama-3", {field: value}, f"{field}: must be an object, got")
            for field in ("rope_scaling", "rope_parameters")
            for value in ([], "", "linear", 0, 8.0, False, True)
        ),
        *(
            (name, {field: {key: kind, "factor": 2.0}}, message)
            for name, field in (
                ("llama-3", "rope_scaling"),
                ("llama-3", "rope_parameters"),
                ("gemma3_text", "rope_scaling"),
            )
            for key in ("type", "rope_type")
            for kind, message in ((None, "rope_type is null"), ("", "rope_type = ''"), ("foo", "rope_type = 'foo'"))
        ),
        ("gemma3_text", {"rope_parameters": {**BY_TYPE, "full_attention": {"rope_type": None}}}, "rope_type is null"),
        ("gemma3_text", {"rope_parameters": {**BY_TYPE, "full_attention": 5}}, "full_attention: must be an object"),
        ("gemma3_text", {"rope_scaling": BY_TYPE}, "rope_scaling: holds settings for each of .*rope_parameters alone"),
        ("llama-3", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    ],
)
def test_rotary_settings(name: str, fields: dict[str, Any], message: str) -> None:
    config = {field: value for field, value in CONFIGS[name].items() if field not in ROPE}
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**config, **fields}, device="meta")


def test_a_factor_of_no_type_is_a_warning() -> None:
    """As in transformers 5, which goes on without it."""
    config = {field: value for field, value in LLAMA.items() if field not in ROPE}
    with pytest.warns(ConfigWarning, match="rope_parameters: factor has no effect without a rope_type that scales"):
        lm.from_config({**config, "rope_scaling": {"factor": 2.0}}, device="meta")
