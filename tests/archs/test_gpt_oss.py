"""gpt-oss: checkpoints in mxfp4, sinks, and configs. What all families are tested for is in test_families.py."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from mxfp4_files import make_mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config
from zoo import BASE, GPT_OSS, make_checkpoint, plain, relative_error

import ligermodels as lm
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError
from ligermodels.layers import YarnScaling

IDS = torch.arange(2 * 41).view(2, 41) * 7 % BASE["vocab_size"]


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    same = [found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in wanted.items()]
    return found.keys() == wanted.keys() and all(same)


def test_mxfp4_loads_as_in_transformers_and_goes_out_in_bf16(tmp_path: Path) -> None:
    wanted = make_mxfp4(tmp_path / "model")
    model = lm.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16 and equal(model.hf_state_dict(), wanted)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    assert all(torch.equal(p.bfloat16(), wanted[name]) for name, p in theirs.named_parameters())
    model.save_pretrained(tmp_path / "out", max_shard_size="40KB")
    written = {name: t for shard in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(shard).items()}
    assert equal(written, wanted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        logits = plain(again)(IDS).logits
        assert relative_error(plain(theirs.float())(IDS).logits, logits) < 1e-5
        assert relative_error(lm.from_pretrained(tmp_path / "model", dtype=torch.float32)(IDS).logits, logits) < 1e-5


def test_mxfp4_without_its_scales_is_an_error(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith("down_proj_scales")}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: .*experts\.down_proj_scales"):
        lm.from_pretrained(tmp_path)


def test_sinks_take_weight_from_the_values() -> None:
    """All of it where they are high, none where they are low; new ones are close to 0."""
    model = lm.from_config(GPT_OSS)
    layer = model.decoder.blocks[0].mixer
    assert 0 < layer.sinks.abs().max() < 0.1
    outputs = []
    layer.register_forward_hook(lambda *args: outputs.append(args[-1]))
    with torch.no_grad():
        torch.nn.init.normal_(layer.o.bias)
        for value in (1e4, -1e4):
            layer.sinks.fill_(value)
            model(IDS)
    torch.testing.assert_close(outputs[0], layer.o.bias.expand_as(outputs[0]))
    assert not torch.allclose(outputs[1], outputs[0])


def test_load_balancing_loss(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, {**GPT_OSS, "output_router_logits": True, "router_aux_loss_coef": 0.3})
    wanted, output = oracle(IDS, labels=IDS), lm.from_pretrained(tmp_path)(IDS, labels=IDS)
    assert relative_error(output.aux_loss, wanted.aux_loss) < 1e-5
    assert relative_error(output.loss, wanted.loss) < 1e-5


def test_compiled_with_packed_documents() -> None:
    """One graph for training, with the gradients of the sinks."""
    model = lm.from_config({**GPT_OSS, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    bounds = torch.tensor([0, 30, 31, 82], dtype=torch.int32)
    torch._dynamo.reset()
    results = []
    for step in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = step(IDS.view(1, -1), labels=IDS.view(1, -1), cu_seqlens=bounds).loss
        loss.backward()
        results.append((loss.detach(), *(block.mixer.sinks.grad for block in model.decoder.blocks)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-8)


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is above num_local_experts 5"),
        ({"num_experts": 6}, "num_local_experts = 5 contradicts num_experts = 6"),
        ({"experts_per_token": 3}, "experts_per_token = 3 contradicts num_experts_per_tok = 2"),
        ({"initial_context_length": 17}, "initial_context_length = 17 contradicts original_max_position_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"swiglu_limit": 0}, "'swiglu_limit' must be above 0"),
        ({"swiglu_limit": None}, "'swiglu_limit' is missing"),
        ({"swiglu_alpha": -1.0}, "'swiglu_alpha' must be above 0"),
        ({"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is missing"),
        ({"layer_types": ["chunked_attention"] * 3}, "'layer_types' must be a list of num_hidden_layers = 2"),
        ({"attention_bias": 1}, "'attention_bias' must be true or false"),
        ({"attention_dropout": -0.1}, "'attention_dropout' must be 0 or above"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**GPT_OSS, **fields}, device="meta")


def test_the_published_config() -> None:
    """Of gpt-oss-20b: every field is known, and the model has as many parameters."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = lm.from_config(published, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 20_914_757_184


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 1e4},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {}},
    ],
    ids=str,
)
def test_rope_that_a_config_leaves_out(fields: dict[str, Any], tmp_path: Path) -> None:
    """The settings, and the base with or without settings, are those of transformers; and are written."""
    config = {name: value for name, value in GPT_OSS.items() if name != "rope_parameters"} | fields
    model = lm.from_config(config)
    theirs = GptOssConfig(**config).rope_parameters
    (rope,) = {block.mixer.rope for block in model.config.blocks}
    assert rope.theta == theirs["rope_theta"]
    if isinstance(rope.scaling, YarnScaling):
        assert rope.scaling.factor == theirs["factor"] and rope.scaling.truncate == theirs.get("truncate", True)
        assert rope.scaling.original_context == theirs["original_max_position_embeddings"]
    else:
        assert theirs["rope_type"] == "default"
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert rope_parameters(written)["rope_theta"] == theirs["rope_theta"]
    assert lm.from_pretrained(tmp_path).config == model.config


def test_mxfp4_experts_stay_as_they_are_stored(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """With quantize="mxfp4" experts keep codes and scales; attention is not quantised, as in the checkpoint."""
    make_mxfp4(tmp_path / "model")
    plain = lm.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model = lm.from_pretrained(tmp_path / "model", dtype=torch.float32, quantize="mxfp4")
    assert not [w for w in recwarn if issubclass(w.category, CheckpointWarning)]
    for block, other in zip(model.decoder.blocks, plain.decoder.blocks, strict=True):
        assert block.mixer.qkv.compute is None and block.mlp.compute.kind == "mxfp4"
        for name in ("gate_up", "down"):
            assert torch.equal(block.mlp.compute.dense(name, torch.float32), getattr(other.mlp, name))
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)
    rounded = lm.quantize(plain, "mxfp4", exclude=["mixer"])  # rounding what is mxfp4 already changes nothing
    for block, other in zip(model.decoder.blocks, rounded.decoder.blocks, strict=True):
        for name in ("gate_up", "down"):
            own = (each.mlp.compute.dense(name, torch.float32) for each in (block, other))
            assert torch.equal(*own)
    lm.add_lora(model, 3, target_modules=["experts"])
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_mxfp4_experts_under_lora(tmp_path: Path) -> None:
    """Stored experts are rounded to int4 as they are read, as those of the loaded model are."""
    make_mxfp4(tmp_path / "model")
    with pytest.warns(CheckpointWarning, match=r"such as decoder.blocks.0.mlp.gate_up, are stored in MXFP4.*to int4"):
        model = lm.from_pretrained(tmp_path / "model", quantize="int4")
    wanted = lm.quantize(lm.from_pretrained(tmp_path / "model"), "int4")
    state = wanted.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    lm.add_lora(model, 3, target_modules=["experts"])
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
