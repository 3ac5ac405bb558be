"""Draft heads and weights in 4 bits of every kind of layer; what newer families alone have."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import CONFIGS, OF_EACH_KIND, WITHOUT_GATES, make_checkpoint, relative_error
from zoo_oracles import kept_tensors

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError

WITHOUT_MTP = {
    "nemotron_h-without-experts": "no feed-forward layer; new layers of multi-token prediction",
    "gemma4_text-per-layer-inputs": "multi-token prediction is not implemented for such models",
}


@pytest.fixture(scope="module", params=OF_EACH_KIND)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, CONFIGS[request.param])
    return folder


@pytest.mark.parametrize("folder", [name for name in OF_EACH_KIND if name not in WITHOUT_MTP], indirect=True)
def test_new_mtp_heads_are_lossless_and_come_back(folder: Path, tmp_path: Path) -> None:
    base = lm.from_pretrained(folder)
    model = lm.MTPModel.from_base(base)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    options = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), base.generate(ids, **options))
    model.save_pretrained(tmp_path / "out")
    again = lm.MTPModel.from_pretrained(tmp_path / "out").head.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.head.state_dict().items())


@pytest.mark.parametrize(("folder", "message"), WITHOUT_MTP.items(), indirect=["folder"])
def test_new_mtp_heads_need_a_whole_block(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.MTPModel.from_base(lm.from_pretrained(folder))


@pytest.mark.parametrize("name", [name for name in sorted(WITHOUT_GATES) if "moe_intermediate_size" in CONFIGS[name]])
def test_experts_without_a_gate_in_one_tensor(name: str, tmp_path: Path) -> None:
    """The layout of transformers' modules: loaded, and written back as it came."""
    oracle = make_checkpoint(tmp_path / "model", CONFIGS[name])
    tensors = kept_tensors(oracle)
    assert any(key.endswith("experts.up_proj") for key in tensors)
    save_file({key: tensor.detach() for key, tensor in tensors.items()}, tmp_path / "model" / "model.safetensors")
    model = lm.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


@torch.no_grad()
def test_falcon_h1_scales_tokens_but_no_given_embeddings(tmp_path: Path) -> None:
    """And projects with a bias into Mamba2; transformers' left padding is wrong there."""
    oracle = make_checkpoint(tmp_path, {**CONFIGS["falcon_h1"], "mamba_proj_bias": True})
    model = lm.from_pretrained(tmp_path)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    given = oracle.get_input_embeddings()(ids)
    logits = model(inputs_embeds=given).logits
    assert relative_error(logits, oracle(inputs_embeds=given).logits) < 2e-5
    assert relative_error(logits, model(ids).logits) > 1e-2


def test_inner_size_of_falcon_h1() -> None:
    """Null as `mamba_d_ssm` means mamba_expand * hidden_size."""
    config = CONFIGS["falcon_h1-norms-and-biases"]
    assert config["mamba_d_ssm"] == 2 * config["hidden_size"]
    models = [lm.from_config({**config, "mamba_d_ssm": size}, device="meta") for size in (None, 108)]
    assert models[0].config == models[1].config
    with pytest.raises(ConfigError, match="12 heads of mamba_d_head 9 channels do not make mamba_d_ssm = 120"):
        lm.from_config({**config, "mamba_d_head": 9, "mamba_d_ssm": 120}, device="meta")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "published"), [("olmo_hybrid", True), ("olmo_hybrid", False), ("lara_mini", False)], ids=str
)
def test_other_names_of_hybrids(name: str, published: bool, tmp_path: Path) -> None:
    """Published checkpoints of OLMo Hybrid keep the names of norms by kind of layer, and the sizes of q, k and v;
    transformers saves three equal parts. The names of its modules are read too."""
    config = CONFIGS[name]
    oracle = make_checkpoint(tmp_path / "model", config)
    size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in oracle.named_parameters():
        if published and ".linear_attn.conv1d." in key:
            parts = tensor.split([size, size, len(tensor) - 2 * size])
            tensors |= {key.replace("conv1d", f"{part}_conv1d"): each for part, each in zip("qkv", parts, strict=True)}
            continue
        if published and ".3." not in key:
            key = key.replace(".input_layernorm.", ".attention_layer_norm.")
            key = key.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        tensors[key] = tensor
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    model = lm.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


@torch.no_grad()
def test_routers_of_lara_compute_logits_in_float32(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, CONFIGS["lara_mini"], dtype=torch.bfloat16)
    router = lm.from_pretrained(tmp_path, dtype=torch.bfloat16).decoder.blocks[0].mlp.router
    x = torch.randn(33, 60, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, _, experts = oracle.model.layers[0].mlp.gate(x)
    found = router(x)
    assert torch.equal(found.experts, experts) and relative_error(found.logits, logits) < 1e-6


@torch.no_grad()
def test_step_sizes_of_nemotron_h_have_a_lower_bound(tmp_path: Path) -> None:
    """`time_step_min`, as in transformers' forward pass over a text; its decoding steps are without it."""
    config = {**CONFIGS["nemotron_h-without-experts"], "time_step_min": 0.7}
    oracle = make_checkpoint(tmp_path, config)
    model, unbounded = lm.from_pretrained(tmp_path), lm.from_config({**config, "time_step_min": 0.0})
    unbounded.load_state_dict(model.state_dict())
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    assert relative_error(unbounded.eval()(ids).logits, oracle(ids).logits) > 1e-2
    text = model.generate(ids, max_new_tokens=6, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model(text[:, :-1]).logits[:, 8:].argmax(-1), text[:, 9:])  # steps as in one pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers_block_type": ["mamba", "conv"]}, "'layers_block_type' must have one of linear_attention, full_att"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M?"}, "'hybrid_override_pattern' must have one of M"),
        ({"hybrid_override_pattern": "M*"}, "layers_block_type and hybrid_override_pattern contradict each other"),
        ({"num_hidden_layers": 4}, "num_hidden_layers = 4 contradicts the 5 layers of layers_block_type"),
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit is not implemented; the lower bound is time_step_min"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias = True is not implemented; use_bias gives these biases"),
        ({"residual_in_fp32": True}, "residual_in_fp32 = True is not implemented"),
        ({"n_groups": 5}, "n_groups 5 does not divide mamba_num_heads 12"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true is not implemented"),
    ],
)
def test_fields_of_nemotron_h_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lm.from_config({**CONFIGS["nemotron_h-without-experts"], **fields}, device="meta")


@torch.no_grad()
def test_rows_longer_than_a_chunk_of_llama4_are_refused(tmp_path: Path) -> None:
    """Up to it, and where no layer has chunks, they are those of transformers, also with a rope that is no rotation."""
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = {**CONFIGS["llama4_text"], "attention_chunk_size": 9, "rope_parameters": scaled}
    oracle = make_checkpoint(tmp_path, config)
    model = lm.from_pretrained(tmp_path)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    assert relative_error(model(ids).logits, oracle(ids).logits) < 2e-5
    message = re.escape("chunk (attention_chunk_size): layers of this model attend within chunks of 9 tokens")
    with pytest.raises(InputError, match=message):
        model(ids[:, [0, *range(9)]])
    assert model.generate(ids[:, :5], max_new_tokens=4, eos_token_id=None, pad_token_id=0).shape == (2, 9)
    with pytest.raises(InputError, match=message):
        model.generate(ids[:, :5], max_new_tokens=6, eos_token_id=None, pad_token_id=0)
    everywhere = {**config, "layer_types": ["full_attention"] * 4, "attention_chunk_size": None}
    assert lm.from_config(everywhere)(ids[:, [*range(9), *range(9)]]).logits.isfinite().all()
    with pytest.raises(ConfigError, match="layer_types has 'chunked_attention', but attention_chunk_size is null"):
        lm.from_config({**config, "attention_chunk_size": None}, device="meta")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hybrid_layer_pattern": [1, 1]}, "hybrid_layer_pattern contradicts layer_types"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq contradicts mlp_layer_types"),
        ({"swa_num_key_value_heads": 1}, "swa_num_key_value_heads = 1 is not implemented; by num_key_value_heads it"),
        ({"swa_v_head_dim": 16}, "swa_v_head_dim = 16 is not implemented; by v_head_dim it must be 18"),
        ({"swa_rope_theta": 7e4}, "swa_rope_theta = 70000.0 contradicts the 10000.0 that transformers reads"),
        ({"rope_theta": 7e4}, "rope_theta = 70000.0 is not implemented; implemented: None, 5000000.0"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias = True is not implemented"),
        ({"v_head_dim": 20, "swa_v_head_dim": 20}, "v_head_dim 20 above head_dim 18 is not implemented"),
        ({"num_attention_heads": 3}, "twice num_key_value_heads 1, which does not divide num_attention_heads 3"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1 is not implemented"),
        ({"attention_value_scale": -0.7}, "field 'attention_value_scale' must be 0 or above"),
    ],
)
def test_fields_of_mimo_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lm.from_config({**CONFIGS["mimo_v2_flash-published-fields"], **fields}, device="meta")


@torch.no_grad()
@pytest.mark.parametrize("folder", OF_EACH_KIND, indirect=True)
def test_decoding_in_four_bits_is_that_of_the_dequantised_weights(folder: Path) -> None:
    model = lm.from_pretrained(folder, quantize="int4")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits
    assert relative_error(lm.from_pretrained(folder)(ids).logits, logits) > 1e-3
    tokens = model.generate(ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    plain = lm.dequantize(model)
    assert relative_error(plain(ids).logits, logits) < 1e-4
    assert torch.equal(plain.generate(ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0), tokens)
