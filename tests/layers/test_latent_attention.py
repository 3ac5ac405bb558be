"""Latent attention: what decoding keeps, LoRA, layouts and configs of its families. Numbers against transformers are in
test_families.py, steps and trees in test_decoding_states.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from zoo import CONFIGS, LATENT, make_checkpoint, plain, relative_error, stored_as

import ligermodels as lm
from ligermodels.adapt.lora import lora_layers
from ligermodels.cli.describe import checkpoint_facts
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import LatentCache, RopeConfig
from ligermodels.layers.latent_attention import LatentAttentionConfig
from ligermodels.verify import verify

TOLERANCE = 1e-5
IDS = 3 + torch.arange(2 * 41).view(2, 41) * 7 % 128


# -- the decoding state ------------------------------------------------------------------------------------------------


def test_decoding_keeps_latents_alone(tmp_path: Path) -> None:
    """Of each token and layer the latent and the rotated channels of its keys: c + r numbers."""
    make_checkpoint(tmp_path, LATENT["deepseek_v3"])
    assert checkpoint_facts(tmp_path)["kv_cache_bytes_per_token"] == 3 * (12 + 6) * 4
    state = lm.from_pretrained(tmp_path).new_state(2, 50)
    assert [tuple(layer.latents.shape) for layer in state.layers] == [(2, 50, 18)] * 3
    assert [tuple(layer.up.shape) for layer in state.layers] == [(6, 10 + 8, 12)] * 3


def test_what_does_not_fit_a_cache_is_refused() -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(InputError, match="LatentCache: all sizes must be positive"):
        LatentCache(1, 2, 0, 18, (6, 18, 12), **options)
    layer = LatentCache(1, 2, 5, 18, (6, 18, 12), **options).layer(0)
    for latents, up, message in (
        (
            torch.zeros(1, 3, 18),
            torch.zeros(6, 18, 12),
            r"latents have shape \(1, 3, 18\), the cache takes \(2, T, 18\)",
        ),
        (torch.zeros(2, 6, 18), torch.zeros(6, 18, 12), "latents have 6 tokens, the cache was made for 5"),
        (torch.zeros(2, 5, 18), torch.zeros(3, 18, 12), r"up has shape \(3, 18, 12\), the cache takes \(6, 18, 12\)"),
    ):
        with pytest.raises(InputError, match=message):
            layer.fill(latents, up)


def test_a_prefill_takes_the_weights_as_they_are() -> None:
    """Also in a state that was filled with others."""
    model = lm.from_config({**LATENT["glm4_moe_lite"], "initializer_range": 0.3}).eval()
    state = model.new_state(2, 60)
    with torch.no_grad():
        for _ in range(2):
            state.reset()
            model.decoder(IDS[:, :30], state=state)
            stepped = model.decoder(IDS[:, 30:], state=state)
            assert relative_error(stepped, model.decoder(IDS)[:, 30:]) < TOLERANCE
            for block in model.decoder.blocks:
                block.mixer.kv_b.weight.mul_(-0.7)


def test_rope_of_other_channels_is_refused() -> None:
    sizes: dict[str, Any] = {"plain_dim": 10, "rotated_dim": 6, "value_dim": 8, "kv_rank": 12, "q_rank": None}
    with pytest.raises(ConfigError, match="rotated_dim: is 6, but rope is of 8 channels"):
        LatentAttentionConfig(6, **sizes, rope=RopeConfig(8))


# -- LoRA --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-without-experts", "mistral4"])
def test_lora(name: str, tmp_path: Path) -> None:
    """Updates are those of the projections in the checkpoint, in its order; decoding knows them too."""
    oracle = make_checkpoint(tmp_path / "model", LATENT[name])
    model = lm.from_pretrained(tmp_path / "model")
    queries = ["q_proj"] if LATENT[name]["q_lora_rank"] is None else ["q_a_proj", "q_b_proj"]
    chosen = [*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    lm.add_lora(model, 3, lora_alpha=6, target_modules=chosen)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(0, 0.2)
    assert len(lora_layers(model)) == len(chosen) * len(model.decoder.blocks)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)
    lm.save_adapter(model, tmp_path / "adapter")
    logits, options = model.eval()(IDS).logits, {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(IDS[:, :9], **options)

    updates = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights = dict(oracle.named_parameters())
    with torch.no_grad():
        for key in [key for key in updates if "lora_A" in key]:
            weight = weights[key.removeprefix("base_model.model.").replace("lora_A.", "")]
            weight += 2 * updates[key.replace("lora_A", "lora_B")] @ updates[key]
        assert relative_error(logits, oracle(IDS).logits) < TOLERANCE
        assert torch.equal(oracle.generate(IDS[:, :9], do_sample=False, **options), generated)
    assert torch.equal(lm.merge_lora(model).generate(IDS[:, :9], **options), generated)


# -- checkpoints and configs -------------------------------------------------------------------------------------------


def test_mistral4_with_a_tensor_for_each_expert(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "model", LATENT["mistral4"])
    file = tmp_path / "model" / "model.safetensors"
    stacked = load_file(file)
    tensors = {key: tensor for key, tensor in stacked.items() if ".experts." not in key}
    for key in stacked.keys() - tensors.keys():
        at, _, part = key.rpartition(".")
        for expert, matrix in enumerate(stacked[key]):
            parts = {"gate_proj": matrix[:31], "up_proj": matrix[31:]} if part == "gate_up_proj" else {part: matrix}
            tensors |= {f"{at}.{expert}.{name}.weight": each.contiguous() for name, each in parts.items()}
    assert stored_as(oracle, tensors).keys() == stacked.keys()
    save_file(tensors, file)
    model = lm.from_pretrained(tmp_path / "model")
    assert relative_error(model(IDS).logits, oracle(IDS).logits) < TOLERANCE
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0}])
def test_the_rope_that_a_mistral4_does_not_name_is_its_own(rope: dict[str, Any] | None, tmp_path: Path) -> None:
    """All of its settings, or the part of a head that is rotated; and transformers opens what goes out."""
    config = {name: value for name, value in LATENT["mistral4"].items() if name != "rope_parameters"}
    if rope is not None:
        config["rope_parameters"] = {**rope, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.2}
    oracle = make_checkpoint(tmp_path / "model", config)
    model = lm.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "out")
    assert "rope_scaling" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert lm.from_pretrained(tmp_path / "out").config == model.config
    again = plain(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))
    positions = torch.arange(41)[None] + (8192 * 3 if rope is None else 50)  # beyond the original context
    with torch.no_grad():
        wanted = oracle(IDS[:1], position_ids=positions).logits
        assert relative_error(again(IDS[:1], position_ids=positions).logits, wanted) < TOLERANCE
        assert relative_error(model(IDS[:1], position_ids=positions).logits, wanted) < (1e-4 if rope is None else 1e-5)


def test_verify_opens_what_transformers_does_not_count_as_a_language_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, LATENT["mistral4"])
    monkeypatch.setattr(MODEL_FOR_CAUSAL_LM_MAPPING, "_extra_content", {})  # as it is without the tests' own entry
    with pytest.raises(ValueError, match="Mistral4Config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    report = verify(tmp_path, tokens=41, tolerance=TOLERANCE)
    assert report.passed and any("q_a_layernorm" in place.theirs for place in report.places)


def test_fields_of_other_names() -> None:
    """That transformers reads or writes in place of those of published configs."""
    for name, older, newer in (
        ("glm4_moe_lite", "qk_rope_head_dim", "head_dim"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("deepseek_v3", "num_nextn_predict_layers", "num_mtp_layers"),
        ("mistral4", "n_routed_experts", "num_local_experts"),
    ):
        config = CONFIGS[name]
        other = {**{key: value for key, value in config.items() if key != older}, newer: config[older]}
        assert lm.from_config(other, device="meta").config == lm.from_config(config, device="meta").config


def test_a_null_means_false_where_transformers_takes_it_so() -> None:
    for field in ("rope_interleave", "norm_topk_prob"):
        configs = [
            lm.from_config({**LATENT["mistral4"], field: value}, device="meta").config for value in (None, False)
        ]
        assert configs[0] == configs[1] != lm.from_config(LATENT["mistral4"], device="meta").config


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v3", {"num_key_value_heads": 3}, "num_key_value_heads = 3 .* by num_attention_heads it must be 6"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim = 16 .* by qk_rope_head_dim it must be 6"),
        (
            "deepseek_v3",
            {"qk_head_dim": 6},
            r"qk_head_dim = 6 .* by qk_nope_head_dim \+ qk_rope_head_dim it must be 16",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim 5 must be even"),
        ("deepseek_v3", {"qk_rope_head_dim": 10**7}, "qk_rope_head_dim must be at most 65536"),
        ("deepseek_v3", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("deepseek_v3", {"q_lora_rank": 0}, "'q_lora_rank' must be a whole number above 0"),
        ("deepseek_v3", {"v_head_dim": "x"}, "'v_head_dim' must be a whole number"),
        ("deepseek_v3", {"rope_interleave": 1}, "'rope_interleave' must be true or false"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        ("deepseek_v3", {"sliding_window": 9}, "sliding_window = 9 is not implemented"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}},
            "rope_parameters: .*'factor' is miss",
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2 contradicts mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must be a list of num_hidden_layers = 2"),
        ("glm4_moe_lite", {"head_dim": 8}, "qk_rope_head_dim = 6 contradicts head_dim = 8"),
        ("mistral4", {"head_dim": 6}, r"head_dim = 6 .* by qk_nope_head_dim \+ qk_rope_head_dim it must be 16"),
        ("mistral4", {"partial_rotary_factor": 0.5}, "partial_rotary_factor gives 8 of .* qk_rope_head_dim is 6"),
        ("mistral4", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not implemented"),
        ("mistral4", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not implemented"),
    ],
)
def test_bad_fields_are_named(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**LATENT[name], **fields}, device="meta")
