"""Optional parts of linear layers, mixtures and the head: assigned or refused, and what they declare."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear import Scale, Ternary
from torch import nn

from ligermodels.convert.mappings import TensorView
from ligermodels.errors import InputError
from ligermodels.layers import Linear, LMHead, MoE, MoEConfig, RouterConfig
from ligermodels.layers.checkpointing import drops
from ligermodels.layers.expert_lora import ExpertLoRA, ExpertPart
from ligermodels.layers.lora import LoRA, LoRAPart
from ligermodels.layers.quantized import QuantizedCompute, QuantizedExperts


def mixture() -> MoE:
    return MoE(16, MoEConfig(RouterConfig(4, 2), 8))


def lora(layer: nn.Linear, **options: Any) -> LoRA:
    return LoRA(layer, [LoRAPart("o", (TensorView("o", lambda native: native),), 2, 4.0)], **options)


def expert_lora(layer: MoE, **options: Any) -> ExpertLoRA:
    part = ExpertPart("down_proj", (TensorView("down", lambda native: native),), 2, 4.0, projection="down")
    return ExpertLoRA(*layer.sizes, [part], **options)


def codes(layer: nn.Linear) -> QuantizedCompute:
    return QuantizedCompute.of(layer.weight.detach(), "float8")


@pytest.mark.parametrize(
    ("layer", "name", "part", "message"),
    [
        (Linear(16, 8), "update", nn.Identity(), "update: must be None or of class Update, got Identity"),
        (Linear(16, 8), "update", Ternary(), "update: must be None or of class Update, got Ternary"),
        (Linear(16, 8), "compute", nn.Identity(), "compute: must be None or of class Compute, got Identity"),
        (Linear(16, 8), "compute", "int4", "compute: must be None or of class Compute, got 'int4'"),
        (mixture(), "update", Scale(Linear(16, 8)), "update: must be None or of class ExpertUpdate, got Scale"),
        (mixture(), "compute", Ternary(), "compute: must be None or of class ExpertCompute, got Ternary"),
        (LMHead(16, 8), "update", lora(Linear(16, 8)), "update: a LoRA is not supported by a language-model head"),
        (LMHead(16, 8), "update", nn.Identity(), "update: must be None or of class Update, got Identity"),
        (LMHead(16, 8), "compute", Ternary(), "compute: a Ternary is not supported .* that holds the weight"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit(layer: Any, name: str, part: Any, message: str) -> None:
    names = list(layer.state_dict())
    calls = [lambda: setattr(layer, name, part)]
    calls += [lambda: layer.store(part)] if name == "compute" else []
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()
    assert list(layer.state_dict()) == names and getattr(layer, name) is None


@pytest.mark.parametrize("kind", [Linear, LMHead])
def test_an_assigned_compute_replaces_the_weight(kind: Any) -> None:
    layer, x = kind(16, 8).eval(), torch.randn(3, 16)
    nn.init.normal_(layer.weight)
    layer.compute = part = codes(layer)
    assert layer.weight is None and layer.compute is part and not part.training
    torch.testing.assert_close(layer(x), F.linear(x, part.dense(torch.float32), layer.bias))
    for other in (None, Ternary()):  # the weight would be lost
        with pytest.raises(InputError, match=r"compute: holds weight, which would be lost; call make_dense"):
            layer.compute = other
    layer.compute = again = QuantizedCompute.of(torch.ones(8, 16), "float8")
    assert layer.compute is again
    layer.make_dense(torch.float32)
    assert layer.compute is None and torch.equal(layer.weight, torch.ones(8, 16))


def test_an_assigned_compute_replaces_the_weights_of_experts() -> None:
    layer = mixture()
    layer.compute = QuantizedExperts.of(layer.gate_up.detach(), layer.down.detach(), "float8")
    assert layer.gate_up is None and layer.down is None
    with pytest.raises(InputError, match="compute: holds gate_up and down, which would be lost"):
        layer.store(None)
    layer.make_dense(torch.float32)
    assert layer.compute is None and layer.down.shape == (4, 16, 8)


@pytest.mark.parametrize(
    ("layer", "update"), [(Linear(16, 8), lora), (mixture(), expert_lora)], ids=["linear", "experts"]
)
def test_updates_that_drop(layer: Any, update: Any) -> None:
    """A CUDA graph of activation checkpointing is refused by `drops`."""
    layer.update = update(layer)
    assert not drops(layer.train())
    layer.eval().update = update(layer, dropout=0.5)
    assert not drops(layer)  # a part is in the mode of its layer
    assert drops(layer.train()) and not drops(layer.eval())
    layer.update.requires_grad_(False)
    assert not drops(layer.train())
    layer.update = None
    assert layer.update is None and not drops(layer.train()) and "update" not in dict(layer.named_children())


@pytest.mark.parametrize("dropout", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_modules_that_drop(dropout: Any) -> None:
    assert drops(nn.Sequential(dropout(0.1))) and not drops(nn.Sequential(dropout(0.0)))
    assert not drops(nn.Sequential(dropout(0.1)).eval())
