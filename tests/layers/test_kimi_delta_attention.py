"""Kimi Delta Attention in models (long texts: `test_gated_delta_net`):
layouts of checkpoints, dtypes that stay, bad configs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.errors import ConfigError, LigerModelsError
from ligermodels.layers import FullPrecision

TOLERANCE = 1e-5
PUBLISHED, BY_TYPES = CONFIGS["kimi_linear"], CONFIGS["kimi_linear-layer-types"]
LING = CONFIGS["bailing_hybrid"]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layout", ["published", "modules"])
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    """Published checkpoints have dense layers as "mlp"; a state dict of transformers has the names of its modules."""
    oracle = make_checkpoint(tmp_path / "saved", PUBLISHED)
    if layout == "published":
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        dense = "model.layers.0.block_sparse_moe."
        tensors = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in saved.items()}
        assert tensors.keys() != saved.keys()
    else:
        tensors = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
        assert any(".forget_gate." in name for name in tensors)
    check_layout(tmp_path, PUBLISHED, oracle, tensors)


def check_layout(tmp_path: Path, config: dict[str, Any], oracle: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """A checkpoint of these tensors computes as the oracle does, and goes out as it came."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    model = lm.from_pretrained(folder)
    with torch.no_grad():
        assert relative_error(model(tokens(2, 41)).logits, oracle(tokens(2, 41)).logits) < TOLERANCE
    model.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("layout", ["published", "modules"])
def test_other_layouts_of_ling(layout: str, tmp_path: Path) -> None:
    """Published checkpoints name the output projections of the two kinds of attention differently."""
    oracle = make_checkpoint(tmp_path / "saved", LING)
    if layout == "published":
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        delta = tuple(f"model.layers.{layer}.attention.dense" for layer in (0, 2))
        tensors = {
            name.replace(".dense.", ".o_proj.") if name.startswith(delta) else name: saved[name] for name in saved
        }
        assert tensors.keys() != saved.keys()
    else:
        tensors = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
        assert any(".forget_gate." in name for name in tensors)
    check_layout(tmp_path, LING, oracle, tensors)


def test_latent_queries_of_ling(tmp_path: Path) -> None:
    """Smaller published models have a latent of queries, which transformers does not read: with queries of the first
    channels alone, and norms of one, the model is that without the latent."""
    oracle = make_checkpoint(tmp_path / "saved", LING)
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    size, rank = LING["hidden_size"], LING["hidden_size"] - 7
    for layer in (1, 3):
        part = f"model.layers.{layer}.attention"
        q = tensors.pop(f"{part}.q_proj.weight")
        tensors[f"{part}.q_a_proj.weight"] = torch.eye(rank, size)
        tensors[f"{part}.q_a_layernorm.weight"] = torch.ones(rank)
        tensors[f"{part}.q_b_proj.weight"] = q[:, :rank].contiguous()
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**LING, "q_lora_rank": rank}))
    for layer in (1, 3):
        attention = oracle.model.layers[layer].self_attn
        whole = attention.q_proj.weight.detach().clone()

        def project(x: Tensor, whole: Tensor = whole) -> Tensor:
            part = x[..., :rank]
            return part * (part.square().mean(-1, keepdim=True) + 1e-6).rsqrt() @ whole[:, :rank].T

        attention.q_proj.forward = project
    model = lm.from_pretrained(folder)
    with torch.no_grad():
        assert relative_error(model(tokens(2, 41)).logits, oracle(tokens(2, 41)).logits) < TOLERANCE


def test_decays_norms_and_routers_stay_in_full_precision() -> None:
    model = lm.from_config(PUBLISHED, dtype=torch.bfloat16)
    kept = {name for name, module in model.named_modules() if isinstance(module, FullPrecision)}
    found = {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] in kept}
    assert len(found) == 9 and {p.dtype for p in found.values()} == {torch.float32}
    for name, p in found.items():
        if name.endswith("decay.log_rate"):
            assert (p.exp() >= 1).all() and (p.exp() <= 16).all()
        if name.endswith("decay.bias"):
            step = torch.nn.functional.softplus(p)
            assert (step > 0.9e-3).all() and (step < 0.11).all() and step.std() > 0


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**PUBLISHED["linear_attn_config"], **changes}}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (PUBLISHED, {"linear_attn_config": [1]}, "field 'linear_attn_config' must be an object"),
        (PUBLISHED, linear(kda_layers=[1]), "must together have each layer from 1 to num_hidden_layers = 4 once"),
        (PUBLISHED, linear(kda_layers=[1, 2, 3]), "must together have each layer from 1"),
        (PUBLISHED, {"layer_types": ["linear_attention"] * 4}, "linear_attn_config contradicts layer_types"),
        (PUBLISHED, {"linear_head_dim": 10}, "linear_head_dim = 10 contradicts linear_attn_config.head_dim = 9"),
        (PUBLISHED, linear(num_heads=0), "linear_attn_config: field 'num_heads' must be a whole number above 0"),
        (PUBLISHED, {"model_max_length": 64}, "max_position_embeddings = 128 contradicts model_max_length = 64"),
        (PUBLISHED, {"n_group": 2}, "n_group = 2 contradicts num_expert_group = 4"),
        (PUBLISHED, {"mla_use_nope": False}, "mla_use_nope = False is not implemented"),
        (PUBLISHED, {"rope_scaling": {"type": "yarn"}}, "rope_scaling = .* is not implemented"),
        (
            PUBLISHED,
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func = 'softmax' is not implemented",
        ),
        (PUBLISHED, {"use_grouped_topk": False}, "use_grouped_topk = False is not implemented"),
        (PUBLISHED, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 is not implemented"),
        (BY_TYPES, {"first_k_dense_replace": 1}, "first_k_dense_replace = 1 contradicts mlp_layer_types"),
        (BY_TYPES, {"layer_types": ["kda"] * 4}, "field 'layer_types' must be a list of num_hidden_layers = 4"),
        (BY_TYPES, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        (LING, {"kda_lower_bound": 0}, "kda_lower_bound 0.* must be below 0"),
        (LING, {"kda_safe_gate": 1}, "field 'kda_safe_gate' must be true or false"),
        (LING, {"layer_group_size": 3}, "num_hidden_layers 4 is no multiple of layer_group_size 3"),
        (
            LING,
            {"moe_shared_expert_intermediate_size": 7},
            "moe_shared_expert_intermediate_size = 7 is not implemented",
        ),
        (LING, {"no_kda_lora": False}, "no_kda_lora = False is not implemented"),
        (LING, {"gated_attention_proj_granularity_type": "element_wise"}, "granularity_type = 'element_wise' is not"),
        (LING, {"rotary_dim": 4}, "rotary_dim = 4 is not implemented"),
    ],
)
def test_bad_configs(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**config, **change})


def test_batch_invariance_is_refused() -> None:
    model = lm.from_config(BY_TYPES)
    model.batch_invariant = True
    with pytest.raises(LigerModelsError, match=r"LatentAttention|KimiDeltaAttention"):
        model(tokens(1, 5))
