"""EXAONE 3 and Sarvam: the names of fields and tensors in published checkpoints, and in transformers."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from zoo import CONFIGS, make_checkpoint, relative_error
from zoo_oracles import kept_tensors

import ligermodels as lm
from ligermodels.errors import ConfigError

PUBLISHED = {
    "exaone": [
        "transformer.wte.weight",
        "transformer.h.1.attn.attention.out_proj.weight",
        "transformer.h.1.mlp.c_fc_0.weight",
    ],
    "sarvam_mla": ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"],
    "sarvam_moe": [
        "model.word_embeddings.weight",
        "model.layers.1.attention.query_key_value.weight",
        "model.layers.1.mlp.gate.expert_bias",
    ],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_new_models_are_written_with_published_names(name: str, tmp_path: Path) -> None:
    model = lm.from_config(CONFIGS[name])
    model.save_pretrained(tmp_path / "ours")
    make_checkpoint(tmp_path / "theirs", CONFIGS[name])
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: tensor.shape for key, tensor in theirs.items()}
    assert {*PUBLISHED[name]} <= ours.keys()


@pytest.mark.parametrize("name", ["exaone", "exaone-biases"])
@torch.no_grad()
def test_names_of_modules(name: str, tmp_path: Path) -> None:
    """EXAONE 3 with the names of Llama's modules: loaded, and written back as it came."""
    oracle = make_checkpoint(tmp_path / "model", CONFIGS[name])
    tensors = {key: tensor.detach() for key, tensor in kept_tensors(oracle).items()}
    assert "model.layers.1.self_attn.o_proj.weight" in tensors
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    model = lm.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("name", "published", "own"),
    [
        ("exaone", "num_layers", "num_hidden_layers"),
        ("exaone", "layer_norm_epsilon", "rms_norm_eps"),
        ("exaone", "activation_function", "hidden_act"),
        ("sarvam_mla", "num_experts", "n_routed_experts"),
        ("sarvam_mla", "num_shared_experts", "n_shared_experts"),
        ("sarvam_moe", "num_experts", "n_routed_experts"),
        ("sarvam_moe", "num_shared_experts", "n_shared_experts"),
        ("sarvam_moe", "use_qkv_bias", "attention_bias"),
    ],
)
def test_a_field_with_the_name_of_transformers_goes_out_with_both(
    name: str, published: str, own: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    renamed = {own if key == published else key: value for key, value in config.items()}
    model = lm.from_config(renamed)
    assert model.config == lm.from_config(config, device="meta").config
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written[published] == written[own] == config[published]


@pytest.mark.parametrize("name", ["sarvam_mla", "sarvam_moe"])
def test_a_third_name_of_the_number_of_experts(name: str) -> None:
    config = CONFIGS[name]
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in config.items()}
    assert lm.from_config(renamed, device="meta").config == lm.from_config(config, device="meta").config


def test_the_type_of_rope_of_sarvam_mla(tmp_path: Path) -> None:
    """YaRN, under the name that other programs know in these configs."""
    config = CONFIGS["sarvam_mla"]
    yarn = {**config, "rope_scaling": {**config["rope_scaling"], "type": "yarn"}}
    model = lm.from_config(config)
    assert model.config == lm.from_config(yarn, device="meta").config
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"]["rope_type"] == written["rope_scaling"]["rope_type"] == "deepseek_yarn"
    theirs = AutoConfig.for_model(**copy.deepcopy(config))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == theirs.rope_parameters


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("exaone", {"num_hidden_layers": 3}, "num_hidden_layers = 3 contradicts num_layers = 2"),
        ("exaone", {"num_layers": 1025}, "num_layers must be at most 1024, got 1025"),
        ("exaone", {"layer_norm_epsilon": "x"}, "field 'layer_norm_epsilon' must be a finite number"),
        ("exaone", {"activation_function": "x"}, "activation_function = 'x' is not implemented"),
        ("sarvam_mla", {"head_dim": 7}, "head_dim = 7 is not implemented; by kv_lora_rank + qk_rope_head_dim it must"),
        ("sarvam_mla", {"q_head_dim": 7}, "q_head_dim = 7 is not implemented; by qk_nope_head_dim + qk_rope_head_dim"),
        ("sarvam_mla", {"n_routed_experts": 9}, "n_routed_experts = 9 contradicts num_experts = 8"),
        ("sarvam_mla", {"num_local_experts": 9}, "num_local_experts = 9 contradicts num_experts = 8"),
        ("sarvam_mla", {"score_function": "softmax"}, "score_function = 'softmax' is not implemented"),
        ("sarvam_mla", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias = False is not impl"),
        ("sarvam_moe", {"num_shared_experts": 0}, "field 'num_shared_experts' must be a whole number above 0"),
        ("sarvam_moe", {"moe_shared_expert_intermediate_size": 7}, "by moe_intermediate_size it must be 31"),
        ("sarvam_moe", {"use_bias": True}, "use_bias = True is not implemented"),
        ("sarvam_moe", {"router_dtype": "bf16"}, "router_dtype = 'bf16' is not implemented"),
    ],
)
def test_fields_that_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lm.from_config({**CONFIGS[name], **fields}, device="meta")


@pytest.mark.parametrize(("name", "field"), [("exaone", "embed_dropout"), ("sarvam_moe", "output_dropout")])
def test_dropout_that_transformers_does_not_read(name: str, field: str) -> None:
    assert lm.from_config({**CONFIGS[name], field: 0.1}, device="meta").config.dropout == (f"{field} = 0.1",)
