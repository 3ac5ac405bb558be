"""Mamba2 in models: long texts, limits of step sizes, biases under padding, what stays in fp32, bad configs."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from zoo import BASE, CONFIGS, MAMBAS, gradients_of, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.layers import FullPrecision

TOLERANCE = 1e-5
BAMBA, GRANITE = CONFIGS["bamba"], CONFIGS["granitemoehybrid-dense-and-rope"]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(MAMBAS))
def test_texts_longer_than_a_chunk(name: str, tmp_path: Path) -> None:
    """Logits, loss and gradients of transformers; packed documents equal separate ones."""
    oracle = make_checkpoint(tmp_path, {**CONFIGS[name], "max_position_embeddings": 512})
    model, ids = lm.from_pretrained(tmp_path), tokens(2, 150)
    wanted, output = oracle(ids, labels=ids), model(ids, labels=ids, return_logits=True)
    wanted.loss.backward()
    output.loss.backward()
    assert relative_error(output.logits, wanted.logits) < TOLERANCE
    ours = stored_as(oracle, gradients_of(model))
    errors = {key: relative_error(ours[key], p.grad) for key, p in oracle.named_parameters() if p.grad is not None}
    assert max(errors.values()) < 3 * TOLERANCE, errors
    bounds = torch.tensor([0, 64, 67, 137, 138, 150], dtype=torch.int32)
    together = model(ids[:1], cu_seqlens=bounds).logits
    apart = [model(ids[:1, start:end]).logits for start, end in pairwise(bounds.tolist())]
    assert relative_error(together, torch.cat(apart, dim=1)) < TOLERANCE


def test_gradients_of_lora_on_the_output_projection() -> None:
    """The gradients of A and B follow from the gradient of the merged dense weight. With transformers' fused kernels
    they are none: these read the weight of `out_proj` alone."""
    torch.manual_seed(0)
    model = lm.from_config(BAMBA, dtype=torch.float64)
    model = lm.add_lora(model, r=3, lora_alpha=7, target_modules=["out_proj"], dtype=torch.float64)
    dense, ids = lm.from_config(BAMBA, dtype=torch.float64), tokens(2, 21)
    layers = {name: layer for name, layer in model.named_modules() if name.endswith(".mixer.out")}
    factors = {}
    for name, layer in layers.items():
        a, b = (next(p for key, p in layer.named_parameters() if part in key) for part in ("lora_A", "lora_B"))
        with torch.no_grad():
            factors[name] = a, b.normal_(0, 0.3)
    base = {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}
    dense.load_state_dict(base)
    with torch.no_grad():
        for name, (a, b) in factors.items():
            dense.get_submodule(name).weight += 7 / 3 * b @ a
    for module in (model, dense):
        module(ids, labels=ids).loss.backward()
    assert len(factors) == 3
    for name, (a, b) in factors.items():
        weight = dense.get_submodule(name).weight.grad
        torch.testing.assert_close(a.grad, 7 / 3 * b.T @ weight, rtol=1e-9, atol=1e-14)
        torch.testing.assert_close(b.grad, 7 / 3 * weight @ a.T, rtol=1e-9, atol=1e-14)


@torch.no_grad()
@pytest.mark.parametrize("config", [BAMBA, GRANITE], ids=["bamba", "granitemoehybrid"])
def test_limits_of_step_sizes(config: dict[str, Any], tmp_path: Path) -> None:
    """They change the result, and hold in decoding too; transformers has them in the prefill alone."""
    oracle = make_checkpoint(tmp_path, {**config, "time_step_limit": [0.4, 0.8]})
    model, ids = lm.from_pretrained(tmp_path), tokens(2, 21)
    logits = model(ids).logits
    assert relative_error(logits, oracle(ids).logits) < TOLERANCE
    text = model.generate(ids, max_new_tokens=9, eos_token_id=None)
    for length in range(21, 30):
        assert torch.equal(model(text[:, :length]).logits[:, -1].argmax(-1), text[:, length])
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["time_step_limit"] == [0.4, 0.8]
    for limit in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], None):
        (tmp_path / "config.json").write_text(json.dumps({**config, "time_step_limit": limit}))
        assert relative_error(lm.from_pretrained(tmp_path)(ids).logits, logits) > 1e-3


@torch.no_grad()
def test_rows_of_a_padded_batch_equal_single_rows_where_projections_have_biases(tmp_path: Path) -> None:
    """transformers' convolution reads the bias under the padding."""
    make_checkpoint(tmp_path, {**BAMBA, "mamba_proj_bias": True})
    model, ids = lm.from_pretrained(tmp_path), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    text = model.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None)
    alone = model.generate(ids[:1, 5:], max_new_tokens=8, eos_token_id=None)
    assert torch.equal(text[0, 5:], alone[0])
    logits = model(ids, attention_mask=mask).logits
    assert relative_error(logits[0, 5:], model(ids[:1, 5:]).logits[0]) < TOLERANCE


def test_rates_stay_in_full_precision_and_go_out_as_they_came(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "in", BAMBA, dtype=torch.bfloat16)
    model = lm.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    kept = [p for module in model.modules() if isinstance(module, FullPrecision) for p in module.parameters()]
    assert len(kept) == 12 and {p.dtype for p in kept} == {torch.float32}
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(after[key].dtype == t.dtype and torch.equal(after[key], t) for key, t in before.items())


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (BAMBA, {"mamba_n_groups": 5}, "mamba_n_groups 5 does not divide mamba_n_heads 12"),
        (BAMBA, {"mamba_d_head": 8}, r"mamba_n_heads 12 heads of mamba_d_head 8 .* mamba_expand \* hidden_size = 108"),
        (BAMBA, {"mamba_d_head": "automatic"}, "field 'mamba_d_head' must be a whole number"),
        (BAMBA, {"time_step_limit": [1.0, 0.5]}, "field 'time_step_limit' must be two numbers"),
        (BAMBA, {"time_step_limit": 0.5}, "field 'time_step_limit' must be two numbers"),
        (BAMBA, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        (BAMBA, {"z_loss_coefficient": 0.1}, "z_loss_coefficient = 0.1 is not implemented"),
        (BAMBA, {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 is not implemented"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi' is not implemented"),
        (GRANITE, {"layer_types": ["mamba"]}, "field 'layer_types' must be a list of num_hidden_layers = 2"),
        (GRANITE, {"normalization_function": "layernorm"}, "normalization_function = 'layernorm' is not implemented"),
    ],
)
def test_bad_configs(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**config, **change})
