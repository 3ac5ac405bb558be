"""Steps of decoding, whose feed-forward layers take fewer kernels: the same bits, and hooks see what they always do."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.layers import GatedMLP, MLPConfig
from ligermodels.ops import DecodeLinears
from ligermodels.ops.runtime import dispatch


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What linear layers were computed together with."""
    module, found = sys.modules["ligermodels.ops.linear.pending"], []
    compute = module.few_rows

    def noted(*given: Any) -> None:
        then = given[5]
        found.append("gated" if then.gated else "added" if then.residual is not None else "alone")
        compute(*given)

    monkeypatch.setattr(module, "few_rows", noted)
    return found


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.kernels),
        pytest.param("cuda", marks=(pytest.mark.gpu, pytest.mark.kernels)),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    if request.param == "cpu" and not dispatch.INTERPRETED:
        pytest.skip("Triton compiles here: the kernels run on the GPU")
    return str(request.param)


def tiny(device: str, **options: Any) -> GatedMLP:
    torch.manual_seed(0)
    return GatedMLP(24, MLPConfig(20, **options)).to(device, torch.float16).requires_grad_(False)


def in_decoding(call: Callable[[], Any]) -> Any:
    with torch.no_grad(), DecodeLinears():
        return call()


@pytest.mark.parametrize("options", [{}, {"activation": "gelu_tanh", "bias": True}, {"gate_multiplier": 2.0}], ids=str)
def test_feed_forward_layer(device: str, fused: list[str], options: dict[str, Any]) -> None:
    mlp = tiny(device, **options)
    x, residual = torch.randn(2, 2, 1, 24, device=device, dtype=torch.float16).unbind()
    wanted = in_decoding(lambda: mlp.down(mlp.activation(mlp.gate_up(x))))
    assert fused == []
    assert torch.equal(in_decoding(lambda: mlp(x)), wanted)
    assert torch.equal(in_decoding(lambda: mlp(x, residual=residual)), residual + wanted)
    assert fused == ["gated", "gated", "added"]
    mlp.down_multiplier = 0.5
    assert torch.equal(in_decoding(lambda: mlp(x, residual=residual)), residual + wanted * 0.5)
    assert fused == ["gated", "gated", "added", "gated"]


def watched(name: str) -> Callable[[GatedMLP, list[Any]], None]:
    return lambda mlp, seen: mlp.get_submodule(name).register_forward_hook(lambda *given: seen.append(given[2]))


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def own_forward(mlp: GatedMLP, seen: list[Any]) -> None:
    forward = mlp.gate_up.forward
    mlp.gate_up.forward = lambda x: (seen.append(forward(x)), seen[-1])[1]  # type: ignore[method-assign]


def own_linear(mlp: GatedMLP, seen: list[Any]) -> None:
    mlp.gate_up.__class__ = OwnLinear


def own_class_forward(mlp: GatedMLP, seen: list[Any]) -> None:
    patch = pytest.MonkeyPatch()
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 2)
    seen.append(SimpleNamespace(remove=patch.undo))


def own_activation(mlp: GatedMLP, seen: list[Any]) -> None:
    mlp.activation = nn.Sequential(mlp.activation)


def everywhere(mlp: GatedMLP, seen: list[Any]) -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *given: seen.append(given[2]))
    seen.append(handle)


CHANGES = {
    **{name: watched(name) for name in ("gate_up", "activation")},
    **{each.__name__: each for each in (own_forward, own_linear, own_class_forward, own_activation, everywhere)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_others_see(device: str, fused: list[str], change: Callable[[GatedMLP, list[Any]], None]) -> None:
    mlp, seen = tiny(device), list[Any]()
    x = torch.randn(1, 1, 24, device=device, dtype=torch.float16)
    change(mlp, seen)
    try:
        found = in_decoding(lambda: mlp(x))
        wanted = in_decoding(lambda: mlp.down(mlp.activation(mlp.gate_up(x))))
    finally:
        for each in seen:
            if hasattr(each, "remove"):
                each.remove()
    assert torch.equal(found, wanted) and "gated" not in fused
    assert all(type(each) is Tensor for each in seen if not hasattr(each, "remove"))


FAMILIES = ["llama-3", "qwen3", "gemma2", "granite"]


@pytest.mark.parametrize("kind", [None, "float8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_models(device: str, fused: list[str], family: str, kind: Any) -> None:
    """Tokens of a step with kernels for each op, and with fewer."""
    torch.manual_seed(0)
    model = lm.from_config(CONFIGS[family], dtype=torch.float16, device=device).eval()
    if kind:
        lm.quantize(model, kind)
    ids = torch.randint(model.config.vocab_size, (2, 5), device=device)

    def step() -> Tensor:
        state = model.new_state(2, 8)
        with torch.no_grad():
            model(ids[:, :-1], state=state)
            with DecodeLinears():
                return model(ids[:, -1:], state=state).logits

    found = step()
    adds = family not in ("gemma2", "granite")  # a norm after the layer, a factor
    assert fused == (["gated", "added"] if adds else ["gated"]) * len(model.decoder.blocks)
    for block in model.decoder.blocks:  # a hook, which sees the output of each op
        for module in (block.mlp, block.mlp.gate_up):
            module.register_forward_hook(lambda *_: None)
    fused.clear()
    assert torch.equal(step(), found) and fused == []
