"""An adapter's config and its tensors name the same layers, or a warning says which differ."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from zoo import BASE

import ligermodels as lm
from ligermodels.adapt.named_layers import named_layers
from ligermodels.errors import AdapterWarning

LLAMA = {**BASE, "model_type": "llama"}
TARGETS = ["q_proj", "v_proj"]
PATHS = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({}, []),
        ({"target_modules": r".*\.\d\.self_attn\.[qv]_proj"}, []),
        ({"target_modules": "all-linear"}, []),
        ({"target_modules": 5}, []),
        ({"target_modules": ["q_proj"]}, [r"has tensors of 2 layers that it does not name, such as .*\.0\..*v_proj"]),
        ({"exclude_modules": ["v_proj"]}, ["has tensors of 2 layers"]),
        ({"layers_to_transform": [1]}, [r"has tensors of 2 layers that it does not name, such as .*\.0\..*q_proj"]),
        ({"target_modules": [*TARGETS, "k_proj"]}, [r"names 2 layers that .* no tensors for, such as .*\.0\..*k_proj"]),
        ({"target_modules": ["q_proj", "o_proj"]}, ["has tensors of 2 layers", "names 2 layers"]),
    ],
)
def test_layers_that_config_and_tensors_name(fields: dict[str, Any], messages: list[str], tmp_path: Path) -> None:
    lm.save_adapter(lm.add_lora(lm.from_config(LLAMA), 2, target_modules=TARGETS), tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lm.load_adapter(lm.from_config(LLAMA), tmp_path)
    assert [each.category for each in caught] == [AdapterWarning] * len(messages)
    for each, message in zip(caught, messages, strict=True):
        assert re.search(message, str(each.message)) and each.filename == __file__


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "mlp.up_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "v_proj"], "layers_to_transform": 0},
        {"target_modules": TARGETS, "layers_to_transform": [1, 7]},
        {"target_modules": TARGETS, "exclude_modules": "model.layers.0.*"},
        {"target_modules": r".*\.1\..*", "exclude_modules": ["up_proj"]},
    ],
)
def test_layers_are_named_as_in_peft(fields: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    config = peft.LoraConfig(**fields)
    assert named_layers(fields, PATHS) == {path for path in PATHS if tuners.check_target_module_exists(config, path)}
