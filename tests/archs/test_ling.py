"""Ling 3.0's limits of experts' activations, which transformers does not read: its modules with their formula."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo import CONFIGS, gradients_of, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.integrations import nativize
from ligermodels.models.mtp_format import mtp_block

LISTS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
TOLERANCE = 1e-5
ROUTED, SHARED = [0, 0.25, None, 0.5], [0, 0, 0.125, 1.0]
LING = {**CONFIGS["bailing_hybrid"], "num_nextn_predict_layers": 0}
LIMITED = {**LING, **dict(zip(LISTS, (ROUTED, SHARED), strict=True))}
IDS = torch.randint(3, LING["vocab_size"], (2, 41), generator=torch.Generator().manual_seed(0))


def limited(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """`SwigluStepAndMul` of vLLM and of SGLang's Bailing code."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit) if limit else F.silu(gate) * up


def shared_expert(module: Any, limit: float | None, x: Tensor) -> Tensor:
    return module.down_proj(limited(module.gate_proj(x), module.up_proj(x), limit))


def routed_experts(module: Any, limit: float | None, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Each choice against a copy of its own expert."""
    gate, up = torch.einsum("th,tkoh->tko", x, module.gate_up_proj[experts]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", limited(gate, up, limit), module.down_proj[experts])
    return (y * weights[..., None]).sum(1)


def make_limited(folder: Path) -> PreTrainedModel:
    """A checkpoint with limits, and transformers' model of it."""
    oracle = make_checkpoint(folder, LING)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **{name: LIMITED[name] for name in LISTS}}))
    for layer, routed, shared in zip(oracle.model.layers, ROUTED, SHARED, strict=True):
        if isinstance(experts := getattr(layer.mlp, "experts", None), nn.Module):
            experts.forward = partial(routed_experts, experts, routed)
            layer.mlp.shared_experts.forward = partial(shared_expert, layer.mlp.shared_experts, shared)
    return oracle


def test_limits(tmp_path: Path) -> None:
    """Logits and gradients are those of the formula, and not those without limits; files go out as they came."""
    oracle = make_limited(tmp_path / "model")
    model = lm.from_pretrained(tmp_path / "model")
    wanted = oracle(IDS, labels=IDS)
    wanted.loss.backward()
    output = model(IDS, labels=IDS, return_logits=True)
    output.loss.backward()
    assert relative_error(output.logits, wanted.logits) < TOLERANCE
    found = stored_as(oracle, gradients_of(model))
    for name, parameter in oracle.named_parameters():
        if parameter.requires_grad:
            assert relative_error(found[name], parameter.grad) < TOLERANCE, name
    without = lm.from_config(LING)
    without.load_state_dict(model.state_dict())
    assert relative_error(without(IDS).logits, wanted.logits) > 1e-3
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all(config[name] == LIMITED[name] for name in LISTS)
    ids = oracle.generate(IDS[:, :9], max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=False)
    assert torch.equal(model.generate(IDS[:, :9], 12, do_sample=False, eos_token_id=None), ids)


def test_configs() -> None:
    """Zero and null are no limit, dense layers have none, and MTP layers neither."""
    blocks = lm.from_config(LIMITED, device="meta").config.blocks
    limits = [(block.mlp.limit, block.mlp.shared.limit) for block in blocks[1:]]
    assert limits == [(0.25, None), (None, 0.125), (0.5, 1.0)] and blocks[0].mlp.limit is None
    assert blocks[1].mlp.activation == "clamped_silu" and blocks[1].mlp.shared.activation == "silu"
    unlimited = {name: [0] * 4 for name in LISTS}
    assert lm.from_config({**LING, **unlimited}, device="meta").config == lm.from_config(LING, device="meta").config
    longer = {name: [*LIMITED[name], 0] for name in LISTS}
    config = lm.from_config({**LIMITED, **longer}, device="meta").config
    assert config.blocks == blocks
    block = mtp_block(config)
    assert block == mtp_block(lm.from_config(LING, device="meta").config)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([1, 1, 1], "'expert_swiglu_limit_list' must be a list of 4 numbers, got one of 3"),
        ([0, 0, 0, 0, 1], "'expert_swiglu_limit_list' must be a list of 4 numbers, got one of 5"),
        (4.0, "'expert_swiglu_limit_list' must be a list of 4 numbers"),
        ([0, -1, 0, 0], "'expert_swiglu_limit_list' must be a list of numbers from 0 on"),
        ([0, "1", 0, 0], r"'expert_swiglu_limit_list\[1\]' must be a"),
    ],
)
def test_bad_limits(limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**LING, "expert_swiglu_limit_list": limits}, device="meta")


def test_nativize_refuses_limits(tmp_path: Path) -> None:
    """transformers computes without them: a native pass would give other logits."""
    make_limited(tmp_path)
    with pytest.raises(ConfigError, match="limits of experts' activations"):
        nativize(AutoModelForCausalLM.from_pretrained(tmp_path))
