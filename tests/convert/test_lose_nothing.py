"""What a checkpoint holds beside the language model goes out again: of training, of merged LoRA, of plain saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import TEXT, tokenizer_of
from mtp_oracle import add_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from two_ranks import in_two_ranks
from typer.testing import CliRunner
from zoo import CONFIGS, LATENT, MIXTURES, MULTIMODAL, make_checkpoint

import ligermodels as lm
from ligermodels.archs import FAMILIES
from ligermodels.cli import app
from ligermodels.errors import CheckpointError, CheckpointWarning
from ligermodels.integrations import wrap
from ligermodels.training import FineTuningRecipe, MedusaRecipe, MTPRecipe, fine_tune, train_heads, train_mtp

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {**CONFIGS, **MIXTURES, **LATENT, **MULTIMODAL}
CLAIMS = {
    "qwen3_5": ("text_config", "mtp_num_hidden_layers", 1),
    "qwen3_5_text": (None, "mtp_num_hidden_layers", 1),
    "glm4_moe": (None, "num_nextn_predict_layers", 1),
    "llama-3": (None, "medusa_num_heads", 2),
}
"""Checkpoint -> where config.json says how many draft heads there are."""


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}


def make(name: str, folder: Path) -> type[PreTrainedModel]:
    """A checkpoint with a tokenizer, and with draft heads where CLAIMS says so."""
    folder.mkdir()
    vocab_size = tokenizer_of("qwen2.5", folder).backend.get_vocab_size()
    config = json.loads(json.dumps(ALL[name]))
    config.get("text_config", config)["vocab_size"] = vocab_size
    if name == "glm4_moe":
        config["num_nextn_predict_layers"] = 1
    oracle = make_checkpoint(folder, config)
    if name == "llama-3":
        medusa = lm.MedusaModel.from_base(lm.from_pretrained(folder, mapped=False), num_heads=2)
        medusa.export(folder, "full-hf", overwrite=True)
    elif name in CLAIMS:
        add_head(folder, oracle, like_deepseek=name == "glm4_moe")
    return type(oracle)


def trained(folder: Path, out: Path) -> None:
    data = folder.parent / "data.txt"
    data.write_text(TEXT)
    settings = {"base": folder, "data": (data,), "steps": 1, "learning_rate": 0.1, "seq_len": 16, "batch_tokens": 32}
    fine_tune(FineTuningRecipe().changed({**settings, "validation_fraction": 0.1}), out)


def merged(folder: Path, out: Path) -> None:
    model = lm.add_lora(lm.from_pretrained(folder), 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.requires_grad
    lm.save_adapter(model, folder.parent / "adapter")
    result = CliRunner().invoke(app, ["lora", "merge", *map(str, (folder, folder.parent / "adapter", out))])
    assert result.exit_code == 0, result.output


def saved(folder: Path, out: Path) -> None:
    lm.from_pretrained(folder, dtype="float64").to(torch.float32).save_pretrained(out, max_shard_size="60KB")


@pytest.mark.parametrize("write", [trained, merged, saved])
@pytest.mark.parametrize("name", [*CLAIMS, "mistral3"])
def test_every_tensor_goes_out_again(name: str, write: Callable[[Path, Path], None], tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    oracle = make(name, folder)
    before = stored(folder)
    write(folder, out)
    after, source = stored(out), lm.from_pretrained(folder).export_spec.source  # type: ignore[union-attr]
    extra = set(source.extra)
    assert after.keys() == before.keys() and 0 < len(extra) < len(before)
    copies = {name for name in extra if name.endswith((".embed_tokens.weight", "shared_head.head.weight"))}
    assert all(torch.equal(after[key], before[key]) for key in extra - copies)
    for key in copies:  # in the layer of multi-token prediction: copies of the model's own, as before
        assert torch.equal(after[key], after["lm_head.weight" if "head" in key else "model.embed_tokens.weight"])
    changed = [key for key in before.keys() - extra if not torch.equal(after[key], before[key])]
    assert bool(changed) == (write is not saved)
    if name in CLAIMS:
        level, field, count = CLAIMS[name]
        config = json.loads((out / "config.json").read_text())
        assert (config[level] if level else config)[field] == count
    info, wanted = (oracle.from_pretrained(at, output_loading_info=True)[1] for at in (out, folder))
    assert info == wanted and not info["missing_keys"], info
    # transformers does not know Medusa heads, and GLM's head only at the number that it has in published sizes.
    assert bool(info["unexpected_keys"]) == (name in ("llama-3", "glm4_moe"))


@pytest.mark.parametrize("name", [*CLAIMS, "mistral3"])
def test_state_dicts_of_whole_checkpoints_are_taken(name: str, tmp_path: Path) -> None:
    """Of the files, and of transformers' model around the language model."""
    oracle = make(name, tmp_path / "model").from_pretrained(tmp_path / "model")
    model, wanted = lm.from_pretrained(tmp_path / "model"), lm.from_pretrained(tmp_path / "model").hf_state_dict()
    for whole in (stored(tmp_path / "model"), oracle.state_dict()):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_hf_state_dict(whole)
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in model.hf_state_dict().items())


def save_shards(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    model = lm.from_pretrained(folder / "model", plan=lm.ParallelPlan(shard=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    model.save_pretrained(folder / "out", max_shard_size="60KB")


def test_a_sharded_model_goes_out_whole(tmp_path: Path) -> None:
    """By FSDP2 on two ranks; the copies of embedding and head in the layer of the head follow the model's."""
    make("glm4_moe", tmp_path / "model")
    in_two_ranks(save_shards, tmp_path)
    before, after = stored(tmp_path / "model"), stored(tmp_path / "out")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert {name for name in changed if name.startswith("model.layers.2.")} == copies
    assert torch.equal(after["model.layers.2.embed_tokens.weight"], before["model.embed_tokens.weight"] + 1)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_checkpoint_without_heads_claims_none(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    oracle = make(name, folder)
    model = lm.from_pretrained(folder)
    level, field, _ = CLAIMS[name]
    for keep in ("without-heads", "model"):
        out = tmp_path / f"out-{keep}"
        model.save_pretrained(out, keep=keep)  # type: ignore[arg-type]
        config = json.loads((out / "config.json").read_text())
        if keep == "without-heads":
            config = config[level] if level else config
            _, info = oracle.from_pretrained(out, output_loading_info=True)
            assert not any(info.values()), info
        assert not config.get(field)
        assert not lm.from_pretrained(out).export_spec.source.heads  # type: ignore[union-attr]
    # Random weights have no heads either, whatever the config says that they are made from.
    lm.from_config(folder / "config.json", dtype="float32").save_pretrained(tmp_path / "new")
    assert not json.loads((tmp_path / "new" / "config.json").read_text()).get(field)


def test_new_heads_take_the_place_of_old_ones_alone(tmp_path: Path) -> None:
    """Beside a vision tower and a head of the other kind, in whichever order they are added."""
    folder, medusa, both = (tmp_path / name for name in ("model", "medusa", "both"))
    make("qwen3_5", folder)
    before = stored(folder)
    for base, out in ((folder, medusa), (medusa, both)):
        lm.MedusaModel.from_base(lm.from_pretrained(base), num_heads=2).export(out, "full-hf")
        after = stored(out)
        heads = {name for name in after if name.startswith("medusa_head.")}
        assert after.keys() == before.keys() | heads and len(heads) == 6
        assert all(torch.equal(after[name], before[name]) for name in before)
        config = json.loads((out / "config.json").read_text())
        assert (config["medusa_num_heads"], config["text_config"]["mtp_num_hidden_layers"]) == (2, 1)
    mtp = lm.MTPModel.from_pretrained(both)
    with torch.no_grad():
        for parameter in mtp.head_parameters():
            parameter += 1
    mtp.save_pretrained(tmp_path / "out")
    after, wanted = stored(tmp_path / "out"), stored(both)
    assert {name for name in wanted if not torch.equal(after[name], wanted[name])} == {
        name for name in before if name.startswith("mtp.")
    }
    assert lm.MedusaModel.from_pretrained(mtp.base, tmp_path / "out").num_heads == 2
    mtp.save_pretrained(tmp_path / "without", keep="without-heads")
    assert stored(tmp_path / "without").keys() == before.keys()
    config = json.loads((tmp_path / "without" / "config.json").read_text())
    assert "medusa_num_heads" not in config and config["text_config"]["mtp_num_hidden_layers"] == 1


def test_wrap_says_what_transformers_will_not_write(tmp_path: Path) -> None:
    make("qwen3_5", tmp_path / "model")
    with pytest.warns(CheckpointWarning, match=r"wrap: 36 tensors of .* outside the language model, such as model\.v"):
        hf = wrap(lm.from_pretrained(tmp_path / "model"))
    hf.save_pretrained(tmp_path / "out")
    assert not any(name.startswith("mtp.") for name in stored(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    # As the warning says.
    model = lm.from_pretrained(tmp_path / "model")
    model.load_hf_state_dict(hf.state_dict())
    model.save_pretrained(tmp_path / "whole")
    assert stored(tmp_path / "whole").keys() == stored(tmp_path / "model").keys()


@pytest.mark.parametrize("fields", [{"temperature": 0.6, "top_p": 0.9}, {"pad_token_id": -1}])
def test_generation_configs_go_out_as_transformers_writes_them(fields: dict[str, Any], tmp_path: Path) -> None:
    """Also those that transformers calls invalid, but for which it saves what it has loaded."""
    make_checkpoint(tmp_path, CONFIGS["llama-3"])
    fields = {"eos_token_id": [1, 7], **fields}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    lm.from_pretrained(tmp_path).save_pretrained(tmp_path / "ours")
    wrap(lm.from_pretrained(tmp_path)).save_pretrained(tmp_path / "wrapped")
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    written = [json.loads((tmp_path / at / "generation_config.json").read_text()) for at in ("wrapped", "theirs")]
    assert written[0] == written[1] and written[0].items() >= fields.items()
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == fields


def test_architectures_are_those_of_transformers(tmp_path: Path) -> None:
    """For configs that name none; servers choose the class by it."""
    names = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    text_models = {family.model_type for family in FAMILIES.values() if family.text is None}
    assert {model_type: FAMILIES[model_type].causal_lm for model_type in text_models} == {
        model_type: names[model_type] for model_type in text_models
    }
    fields = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4, "vocab_size": 16}
    fields |= {"intermediate_size": 8, "num_key_value_heads": 1}
    for config, architecture in (
        ({"model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
        ({"model_type": "llama", "architectures": None}, "LlamaForCausalLM"),
        ({"model_type": "llama", "architectures": ["MyLlama"]}, "MyLlama"),
    ):
        lm.from_config({**fields, **config}).save_pretrained(tmp_path, overwrite=True)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]


@pytest.mark.parametrize("run", [fine_tune, train_heads, train_mtp])
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_does_not_replace_another_model(run: Any, resume: bool, tmp_path: Path) -> None:
    make("llama-3", tmp_path / "model")
    make("qwen3_5_text", tmp_path / "other")
    (tmp_path / "data.txt").write_text(TEXT)
    before = {path: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    recipe = {fine_tune: FineTuningRecipe, train_heads: MedusaRecipe, train_mtp: MTPRecipe}[run]
    settings = {"base": tmp_path / "model", "data": tmp_path / "data.txt", "steps": 1}
    with pytest.raises(CheckpointError, match=r"other: .*overwrite=True"):
        run(recipe().changed(settings), tmp_path / "other", resume=resume)
    assert {path: path.read_bytes() for path in (tmp_path / "other").iterdir()} == before


def test_heads_and_adapters_name_their_base_wherever_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its absolute path, also where the model was loaded, or named, by a relative path."""
    make_checkpoint(tmp_path / "model", CONFIGS["llama-3"])
    monkeypatch.chdir(tmp_path)
    model = lm.from_pretrained("model")
    medusa = lm.MedusaModel.from_base(model, num_heads=2)
    medusa.export("tgi", "tgi")
    medusa.export("named", "tgi", base_model="model")
    medusa.export("hub", "tgi", base_model="me/model")
    lm.MTPModel.from_base(model).save_head("mtp")
    lm.save_adapter(lm.add_lora(lm.from_pretrained("model"), 2), "adapter")
    wanted = dict.fromkeys(("tgi", "named", "mtp", "adapter"), str(tmp_path / "model")) | {"hub": "me/model"}
    for folder, base in wanted.items():
        (file,) = (tmp_path / folder).glob("*config.json")
        assert json.loads(file.read_text())["base_model_name_or_path"] == base


def test_later_changes_of_the_config_go_out_too(tmp_path: Path) -> None:
    make("qwen3_5", tmp_path / "model")
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    found["text_config"]["transformers_version"] = "5.0"
    (tmp_path / "model" / "config.json").write_text(json.dumps(found))
    model = lm.from_pretrained(tmp_path / "model")
    model.hf_config.update(eos_token_id=[7, 9], use_cache=False)
    del model.hf_config["transformers_version"]
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    text = config["text_config"]
    assert (text["eos_token_id"], text["use_cache"]) == ([7, 9], False) and "transformers_version" not in text
    assert config["vision_config"].items() >= found["vision_config"].items()


def test_over_its_own_folder_and_with_the_folder_gone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make("qwen3_5_text", folder)
    before, model = stored(folder), lm.from_pretrained(folder)
    for size in ("30KB", "5GB"):  # over its own files, twice
        model.save_pretrained(folder, overwrite=True, max_shard_size=size)
        after = stored(folder)
        assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"\d+ tensors outside .* such as mtp\.fc\.weight.*keep='model'"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "out", keep="model")
    # Where nothing else was in it, the folder is not needed.
    alone = lm.from_pretrained(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    alone.save_pretrained(tmp_path / "again")


def test_a_tensor_of_another_vocabulary_is_named(tmp_path: Path) -> None:
    """Medusa heads have the vocabulary's rows. A head of multi-token prediction has not, and goes along."""
    make("llama-3", tmp_path / "model")
    make("qwen3_5_text", tmp_path / "mtp")
    for folder in ("model", "mtp"):
        model = lm.from_pretrained(tmp_path / folder)
        grow(model, 8)
        if folder == "mtp":
            model.save_pretrained(tmp_path / "out")
            assert stored(tmp_path / "out").keys() == stored(tmp_path / folder).keys()
            assert lm.from_pretrained(tmp_path / "out").config.vocab_size == model.config.vocab_size
            continue
        with pytest.raises(CheckpointError, match=r"medusa_head\.0\.1\.weight .*embed.*keep='without-heads'"):
            model.save_pretrained(tmp_path / "no")
        model.save_pretrained(tmp_path / "without", keep="without-heads")


def grow(model: lm.CausalLM, rows: int) -> None:
    """Add rows to the vocabulary, as a user does."""
    config: Any = {**model.hf_config, "vocab_size": model.config.vocab_size + rows}
    other = lm.from_config(config, dtype="float32")
    for name in ("decoder.embed", "head"):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, other.get_submodule(name))
    model.config = model.decoder.config = other.config
    model.hf_config.update(config)


def test_quantised_tensors_beside_the_model_go_out_dequantised(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make("qwen3_5_text", folder)
    tensors, name = stored(folder), "mtp.layers.0.mlp.up_proj.weight"
    codes = tensors[name].to(torch.float8_e4m3fn)
    save_file({**tensors, name: codes, f"{name}_scale_inv": torch.full((1, 1), 2.0)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    lm.from_pretrained(folder).save_pretrained(tmp_path / "out")
    after = stored(tmp_path / "out")
    assert after.keys() == tensors.keys() and torch.equal(after[name], codes.float() * 2)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
