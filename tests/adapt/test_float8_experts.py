"""Models whose routed experts compute in float8: gradients beside those of float32, training, what refuses it."""

import warnings
from typing import Any

import pytest
import torch
from float8_models import FAMILIES, agreement, family, gradients, losses_of_training, tokens

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import Float8Warning, InputError
from ligermodels.layers import MoE
from ligermodels.layers.float8_experts import Float8Experts
from ligermodels.layers.modules import modules_of

MIXTURES = ("mixtral", "gpt_oss, with sinks", "qwen3_next", "gemma4, with experts")


def mixtures(model: lm.CausalLM) -> list[Any]:
    return list(modules_of(model, MoE))


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_beside_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parameter; state dicts keep their names; in eval mode without gradients the model computes as before."""
    model = family(name)
    ids = tokens()
    with torch.no_grad():
        plain = model.eval()(ids).logits
    wanted, names = gradients(model.train()), set(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error", Float8Warning)
        lm.float8(model, experts=True)
    assert all(isinstance(layer.compute, Float8Experts) for layer in mixtures(model))
    calls = []
    op = ops.float8_mix_experts
    monkeypatch.setattr(ops, "float8_mix_experts", lambda *given, **options: calls.append(1) or op(*given, **options))
    assert set(model.state_dict()) == names
    found = gradients(model)
    assert len(calls) == len(mixtures(model))
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        cosine, ratio = agreement(gradient, wanted[key])
        assert 0.9 < cosine < 1 - 1e-6 and 0.75 < ratio < 1.25, (key, cosine, ratio)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, plain)


def test_training() -> None:
    """The loss falls as it does without float8."""
    wanted, found = (
        losses_of_training(family("mixtral")),
        losses_of_training(lm.float8(family("mixtral"), experts=True)),
    )
    assert found[-1] < 0.8 * found[0] and abs(found[-1] - wanted[-1]) < 0.05 * wanted[-1], (found, wanted)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(mode: Any) -> None:
    model = lm.float8(family("mixtral"), experts=True)
    wanted = gradients(model)
    model.activation_checkpointing = mode
    found = gradients(model)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_frozen_experts_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under LoRA of attention; gradients have the same bits, and a changed weight is cast anew."""
    model = lm.float8(family("mixtral"), experts=True)
    wanted = gradients(model)
    for layer in mixtures(model):
        layer.gate_up.requires_grad_(False)
        layer.down.requires_grad_(False)
    found = gradients(model)
    layer = mixtures(model)[0]
    kept = layer.compute.gate_up.frozen(layer.gate_up)
    assert kept is layer.compute.gate_up.frozen(layer.gate_up)
    assert found and all(torch.equal(found[key], wanted[key]) for key in found)
    with torch.no_grad():
        layer.gate_up.mul_(2)
    assert kept is not layer.compute.gate_up.frozen(layer.gate_up)


def test_exclusion_and_refusals() -> None:
    model = lm.float8(family("mixtral"), experts=True, exclude=["decoder.blocks.0.mlp.experts"])
    assert [layer.compute is None for layer in mixtures(model)][:2] == [True, False]
    with pytest.raises(InputError, match="experts: must be True or False"):
        lm.float8(family("mixtral"), experts=1)
    with pytest.raises(InputError, match=r"mlp.experts: is in float8 already"):
        lm.float8(model, experts=True, exclude=["mixer.*", "decoder.blocks.0.mlp.experts"])
    with pytest.raises(InputError, match="float8 training"):
        lm.quantize(model, "int4")
    with pytest.raises(InputError, match="experts that compute in float8 have no LoRA"):
        lm.add_lora(model, r=4, target_modules=["w1", "w2", "w3"])
    assert set(FAMILIES) >= set(MIXTURES)
