"""Settings of a transformers model that change after `nativize` have the effect that they have in transformers."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from test_nativize import batch, make
from torch import nn
from torch.testing import assert_close

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.integrations import wrap
from ligermodels.integrations.decoder import HFDecoder

Change = Callable[[Any], Any]


def attribute(path: str, **values: Any) -> Change:
    """Sets attributes of a module."""

    def change(hf: Any) -> None:
        for name, value in values.items():
            assert hasattr(hf.get_submodule(path), name)
            setattr(hf.get_submodule(path), name, value)

    return change


def field(**values: Any) -> Change:
    """Sets fields of the config."""
    return lambda hf: hf.config.update(values)


def other_rope(hf: Any) -> None:
    hf.config.rope_parameters = {**hf.config.rope_parameters, "rope_theta": 7.0}
    hf.model.rotary_emb = type(hf.model.rotary_emb)(hf.config)


MIXER, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
CHANGES: dict[str, tuple[str, Change]] = {
    "eps of a layer": ("qwen3", attribute("model.layers.0.input_layernorm", variance_epsilon=0.5)),
    "eps of a head's norm": ("qwen3", attribute(f"{MIXER}.q_norm", variance_epsilon=0.5)),
    "eps of the last norm": ("gemma2", attribute("model.norm", eps=0.5)),
    "eps of a gated norm": ("qwen3_next", attribute("model.layers.0.linear_attn.norm", variance_epsilon=0.5)),
    "scaling": ("qwen3", attribute(MIXER, scaling=0.9)),
    "softcap of attention": ("gemma2", attribute(MIXER, attn_logit_softcapping=0.2)),
    "activation": ("qwen3", attribute(MLP, act_fn=nn.ReLU())),
    "activation of experts": ("qwen3_moe-normalised", attribute(f"{MLP}.experts", act_fn=nn.ReLU())),
    "residuals": ("granite", attribute("model.layers.0", residual_multiplier=1.0)),
    "embeddings": ("granite", attribute("model", embedding_multiplier=1.0)),
    "factor of the rotary embedding": ("qwen3", attribute("model.rotary_emb", attention_scaling=1.5)),
    "another rotary embedding": ("qwen3", other_rope),
    "softcap of the head": ("gemma2", field(final_logit_softcapping=0.7)),
    "no softcap of the head": ("gemma2", field(final_logit_softcapping=None)),
    "scale of the head": ("granite", field(logits_scaling=1.0)),
    "window": ("gemma2", field(sliding_window=3)),
    "kinds of layers": ("gemma2", field(layer_types=["full_attention"] * 2)),
}


def numbers(hf: Any, training: bool) -> dict[str, torch.Tensor]:
    hf.train(training).zero_grad()
    loss = hf(**batch()).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_has_its_effect_and_restore_keeps_it(case: str, training: bool) -> None:
    name, change = CHANGES[case]
    theirs, ours = make(name), lm.nativize(make(name))
    before = numbers(ours, training)["loss"]
    for hf in (theirs, ours):
        change(hf)
    wanted = numbers(theirs, training)
    assert abs(wanted["loss"] - before) > 1e-5
    assert_close(numbers(ours, training), wanted, rtol=1e-3, atol=1e-5)
    lm.restore(ours)
    assert_close(numbers(ours, training), wanted)


def test_dropout_of_one_layer() -> None:
    ours = lm.nativize(make("qwen3"))
    before = numbers(ours, True)["loss"]
    attribute(MIXER, attention_dropout=0.5)(ours)
    assert abs(numbers(ours, True)["loss"] - before) > 1e-5


def test_a_norm_that_differed_before() -> None:
    theirs, ours = make("qwen3"), make("qwen3")
    for hf in (theirs, ours):
        attribute("model.norm", variance_epsilon=0.5)(hf)
    assert_close(numbers(lm.nativize(ours), True), numbers(theirs, True), rtol=1e-3, atol=1e-5)


def test_a_native_model_that_was_wrapped_names_the_change() -> None:
    model = lm.from_transformers(make("qwen3"))
    hf = wrap(model)
    hf.model.layers[1].self_attn.scaling = 0.9
    with pytest.raises(InputError, match=r"layers\.1\.self_attn of the transformers model was changed"):
        model(batch()["input_ids"])


def copied(hf: Any) -> Any:
    return copy.deepcopy(hf)


def pickled(hf: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(hf, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def resized(hf: Any) -> Any:
    hf.resize_token_embeddings(hf.config.vocab_size + 3)
    return hf


def of_another_dtype(hf: Any) -> Any:
    return hf.double()


UNCHANGED: dict[str, Change] = {
    "as it is": lambda hf: hf, "copied": copied, "pickled": pickled, "resized": resized, "float64": of_another_dtype
}  # fmt: skip


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_changes_no_setting_computes_natively(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, through = [], HFDecoder.forward
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
    hf = UNCHANGED[case](lm.nativize(make("gemma2")))
    numbers(hf, True)
    assert passes


@pytest.mark.parametrize("name", sorted(set(zoo.CONFIGS) - zoo.ONLY_NATIVE))
def test_a_model_has_the_settings_of_its_config(name: str) -> None:
    from ligermodels.integrations.settings import changed_setting

    hf: Any = lm.nativize(make(name))
    assert changed_setting(hf, hf.native.config_settings) is None
