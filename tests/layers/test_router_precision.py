"""Weights of routers that transformers keeps in float32 in a model of a narrower dtype: which families' they are, and
that they stay so wherever a model goes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import CONFIGS, make_checkpoint, plain, relative_error
from zoo_oracles import renamed

import ligermodels as lm
from ligermodels.convert.config_json import as_config
from ligermodels.errors import ConfigError
from ligermodels.layers import FullPrecision, Router, RouterConfig
from ligermodels.layers.modules import modules_of
from ligermodels.models.families import composed
from ligermodels.training import FusedAdamW


def routers_of(config: dict[str, Any]) -> list[RouterConfig]:
    blocks = composed(as_config(config)).blocks
    return [block.expert_router for block in blocks if block.expert_router is not None]


MIXTURES = {config["model_type"]: config for config in CONFIGS.values() if routers_of(config)}
"""Model type -> the last of its configs."""
FLOAT32 = {
    "bailing_hybrid", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "hunyuan_v1_moe", "hy_v3", "kimi_linear", "mimo_v2_flash", "nemotron_h", "sarvam_mla", "sarvam_moe", "solar_open",
}  # fmt: skip
"""Those of which transformers 5.24 keeps the weights in float32: `_keep_in_fp32_modules_strict` of their classes, of
HunYuan the layer's own dtype."""
IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(0))


def routers(model: nn.Module) -> dict[str, Router]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def stored(model: lm.CausalLM) -> dict[str, str]:
    """Native name of each router's weight -> its name in the checkpoint."""
    mappings = model.require_export_spec().weight_map.mappings
    return {m.target: m.views[0].source for m in mappings if m.target.endswith("router.weight")}


def test_families_with_weights_in_float32() -> None:
    found = {name for name, config in MIXTURES.items() if any(r.float32_weight for r in routers_of(config))}
    assert found == FLOAT32 and all(r.float32_weight for name in found for r in routers_of(MIXTURES[name]))


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_dtypes_values_and_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, MIXTURES[name])
    config = AutoConfig.from_pretrained(tmp_path)
    oracle = plain(AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.bfloat16))
    model = lm.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs, names = dict(oracle.named_parameters()), stored(model)
    native, tokens = dict(model.named_parameters()), torch.randn(1, 600, model.config.hidden_size).bfloat16()
    for own, source in names.items():
        names_there = source, renamed(source), source.replace(".block_sparse_moe.", ".mlp.")
        gate = next(there for there in names_there if there in theirs)
        assert theirs[gate].dtype == native[own].dtype == (torch.float32 if name in FLOAT32 else torch.bfloat16)
        assert torch.equal(theirs[gate], native[own])
        if name not in FLOAT32:
            continue
        mixture = model.get_submodule(own.removesuffix(".router.weight"))
        outputs = oracle.get_submodule(gate.partition(".gate.")[0])(tokens)
        wanted = outputs[0] if isinstance(outputs, tuple) else outputs
        assert relative_error(mixture(tokens)[0], wanted) < 3e-2
    assert len(names) == len(routers(model))
    again = lm.from_transformers(oracle)
    assert all(torch.equal(again.get_parameter(key), native[key]) for key in names)


@pytest.mark.parametrize("name", ["deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3", "nemotron_h"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_weights_stay_float32_and_go_out_as_they_came(name: str, kept: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", MIXTURES[name], dtype=kept)
    before = load_file(tmp_path / "in" / "model.safetensors")
    model = lm.from_pretrained(tmp_path / "in", dtype="bfloat16")
    names = stored(model)
    for cast in (lambda m: m, lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(dtype=torch.bfloat16)):
        assert cast(model) is model and model.dtype in (torch.bfloat16, torch.float16)
        for own, source in names.items():
            assert model.get_parameter(own).dtype == torch.float32
            assert torch.equal(model.get_parameter(own), before[source].float())
    model.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    sent = dict(pair for bucket in model.iter_hf_weights() for pair in bucket)
    for tensors in (after, sent):
        assert all(tensors[source].dtype == kept for source in names.values())
        assert all(torch.equal(tensors[source], before[source]) for source in names.values())
    narrow = dict(pair for bucket in model.iter_hf_weights(dtype=torch.bfloat16) for pair in bucket)
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}
    assert {p.dtype for router in routers(model.double()).values() for p in router.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["glm4_moe", "hunyuan_v1_moe"])
def test_new_models_train_small_steps_of_routers(name: str, tmp_path: Path) -> None:
    """In bfloat16 steps of 1e-5 would round to nothing."""
    model = lm.from_config(MIXTURES[name], dtype=torch.bfloat16)
    start = {key: router.weight.detach().clone() for key, router in routers(model).items()}
    optimizer = FusedAdamW(model.parameters(), lr=1e-5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    for key, router in routers(model).items():
        assert router.weight.dtype == router.weight.grad.dtype == torch.float32
        moved = (router.weight - start[key]).abs()[router.weight.grad != 0]
        assert moved.numel() and ((moved > 5e-6) & (moved < 2e-5)).all()
    model.save_pretrained(tmp_path)
    again = lm.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(p, again.get_parameter(key)) for key, p in model.named_parameters())


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_and_quantised_experts_leave_them(quantize: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {**MIXTURES["glm4_moe"], "hidden_size": 64, "moe_intermediate_size": 64})
    model = lm.from_pretrained(tmp_path, dtype="bfloat16", quantize=quantize)
    before = {key: router.weight.detach().clone() for key, router in routers(model).items()}
    lm.add_lora(model, 3)
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    lm.merge_lora(model) if quantize is None else lm.save_adapter(model, tmp_path / "adapter")
    for key, router in routers(model).items():
        assert router.weight.dtype == torch.float32 and torch.equal(router.weight, before[key])


def test_weights_in_float32_need_logits_in_float32() -> None:
    with pytest.raises(ConfigError, match="float32_weight: needs logits in float32; set float32_logits"):
        RouterConfig(4, 2, float32_weight=True)
    wide = RouterConfig(4, 2, float32_logits=True, float32_weight=True).build(8)
    assert modules_of(wide, FullPrecision) and not modules_of(RouterConfig(4, 2).build(8), FullPrecision)
