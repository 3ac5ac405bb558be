"""Settings of a transformers model that change before or after `nativize` have the effect that they have in
transformers."""

import copy
import io
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from test_nativize import batch, make
from torch import nn
from torch.testing import assert_close
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.integrations import wrap
from ligermodels.integrations.decoder import HFDecoder
from ligermodels.integrations.settings import has_rotary_of

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


def other_frequencies(path: str, *names: str) -> Change:
    """Changes buffers of a rotary embedding in place."""

    def change(hf: Any) -> None:
        for name in names:
            hf.get_submodule(path).get_buffer(name).div_(4)

    return change


class Doubled(nn.Module):
    """A user's rotary embedding, with another beginning and end of its name."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x, 2 * position_ids)


def doubled(hf: Any) -> None:
    hf.model.rotary_emb = Doubled(hf.model.rotary_emb)


def other_forward(path: str) -> Change:
    """Sets a forward on one module, which doubles the results of its class's."""

    def change(hf: Any) -> None:
        module = hf.get_submodule(path)
        through = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            found = through(*args, **kwargs)
            return tuple(2 * each for each in found) if isinstance(found, tuple) else 2 * found

        module.forward = forward

    return change


MIXER, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
OF_MODULES: dict[str, tuple[str, Change]] = {
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
    "factor of one of several": ("granite_swa", attribute("model.rotary_embs.0", attention_scaling=1.5)),
    "a rotary embedding of a user": ("qwen3", doubled),
    "forward of a rotary embedding": ("qwen3", other_forward("model.rotary_emb")),
    "forward of an activation": ("qwen3", other_forward(f"{MLP}.act_fn")),
    "forward of the activation of experts": ("qwen3_moe-normalised", other_forward(f"{MLP}.experts.act_fn")),
    "limit of time steps": ("bamba", attribute("model.layers.0.mamba", time_step_limit=(0.0, 0.01))),
}
OF_THE_CONFIG = {
    "another rotary embedding": ("qwen3", other_rope),
    "softcap of the head": ("gemma2", field(final_logit_softcapping=0.7)),
    "no softcap of the head": ("gemma2", field(final_logit_softcapping=None)),
    "scale of the head": ("granite", field(logits_scaling=1.0)),
    "window": ("gemma2", field(sliding_window=3)),
    "kinds of layers": ("gemma2", field(layer_types=["full_attention"] * 2)),
}
CHANGES = {**OF_MODULES, **OF_THE_CONFIG}


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


class OwnAttention(Qwen3Attention):
    """Attention of a user."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * hidden_states, *args, **kwargs)


class OwnMLP(nn.Module):
    """A feed-forward layer of a user with the usual names."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


class OwnHead(nn.Linear):
    """A head of a user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


def with_class(path: str, kind: type) -> Change:
    """Gives a module a user's class."""
    return lambda hf: setattr(hf.get_submodule(path), "__class__", kind)


def other_mlp(hf: Any) -> None:
    hf.model.layers[1].mlp = OwnMLP(hf.model.layers[1].mlp)


def layer_norm(hf: Any) -> None:
    torch.manual_seed(0)
    hf.model.layers[1].input_layernorm = nn.LayerNorm(hf.config.hidden_size)


class OwnLoss(Qwen3ForCausalLM):
    """A model of a user with another loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = 2 * output.loss
        return output


class RemoteLoss(OwnLoss):
    """The same of a checkpoint with code, as `trust_remote_code` loads it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


RemoteLoss.forward.__module__ = "transformers_modules.owner.modeling_name"

LONG = "full_attention_inv_freq", "sliding_attention_inv_freq"
BEFORE = {
    **OF_MODULES,
    "frequencies": ("qwen3", other_frequencies("model.rotary_emb", "inv_freq")),
    "frequencies by kind": ("gemma3_text", other_frequencies("model.rotary_emb", *LONG)),
    "frequencies of one of several": ("granite_swa", other_frequencies("model.rotary_embs.1", "inv_freq")),
    "class of an attention": ("qwen3", with_class(MIXER, OwnAttention)),
    "class of a feed-forward layer": ("qwen3", other_mlp),
    "class of a norm": ("qwen3", layer_norm),
    "class of the head": ("qwen3", with_class("lm_head", OwnHead)),
    "class of the model": ("qwen3", with_class("", OwnLoss)),
    "class of remote code": ("qwen3", with_class("", RemoteLoss)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", BEFORE)
def test_what_differed_before_has_its_effect_and_is_named(case: str, training: bool) -> None:
    name, change = BEFORE[case]
    theirs, ours = make(name), make(name)
    as_composed = numbers(theirs, training)["loss"]
    for hf in (theirs, ours):
        change(hf)
    wanted = numbers(theirs, training)
    assert abs(wanted["loss"] - as_composed) > 1e-5
    with pytest.warns(UserWarning, match="is not what transformers builds from the config"):
        lm.nativize(ours)
    assert_close(numbers(ours, training), wanted, rtol=1e-3, atol=1e-5)
    lm.restore(ours)
    assert_close(numbers(ours, training), wanted)


def test_the_name_of_what_differed_before() -> None:
    hf = make("qwen3")
    attribute(MIXER, scaling=0.9)(hf)
    with pytest.warns(UserWarning, match=r"nativize: model\.layers\.1\.self_attn\.scaling is not what"):
        lm.nativize(hf)


def test_another_length_in_the_config_is_no_change() -> None:
    hf = make("qwen3")
    hf.config.max_position_embeddings *= 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.nativize(hf)
    assert has_rotary_of(hf.model, hf.model.native.rotary)


def test_a_native_model_that_was_wrapped_names_the_change() -> None:
    model = lm.from_transformers(make("qwen3"))
    hf = wrap(model)
    hf.model.layers[1].self_attn.scaling = 0.9
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.scaling of the transformers model was changed"):
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


def after_a_long_sequence(hf: Any) -> Any:
    with torch.no_grad():
        hf(torch.randint(3, 131, (1, 2 * hf.config.max_position_embeddings)))
    return hf


def stored(hf: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        return type(hf).from_pretrained(folder)


UNCHANGED: dict[str, Change] = {
    "as it is": lambda hf: hf, "copied": copied, "pickled": pickled, "resized": resized, "float64": of_another_dtype,
    "bfloat16": lambda hf: hf.bfloat16(), "stored": stored,
}  # fmt: skip


@pytest.mark.filterwarnings("error:nativize")
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case", UNCHANGED)
def test_what_changes_no_setting_computes_natively(case: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, through = [], HFDecoder.forward
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
    change = UNCHANGED[case]
    hf = lm.nativize(change(make("gemma2"))) if before or case == "stored" else change(lm.nativize(make("gemma2")))
    numbers(hf, True)
    assert passes


@pytest.mark.filterwarnings("error:nativize")
@pytest.mark.parametrize("name", ["phi3-long", "internlm3"])
def test_frequencies_that_follow_the_length_are_no_change(name: str) -> None:
    lm.nativize(after_a_long_sequence(make(name)))


@pytest.mark.filterwarnings("error:nativize")
@pytest.mark.parametrize("name", sorted(set(zoo.CONFIGS) - zoo.ONLY_NATIVE))
def test_a_model_has_the_settings_of_its_config(name: str) -> None:
    from ligermodels.integrations.settings import changed_setting

    hf: Any = lm.nativize(make(name))
    assert changed_setting(hf, hf.native.config_settings) is None
