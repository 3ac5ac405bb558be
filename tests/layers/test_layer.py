"""What a layer declares, and layers that do not derive from the base class."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import BlockOutput, ForwardContext, Layer, LayerConfig, context_parallel
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.layers.layer import declared
from ligermodels.layers.tokens import ContextShard


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


@pytest.mark.parametrize("kind", [ConfigError, InputError])
def test_a_layer_that_cannot_be_divided_over_ranks_is_named(kind: type[Exception], monkeypatch: Any) -> None:
    decoder = lm.from_config(CONFIGS["llama-3.1"], device="meta").decoder

    def check(ranks: int) -> None:
        raise kind(f"channels: 3 over {ranks} ranks")

    monkeypatch.setattr(decoder.blocks[1].mixer, "check_context_parallel", check)
    with pytest.raises(ConfigError, match=r"context: blocks\[1\].mixer: channels: 3 over 2 ranks"):
        check_context_parallel(decoder, 2)


def test_the_page_about_context_parallelism_names_what_there_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "custom-architecture.md").read_text()
    section = page.partition("## Context parallelism")[2].partition("## ")[0]
    functions = set(re.findall(r"`(\w+)\(", section))
    methods = set(re.findall(r"context\.shard\.(\w+)", section))
    assert {"shard_attention", "check_context_parallel"} <= functions and len(methods) >= 2
    assert all(hasattr(context_parallel, name) or hasattr(Layer, name) for name in functions)
    assert all(hasattr(ContextShard, name) for name in methods)
