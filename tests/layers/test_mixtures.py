"""Selection biases, layers of multi-token prediction, and configs of mixtures of experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import BASE, CONFIGS, MIXTURES, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.layers import MoE

BIASED = ["glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite"]
IDS = torch.arange(2 * 41).view(2, 41) * 7 % BASE["vocab_size"]


def biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}


def native_biases(model: lm.CausalLM) -> list[Tensor]:
    return [block.mlp.router.selection_bias for block in model.decoder.blocks if isinstance(block.mlp, MoE)]


# -- selection biases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BIASED)
def test_a_selection_bias_is_float32_here_and_goes_out_as_it_was_stored(
    name: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """And a model in bfloat16 routes by the bits that the file has."""
    make_checkpoint(tmp_path / "model", CONFIGS[name], dtype=torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors |= {each: torch.randn(bias.shape).to(stored) for each, bias in biases(tensors).items()}
    save_file(tensors, file)
    model = lm.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    for found, bias in zip(native_biases(model), biases(tensors).values(), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, bias.float())
    model.float().to(torch.bfloat16)
    for out, export in (("model", model.save_pretrained), ("medusa", export_with_heads(model))):
        export(tmp_path / "out" / out)
        written = load_file(tmp_path / "out" / out / "model.safetensors")
        assert tensors.keys() <= written.keys()
        assert all(written[each].dtype == t.dtype and torch.equal(written[each], t) for each, t in tensors.items())


def export_with_heads(model: lm.CausalLM) -> Any:
    return lambda folder: lm.MedusaModel.from_base(model, num_heads=1).export(folder, profile="full-hf")


@pytest.mark.parametrize("name", BIASED)
def test_selection_biases_of_a_model_in_memory(name: str, tmp_path: Path) -> None:
    """From transformers, and by state dicts both ways; optimizers leave them alone."""
    oracle = make_checkpoint(tmp_path / "model", CONFIGS[name])
    model = lm.from_transformers(oracle, dtype=torch.bfloat16)
    theirs = biases(oracle.state_dict())
    for found, bias in zip(native_biases(model), theirs.values(), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, bias)
    assert all(torch.equal(bias, theirs[each]) for each, bias in biases(model.hf_state_dict()).items())

    fresh = lm.from_config(CONFIGS[name])
    assert not any(bias.any() for bias in native_biases(fresh))
    fresh.load_hf_state_dict(oracle.state_dict())
    assert relative_error(fresh(IDS).logits, oracle(IDS).logits) < 1e-5
    before = [bias.clone() for bias in native_biases(fresh)]
    fresh.requires_grad_(True)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    fresh(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(map(torch.equal, native_biases(fresh), before))
    fresh.load_state_dict(lm.from_pretrained(tmp_path / "model").state_dict())
    assert relative_error(fresh(IDS).logits, oracle(IDS).logits) < 1e-5


def test_a_bias_that_is_missing_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["glm4_moe"])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({each: t for each, t in tensors.items() if not biases({each: t})}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing.*layers\.1\.mlp\.gate\.e_score_correction_bias"):
        lm.from_pretrained(tmp_path)


# -- layers of multi-token prediction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def test_layers_of_multi_token_prediction_are_kept_and_left_out(name: str, tmp_path: Path) -> None:
    """Those that the config counts are written back, except by keep="model"; a layer beyond them is an error."""
    config = {**CONFIGS[name], "num_nextn_predict_layers": 2}
    oracle = make_checkpoint(tmp_path / "model", config)
    file = tmp_path / "model" / "model.safetensors"
    text, count = load_file(file), config["num_hidden_layers"]
    last = f"layers.{count - 1}."
    tensors = {each: t for each, t in text.items() if each.startswith(f"model.{last}")}
    mtp = {each.replace(last, f"layers.{count + i}."): t + 1 for i in range(2) for each, t in tensors.items()}
    mtp |= {f"model.layers.{count + i}.eh_proj.weight": torch.randn(60, 120) for i in range(2)}
    save_file({**text, **mtp}, file)
    model = lm.from_pretrained(tmp_path / "model")
    assert relative_error(model(IDS).logits, oracle(IDS).logits) < 1e-5
    model.save_pretrained(tmp_path / "alone", keep="model")
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == text.keys()
    model.save_pretrained(tmp_path / "all")
    written = load_file(tmp_path / "all" / "model.safetensors")
    assert written.keys() == {**text, **mtp}.keys()
    assert all(torch.equal(written[each], t) for each, t in mtp.items())

    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match=rf"not expected in the checkpoint: model\.layers\.{count + 1}\."):
        lm.from_pretrained(tmp_path / "model")


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group 3 does not divide n_routed_experts 8"),
        ("glm4_moe", {"topk_group": 5}, "topk_group 5 is above n_group 4"),
        ("glm4_moe", {"n_group": 8}, "n_group 8 leaves one of n_routed_experts 8"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above 4, the experts in topk_group 2 of"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above n_routed_experts 8"),
        ("glm4_moe", {"num_local_experts": 9}, "n_routed_experts = 8 contradicts num_local_experts = 9"),
        ("glm4_moe", {"n_shared_experts": 0}, "'n_shared_experts' must be a whole number above 0"),
        ("glm4_moe", {"routed_scaling_factor": "x"}, "'routed_scaling_factor' must be a finite number"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        ("glm4_moe", {"n_routed_experts": 10**9}, "n_routed_experts must be at most 4096"),
        ("glm4_moe", {"num_nextn_predict_layers": -1}, "'num_nextn_predict_layers' must be a whole number"),
        ("glm4_moe", {"num_mtp_layers": 10**9}, "num_mtp_layers must be at most 4096"),
        ("minimax_m2", {"rotary_dim": 16}, "rotary_dim 16 is above head_dim 14"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False is not implemented"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm = False is not implemented"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64 is not implemented"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list: only layers of type 1"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not implemented"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "'shared_expert_intermediate_size' must be"),
        ("qwen2_moe", {"num_experts": 1}, "num_experts_per_tok 2 is above num_experts 1"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing or switched off"),
    ],
)
def test_bad_fields_are_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**MIXTURES[name], **fields}, device="meta")


def test_fields_of_published_configs() -> None:
    """MiniMax-M2's own, and the names that transformers 5 writes."""
    published = {
        "attn_type_list": [1, 1],
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "use_mtp": True,
        "mlp_intermediate_size": 8192,
        "shared_moe_mode": "sigmoid",
        "shared_intermediate_size": 0,
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
    }
    config = MIXTURES["minimax_m2"]
    assert lm.from_config({**config, **published}, device="meta").config == lm.from_config(config, device="meta").config
    glm = MIXTURES["glm4_moe"]
    renamed = {name: value for name, value in glm.items() if name != "n_routed_experts"} | {"num_local_experts": 8}
    assert lm.from_config(renamed, device="meta").config == lm.from_config(glm, device="meta").config


def test_the_layers_of_glm_need_only_the_tokens_with_a_target() -> None:
    """There is no loss of all tokens, and labels of a few leave the gradients as they are."""
    model = lm.from_config(MIXTURES["glm4_moe"])
    labels = torch.full_like(IDS, -100)
    labels[:, 30:34] = IDS[:, 30:34]
    output = model(IDS, labels=labels)
    assert output.aux_loss is None and all(block.mlp.token_wise for block in model.decoder.blocks)
    output.loss.backward()
    few = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(IDS).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(few[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_published_layouts_of_one_family_are_one_model(tmp_path: Path) -> None:
    """MiniMax's names are others in files than in transformers 5, of the selection bias too."""
    oracle = make_checkpoint(tmp_path, CONFIGS["minimax_m2"])
    tensors = load_file(tmp_path / "model.safetensors")
    assert all("block_sparse_moe.e_score" in name for name in biases(tensors))
    in_memory = stored_as(oracle, tensors)
    assert all(".mlp.e_score" in name for name in biases(in_memory)) and biases(in_memory)
    assert in_memory.keys() == oracle.state_dict().keys()
    assert lm.from_pretrained(tmp_path).hf_state_dict().keys() == in_memory.keys()
