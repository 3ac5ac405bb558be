"""Heads that were made for a base model with another vocabulary or width: an error that names their folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import make_base

import ligermodels as lm
from ligermodels.convert.config_json import read_json
from ligermodels.errors import CheckpointError
from ligermodels.speculative.draft_vocabulary import DraftVocabulary


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    return read_json(folder / "config.json")


def reduced(base: lm.CausalLM) -> lm.Eagle3Model:
    return lm.Eagle3Model.from_base(base, vocabulary=DraftVocabulary.of_counts(torch.arange(base.config.vocab_size), 9))


KINDS: dict[str, tuple[Any, Callable[[lm.CausalLM, Path], None]]] = {
    "medusa": (lm.MedusaModel, lambda base, out: lm.MedusaModel.from_base(base, 2).save_pretrained(out)),
    "medusa, shared lm_head": (
        lm.MedusaModel,
        lambda base, out: lm.MedusaModel.from_base(base, 2, lm_head="shared").save_pretrained(out),
    ),
    "mtp": (lm.MTPModel, lambda base, out: lm.MTPModel.from_base(base).save_head(out)),
    "eagle": (lm.Eagle3Model, lambda base, out: lm.Eagle3Model.from_base(base).save_pretrained(out)),
    "eagle, draft tokens": (lm.Eagle3Model, lambda base, out: reduced(base).save_pretrained(out)),
    "dflash": (lm.DFlashModel, lambda base, out: lm.DFlashModel.from_base(base, 4, num_layers=1).save_pretrained(out)),
    "dspark": (lm.DSparkModel, lambda base, out: lm.DSparkModel.from_base(base, 4, num_layers=1).save_pretrained(out)),
}


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_and_both_sizes_are_named(kind: str, size: str, config: dict[str, Any], tmp_path: Path) -> None:
    heads, save = KINDS[kind]
    save(lm.from_config(config), tmp_path)
    other = lm.from_config(config | {size: 2 * config[size]})
    with pytest.raises(CheckpointError) as raised:
        heads.from_pretrained(other, tmp_path)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path}: ")
    assert str(2 * config[size]) in message and ("shared" in kind or str(config[size]) in message)


def test_a_head_in_the_checkpoint_of_a_model_fits_a_larger_vocabulary(config: dict[str, Any], tmp_path: Path) -> None:
    """MTP heads have no tensor of the vocabulary, and models get tokens after their checkpoint was published."""
    lm.MTPModel.from_base(lm.from_config(config)).save_pretrained(tmp_path)
    larger = lm.from_config(config | {"vocab_size": config["vocab_size"] + 8})
    assert lm.MTPModel.from_pretrained(larger, tmp_path).vocab_size == config["vocab_size"] + 8


def test_a_checkpoint_that_does_not_fit_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    lm.from_config(config).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(f'"vocab_size": {config["vocab_size"]}', '"vocab_size": 7'))
    with pytest.raises(CheckpointError, match="the checkpoint does not fit the model:") as raised:
        lm.from_pretrained(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: ")
