"""Checkpoints of base models, without the prefix "model." and often without a head, as embedding models have them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel
from zoo import CONFIGS, OF_EACH_LAYOUT, relative_error

import ligermodels as lm
from ligermodels.cli.describe import checkpoint_facts
from ligermodels.errors import CheckpointError
from ligermodels.models.vocabulary import grow_vocabulary
from ligermodels.verify import verify

TIED = {"model_type": "qwen3", **CONFIGS["qwen3"], "tie_word_embeddings": True}
WEIGHTS = "model.safetensors"


def names_of(folder: Path) -> list[str]:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return sorted(file.keys())


def without_prefix(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, which gets their names without the prefix."""
    stored = load_file(folder / WEIGHTS)
    save_file({name.removeprefix(f"{prefix}."): x for name, x in stored.items()}, folder / WEIGHTS, {"format": "pt"})
    assert [*names_of(folder)] != sorted(stored)
    return stored


@pytest.mark.parametrize("name", OF_EACH_LAYOUT)
def test_names_without_the_prefix(name: str, tmp_path: Path) -> None:
    """They load, and the usual names are written, which base models of transformers read too."""
    model = lm.from_config(CONFIGS[name])
    model.save_pretrained(tmp_path / "usual")
    prefix = model.require_export_spec().weight_map.mappings[0].views[0].source.partition(".")[0]
    stored = without_prefix(tmp_path / "usual", prefix)
    loaded = lm.from_pretrained(tmp_path / "usual", dtype=torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded.parameters(), strict=True))
    loaded.save_pretrained(tmp_path / "again")
    assert names_of(tmp_path / "again") == sorted(stored)
    model.load_hf_state_dict(load_file(tmp_path / "usual" / WEIGHTS))


def test_saved_by_transformers(tmp_path: Path) -> None:
    base = AutoModel.from_config(AutoConfig.for_model(**TIED), attn_implementation="eager").eval()
    base.save_pretrained(tmp_path / "base")
    model = lm.from_pretrained(tmp_path / "base")
    ids = torch.randint(3, 100, (2, 13))
    wanted = base(ids).last_hidden_state
    assert relative_error(model(ids, return_last_hidden_state=True).last_hidden_state, wanted) < 1e-5
    model.save_pretrained(tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert relative_error(again(ids).last_hidden_state, wanted) < 1e-5
    assert len(verify(tmp_path / "base").places) > 10  # modules, not the logits alone
    lm.save_adapter(lm.add_lora(model, 3), tmp_path / "adapter")
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all(name.startswith("base_model.model.model.layers.") for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("family", ["exaone", "sarvam_moe", "bailing_hybrid", "kimi_linear", "nemotron_h"])
def test_families_whose_names_transformers_changes(family: str, tmp_path: Path) -> None:
    """AutoModel writes published names within layers, and its modules' names for the embedding and the final norm."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    base = AutoModel.from_config(AutoConfig.for_model(**CONFIGS[family]), **eager).eval()
    base.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="a base model without an LM head") as error:
        lm.from_pretrained(tmp_path)
    if "set tie_word_embeddings" in str(error.value):
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    else:
        (embedding,) = [x for name, x in base.state_dict().items() if name.startswith("embed")]
        head = {"lm_head.weight": embedding.clone()}
        save_file({**load_file(tmp_path / WEIGHTS), **head}, tmp_path / WEIGHTS, {"format": "pt"})
    model = lm.from_pretrained(tmp_path)
    ids = torch.randint(3, 100, (2, 13))
    found = model(ids, return_last_hidden_state=True).last_hidden_state
    assert relative_error(found, base(ids).last_hidden_state) < 1e-4
    model.save_pretrained(tmp_path / "out")
    assert sorted(model.require_export_spec().weight_map.sources()) == names_of(tmp_path / "out")
    again = AutoModel.from_pretrained(tmp_path / "out", **eager).eval()
    assert relative_error(again(ids).last_hidden_state, found) < 1e-4


def test_a_head_that_is_not_stored(tmp_path: Path) -> None:
    """Is an error with advice that works."""
    config = AutoConfig.for_model(**{**TIED, "tie_word_embeddings": False})
    base = AutoModel.from_config(config, attn_implementation="eager").eval()
    base.save_pretrained(tmp_path)
    words = r"a base model without an LM head.*: lm_head\.weight is missing.* set tie_word_embeddings to true"
    for load in (
        lambda: lm.from_pretrained(tmp_path),
        lambda: lm.from_transformers(base),
        lambda: lm.from_config(tmp_path).load_hf_state_dict(base.state_dict()),
    ):
        with pytest.raises(CheckpointError, match=words):
            load()
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    ids = torch.randint(3, 100, (2, 13))
    found = lm.from_pretrained(tmp_path)(ids, return_last_hidden_state=True).last_hidden_state
    assert relative_error(found, base(ids).last_hidden_state) < 1e-5
    save_file(dict(list(load_file(tmp_path / WEIGHTS).items())[1:]), tmp_path / WEIGHTS, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="2 missing from the checkpoint"):
        lm.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "bailing_hybrid", "qwen3_5_text-other-sizes", "nemotron_h"])
def test_mtp_heads(name: str, tmp_path: Path) -> None:
    """They are found, kept or replaced, and written by the usual names like the model."""
    model = lm.from_config(CONFIGS[name])
    mtp = lm.MTPModel.from_base(model)
    for parameter in mtp.head_parameters():
        torch.nn.init.normal_(parameter)
    mtp.save_pretrained(tmp_path / "bare")
    prefix = model.require_export_spec().weight_map.mappings[0].views[0].source.partition(".")[0]
    stored = without_prefix(tmp_path / "bare", prefix)
    loaded = lm.MTPModel.from_pretrained(tmp_path / "bare")
    assert all(torch.equal(x, y) for x, y in zip(mtp.head_parameters(), loaded.head_parameters(), strict=True))
    base = lm.from_pretrained(tmp_path / "bare")
    assert checkpoint_facts(tmp_path / "bare")["mtp_head"]
    loaded.save_pretrained(tmp_path / "head")
    base.save_pretrained(tmp_path / "kept")
    base.save_pretrained(tmp_path / "bare", overwrite=True)  # where the heads have the usual names from now on
    base.save_pretrained(tmp_path / "after")
    for written in ("head", "kept", "bare", "after"):
        found = load_file(tmp_path / written / WEIGHTS)
        assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)
    base.save_pretrained(tmp_path / "without", keep="without-heads")
    assert names_of(tmp_path / "without") == sorted(model.require_export_spec().weight_map.sources())
    lm.MTPModel.from_base(base).save_pretrained(tmp_path / "new")
    assert names_of(tmp_path / "new") == sorted(stored)


def test_sizes_and_copies_of_heads(tmp_path: Path) -> None:
    """Under the names without prefix too: a copy of the embedding follows it, and another vocabulary is an error."""
    model = lm.from_config(CONFIGS["glm4_moe"])
    lm.MTPModel.from_base(model).save_pretrained(tmp_path / "bare")
    without_prefix(tmp_path / "bare", "model")
    base = lm.from_pretrained(tmp_path / "bare", mapped=False)
    with torch.no_grad():
        base.decoder.embed.weight.add_(1)
    base.save_pretrained(tmp_path / "trained")
    found = load_file(tmp_path / "trained" / WEIGHTS)
    copies = [name for name in found if name.endswith("embed_tokens.weight")]
    assert len(copies) == 2 and torch.equal(found[copies[0]], found[copies[1]])
    heads = {"medusa_head.0.1.weight": torch.zeros(model.config.vocab_size, 2)}
    save_file({**load_file(tmp_path / "bare" / WEIGHTS), **heads}, tmp_path / "bare" / WEIGHTS, {"format": "pt"})
    fields = json.loads((tmp_path / "bare" / "config.json").read_text())
    (tmp_path / "bare" / "config.json").write_text(
        json.dumps({**fields, "medusa_num_heads": 1, "medusa_num_layers": 1})
    )
    base = lm.from_pretrained(tmp_path / "bare")
    grow_vocabulary(base, 150)
    with pytest.raises(CheckpointError, match=r"medusa_head\.0\.1\.weight .* does not fit it any more: model\.embed"):
        base.save_pretrained(tmp_path / "resized")
