"""A head that a config ties is tied in transformers too, or the config is refused: no checkpoint is written without a
head that transformers reads."""

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import CONFIGS, make_checkpoint
from zoo_oracles import skip_without_oracle

import ligermodels as lm
from ligermodels.errors import ConfigError, ConfigWarning

ONE_OF = {config["model_type"]: config for config in reversed(CONFIGS.values())}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("model_type", ONE_OF)
def test_as_in_transformers_or_refused(model_type: str) -> None:
    skip_without_oracle(ONE_OF[model_type])
    config: dict[str, Any] = {**copy.deepcopy(ONE_OF[model_type]), **TIED}
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
    if oracle.all_tied_weights_keys:
        assert lm.from_config(config, device="meta").config.head.tied
        return
    with pytest.raises(ConfigError, match=rf"tie_word_embeddings = true .*LM head of {model_type}; set it to false"):
        lm.from_config(config, device="meta")


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid"])
def test_after_the_change_that_the_error_names(model_type: str, tmp_path: Path) -> None:
    """The checkpoint, with a head of its own whatever the config says, is the model that transformers makes of it."""
    config = {**ONE_OF[model_type], **TIED}
    oracle = make_checkpoint(tmp_path, config)
    with pytest.raises(ConfigError, match=re.escape("set it to false, and keep lm_head.weight")):
        lm.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(lm.from_pretrained(tmp_path)(ids).logits, oracle(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere2", "lfm2"])
@torch.no_grad()
def test_a_head_of_its_own_that_the_config_ties(name: str, tmp_path: Path) -> None:
    """As in transformers 5: it is not tied, with a warning; from a checkpoint, and from a model in memory."""
    names = {"tie_word_embeddings", *({"tie_embedding"} & CONFIGS[name].keys())}  # LFM2 has both
    oracle = make_checkpoint(tmp_path, {**CONFIGS[name], **dict.fromkeys(names, False)})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **dict.fromkeys(names, True)}))
    oracle.config.tie_word_embeddings, ids = True, torch.arange(3, 12)[None]
    warning = "tie_word_embeddings: is true, but lm_head.weight is stored and differs from model.embed_tokens.weight"
    for model in (partial(lm.from_pretrained, tmp_path), partial(lm.from_transformers, oracle)):
        with pytest.warns(ConfigWarning, match=re.escape(warning)):
            loaded = model()
        assert not loaded.config.head.tied
        torch.testing.assert_close(loaded(ids).logits, oracle(ids).logits, rtol=1e-4, atol=1e-4)
        loaded.save_pretrained(tmp_path / "saved", overwrite=True)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert again.config.tie_word_embeddings is False
        torch.testing.assert_close(again(ids).logits, oracle(ids).logits, rtol=1e-4, atol=1e-4)
