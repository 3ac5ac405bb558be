"""Checkpoints of base models, without the prefix "model." and often without a head, as embedding models have them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from zoo import CONFIGS, EACH_FAMILY, relative_error

import ligermodels as lm
from ligermodels.errors import CheckpointError
from ligermodels.verify import verify

TIED = {"model_type": "qwen3", **CONFIGS["qwen3"], "tie_word_embeddings": True}
WEIGHTS = "model.safetensors"


def names_of(folder: Path) -> list[str]:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return sorted(file.keys())


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_names_without_the_prefix(family: str, tmp_path: Path) -> None:
    """They load, and the usual names are written, which base models of transformers read too."""
    model = lm.from_config(CONFIGS[family])
    model.save_pretrained(tmp_path / "usual")
    prefix = model.require_export_spec().weight_map.mappings[0].views[0].source.partition(".")[0]
    stored = load_file(tmp_path / "usual" / WEIGHTS)
    bare = {name.removeprefix(f"{prefix}."): tensor for name, tensor in stored.items()}
    assert len(bare) == len(stored) and bare.keys() != stored.keys()
    save_file(bare, tmp_path / "usual" / WEIGHTS, {"format": "pt"})
    loaded = lm.from_pretrained(tmp_path / "usual", dtype=torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), loaded.parameters(), strict=True))
    loaded.save_pretrained(tmp_path / "again")
    assert names_of(tmp_path / "again") == sorted(stored)
    model.load_hf_state_dict(bare)


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


def test_a_head_that_is_not_stored(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**TIED, "tie_word_embeddings": False})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 missing from the checkpoint: lm_head\.weight$"):
        lm.from_pretrained(tmp_path)
