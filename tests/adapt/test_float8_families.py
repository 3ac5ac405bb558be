"""Float8 in other mixers and feed-forward layers than Llama's, and what stays in the model's dtype."""

import warnings
from typing import Any

import pytest
import torch
from float8_models import (
    FAMILIES,
    MODELS,
    SIZES,
    TWO_LAYERS,
    agreement,
    build,
    family,
    gradients,
    in_place_of,
    losses_of_training,
    tokens,
)
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import Float8Warning
from ligermodels.ops import Float8Tensor

pytestmark = pytest.mark.filterwarnings("ignore::ligermodels.errors.Float8Warning")


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        if not wanted[key].any() or gradient.numel() == 1:  # one number is a sum in which all but rounding may cancel
            continue
        cosine, ratio = agreement(gradient, wanted[key])
        few = gradient.numel() < 64  # of gates and decays, sums in which much cancels
        assert 0.88 < cosine < 1 - 1e-8, (key, cosine)
        assert abs(ratio - 1) < (0.25 if few else 0.15), (key, ratio)


@pytest.mark.parametrize(
    ("name", "gradient_dtype"),
    [(name, (torch.float8_e4m3fn, torch.float8_e5m2)[index % 2]) for index, name in enumerate(FAMILIES)],
    ids=FAMILIES,
)
def test_gradients_beside_float32(name: str, gradient_dtype: torch.dtype) -> None:
    """And with activation checkpointing the same bits."""
    model = family(name)
    wanted = gradients(model)
    lm.float8(model, lm.Float8Recipe(gradient_dtype=gradient_dtype))
    assert {layer.split(".", 3)[3] for layer in in_place_of(model)} == FAMILIES[name][1]
    found = gradients(model)
    compare(found, wanted)
    for mode in ("selective", "full"):
        model.activation_checkpointing = mode  # type: ignore[assignment]
        again = gradients(model)
        assert again.keys() == found.keys() and all(torch.equal(again[key], found[key]) for key in found), mode


def test_families_have_every_kind_of_layer() -> None:
    def kinds(config: dict[str, Any]) -> set[type]:
        return {type(module) for module in lm.from_config(config, device="meta").modules()}

    there = set().union(*(kinds(config) for config in (*MODELS.values(), *(config for config, _ in FAMILIES.values()))))
    missing = {name: kinds(config) - there for name, config in CONFIGS.items()}
    assert not any(missing.values()), f"add to FAMILIES configs with {missing}"


@pytest.mark.parametrize("name", ["deepseek_v3", "arcee"])
def test_training_stays_near_that_in_float32(name: str) -> None:
    plain, found = map(losses_of_training, (family(name), lm.float8(family(name))))
    assert plain[-1] < 0.5 * plain[0] and plain != found
    assert all(abs(a - b) < 0.1 for a, b in zip(plain, found, strict=True)), (plain, found)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_on_the_gpu(name: str) -> None:
    """Gradients beside those in bfloat16, and the same bits under activation checkpointing."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}

    def of(model: lm.CausalLM) -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens().cuda(), labels=tokens().cuda()).loss.backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    wanted, model = of(family(name, **options)), lm.float8(family(name, **options))
    found = of(model)
    for key, gradient in found.items():
        if wanted[key].any() and gradient.numel() > 1:
            assert agreement(gradient, wanted[key])[0] > 0.83, key
    for mode in ("selective", "full"):
        model.activation_checkpointing = mode  # type: ignore[assignment]
        again = of(model)
        assert all(torch.equal(again[key], found[key]) for key in found), mode


def test_both_latents_take_what_the_norm_has_cast() -> None:
    """If one of the two is excluded, the norm writes the model's dtype: neither gets another's rounding."""
    seen: dict[str, bool] = {}

    def see(name: str) -> Any:
        return lambda module, inputs: seen.__setitem__(name, isinstance(inputs[0], Float8Tensor))

    for exclude, written in (((), True), (["mixer.kv_a"], False)):
        model = lm.float8(family("deepseek_v3"), exclude=exclude)
        model.decoder.blocks.requires_grad_(False)
        mixer = model.decoder.blocks[0].mixer
        assert (mixer.input_form() is not None) == written
        for name in ("q_a", "kv_a", "kv_b"):
            getattr(mixer, name).register_forward_pre_hook(see(name))
        gradients(model)
        assert seen == {"q_a": written, "kv_a": written, "kv_b": False}


def test_what_stays_is_said() -> None:
    """Routed experts, and layers of a user's own; unless they are excluded, or few."""
    mixture = {**CONFIGS["mixtral"], **SIZES}
    with pytest.warns(Float8Warning, match=r"8\d% of the weights .*: mlp.gate_up \(MoE\), mlp.down \(MoE\); exclude"):
        model = lm.float8(build(mixture))
    assert all(".mixer." in name for name in in_place_of(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exclude in (["mlp"], ["mlp.gate_up", "mlp.down"]):
            assert in_place_of(lm.float8(build(mixture), exclude=exclude)) == in_place_of(model)
        for name in ("qwen3_5_text", "gemma4_text-per-layer-inputs"):
            lm.float8(family(name))  # convolutions, gates of per-layer inputs

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor, context: Any = None) -> Tensor:
            assert not isinstance(x, Float8Tensor)
            return self.down(self.up(x).relu())

    model = build(TWO_LAYERS)
    for block in model.decoder.blocks:
        block.mlp = Own()
    with pytest.warns(Float8Warning, match=r"mlp.up.weight \(Linear\), mlp.down.weight \(Linear\)"):
        lm.float8(model)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


def test_gates_of_heads_read_the_models_dtype() -> None:
    """Their projection stays out of float8, and so does its input, which the float8 projection beside it reads too."""
    model = lm.float8(build({**CONFIGS["lfm3"], **SIZES}), exclude=["mlp.*"]).train()
    inputs: list[Tensor] = []
    gates = [block.mixer.gate for block in model.decoder.blocks if getattr(block.mixer, "gate", None) is not None]
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model(tokens(), labels=tokens())
    assert len(inputs) == len(gates) > 0 and not any(isinstance(x, Float8Tensor) for x in inputs)
