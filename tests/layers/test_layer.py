"""What a layer declares, and layers that do not derive from the base class."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.layers import BlockOutput, ForwardContext, Layer, LayerConfig
from ligermodels.layers.layer import declared


class Plain(nn.Linear):
    def forward(self, x: Tensor, context: ForwardContext, *_: Any) -> Tensor:
        return super().forward(x)


class Derived(Layer, Plain):
    pass


@dataclass(frozen=True)
class Config(LayerConfig):
    derived: bool

    def build(self, hidden_size: int) -> nn.Module:
        return (Derived if self.derived else Plain)(hidden_size, hidden_size)


@pytest.mark.parametrize("field", ["mixer", "mlp", "after"])
def test_a_layer_derives_from_the_base_class(field: str) -> None:
    config = lm.from_config(CONFIGS["llama-3.1"], device="meta").config
    found = [replace(config.blocks[0], **{field: Config(derived)}) for derived in (False, True)]
    with pytest.raises(ConfigError, match=rf"{field}: Config.build returns a Plain, .* write `class Plain\(Layer\)`"):
        lm.CausalLM(replace(config, blocks=(found[0],)))
    assert not lm.CausalLM(replace(config, blocks=(found[1],))).decoder.blocks[0].token_wise


def test_a_module_in_the_place_of_a_layer_has_the_defaults() -> None:
    block = lm.from_config(CONFIGS["llama-3.1"]).decoder.blocks[0]
    assert block.mlp.token_wise and block.mixer.context_parallel
    assert not declared(nn.Sequential(block.mlp)).token_wise


def test_the_output_of_a_block() -> None:
    model = lm.from_config({**CONFIGS["mixtral"], "output_router_logits": True})
    found: list[Any] = []
    for block in model.decoder.blocks:
        block.register_forward_hook(lambda _, inputs, output: found.append(output))
    model(torch.arange(3, 9)[None])
    assert all(type(each) is BlockOutput and each.keys_values is None for each in found)
    assert found[0].hidden.shape[:2] == (1, 6) and found[0].router.logits.shape[0] == 6
