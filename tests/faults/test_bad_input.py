"""Every kind of bad input has its own clear error, at the level of the public API, and leaves nothing behind."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import BASE, CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, HubError, InputError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    make_checkpoint(folder, CONFIGS["llama-3.1"])
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> lm.CausalLM:
    return lm.from_pretrained(checkpoint)


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt5"}, "model_type 'gpt5' is not implemented.*llama"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope_type = 'mrope' is not implemented.*llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": "big"}, "rope_scaling: must be an object"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2' is not implemented.*silu"),
        ({"hidden_size": -4}, "'hidden_size' must be a whole number above 0, got -4"),
        ({"num_hidden_layers": "3"}, "'num_hidden_layers' must be a whole number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide num_attention_heads 6"),
        ({"head_dim": 13}, "head_dim 13 must be even"),
        ({"head_dim": None, "hidden_size": 61}, "set head_dim"),
        ({"attention_dropout": -0.1}, "'attention_dropout' must be 0 or above"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"rope_theta": "x", "rope_scaling": None}, "'rope_theta' must be a finite number"),
        ({"dtype": "float99"}, "dtype: 'float99'"),
    ],
)
def test_bad_config_fields_are_named(folder: Path, fields: dict[str, Any], message: str) -> None:
    edit(folder / "config.json", **fields)
    with pytest.raises(ConfigError, match=message):
        lm.from_pretrained(folder)


@pytest.mark.parametrize("value", ["2", 2.0, True, 2**31, {"id": 2}, [2, None], [[2]]])
@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_bad_token_ids_for_generation_are_named(folder: Path, field: str, value: Any) -> None:
    edit(folder / "generation_config.json", **{field: value})
    wanted = rf"generation_config\.json: field '{field}' must be a token's id.* got {re.escape(repr(value))}; correct"
    with pytest.raises(ConfigError, match=wanted):
        lm.from_pretrained(folder)


def test_token_ids_for_generation(folder: Path) -> None:
    """Those that are usable; ids beyond the vocabulary, and negative ones for none, stand in published checkpoints."""
    file = folder / "generation_config.json"
    for eos, pad in ((2, 0), ([2, 7], 200), (None, -1), ([], None)):
        edit(file, eos_token_id=eos, pad_token_id=pad)
        found = lm.from_pretrained(folder).generation_defaults()
        assert (found["eos_token_id"], found["pad_token_id"]) == (eos, pad)
    file.write_text("{}")
    found = lm.from_pretrained(folder).generation_defaults()
    assert (found["eos_token_id"], found["pad_token_id"]) == (2, 0)
    edit(file, pad_token_id=[0])
    with pytest.raises(ConfigError, match=r"'pad_token_id' must be a token's id, got \[0\]"):
        lm.from_pretrained(folder)


def test_broken_config_files(folder: Path) -> None:
    for content, message in [("{", "not JSON"), ("[1]", "not an object"), ("\udcff", "not JSON")]:
        (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
            lm.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        lm.from_pretrained(folder)


def test_broken_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    good = file.read_bytes()
    for content, message in [
        (good[:-100], "model.safetensors"),
        (b"\xff" * 64, "model.safetensors"),
        (b"", "fetch it again"),
    ]:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            lm.from_pretrained(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no .*safetensors"):
        lm.from_pretrained(folder)


def test_missing_shard(model: lm.CausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    shard = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        lm.from_pretrained(tmp_path / "sharded")


def test_all_tensor_faults_are_reported_together(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(61)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(7)  # Legacy: not loaded.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        lm.from_pretrained(folder)
    message = str(caught.value)
    assert "model.layers.1.self_attn.k_proj.weight" in message
    assert "model.layers.9.mlp.up_proj.weight" in message
    assert "model.norm.weight" in message and "61" in message and "60" in message
    assert "inv_freq" not in message


def test_tied_checkpoint_with_another_lm_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CONFIGS["llama-3.2"])
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert lm.from_pretrained(tmp_path / "model").config.head.tied
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.warns(ConfigWarning, match=r"tie_word_embeddings: is true, but lm_head\.weight is stored"):
        assert not lm.from_pretrained(tmp_path / "model").config.head.tied


def test_repositories_and_folders_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"nobody/nothing"):
        lm.from_pretrained("nobody/nothing", local_files_only=True, cache_dir=tmp_path)
    with pytest.raises((HubError, CheckpointError, ConfigError), match=r"\./nowhere"):
        lm.from_pretrained("./nowhere")


def test_output_folder_in_use(model: lm.CausalLM, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="out"):
        model.save_pretrained(tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious.txt"]
    model.save_pretrained(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_inputs_out_of_range(model: lm.CausalLM) -> None:
    ids = torch.tensor([[1, 2, BASE["vocab_size"]]])
    with pytest.raises(InputError, match=r"input_ids.*\[0, 2\] is 131"):
        model(ids)
    good = torch.tensor([[1, 2, 3]])
    for label in (131, -1, -101):
        with pytest.raises(InputError, match="labels"):
            model(good, labels=torch.tensor([[1, label, 3]]))
    with pytest.raises(InputError, match=r"labels.*shape"):
        model(good, labels=good[:, :2])
    with pytest.raises(InputError, match=r"input_ids.*at least one token"):
        model(good[:, :0])
    with pytest.raises(InputError, match=r"input_ids.*int64"):
        model(good.float())
    with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(InputError, match="inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 3, 7))
    with pytest.raises(InputError, match="position_ids"):
        model(good, position_ids=good[:, :2])
    for bounds in ([0, 2], [1, 3], [0, 2, 1, 3]):
        with pytest.raises(InputError, match="cu_seqlens: must rise"):
            model(good, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    with pytest.raises(InputError, match="cu_seqlens: must be int32"):
        model(good, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(InputError, match="one row"):
        model(good.expand(2, 3), cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))


def test_bad_prompts(model: lm.CausalLM) -> None:
    for prompt, message in [([[]], "empty"), ([], "empty"), ([[3, 500]], "500"), (torch.zeros(1, 0).long(), "empty")]:
        with pytest.raises(InputError, match=message):
            model.generate(prompt)
    with pytest.raises(InputError, match="max_new_tokens"):
        model.generate([[3]], max_new_tokens=0)


def test_models_that_cannot_be_saved(model: lm.CausalLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.export_spec"):
        lm.CausalLM(model.config).save_pretrained(tmp_path / "out")
    meta = lm.from_config(model.hf_config, device="meta")
    heads, eagle = lm.MedusaModel.from_base(meta, 1), lm.Eagle3Model.from_base(meta)
    adapted = lm.add_lora(lm.from_config(model.hf_config, device="meta"), 2)
    for save in (
        meta.save_pretrained,
        heads.save_pretrained,
        partial(heads.export, profile="fasterdecoding", base_model="x"),
        partial(eagle.export, base_model="x"),
        partial(lm.save_adapter, adapted),
    ):
        with pytest.raises(InputError, match="is on the meta device, without values: load the model on another to"):
            save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
