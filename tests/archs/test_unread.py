"""Fields of a config.json that a family does not read: harmless ones pass, others are errors or warnings."""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from typer.testing import CliRunner
from zoo import CONFIGS, NEEDED

import ligermodels as lm
from ligermodels.archs import FAMILIES, fields
from ligermodels.archs.unread import COMPUTATION, DROPOUT, HARMLESS
from ligermodels.cli import app
from ligermodels.convert.config_json import for_export
from ligermodels.errors import ConfigError, ConfigWarning, InputError
from ligermodels.models.families import warn_of_other_family

LLAMA = CONFIGS["llama-3"]
LINEAR = {"rope_type": "linear", "factor": 2.0}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}

V4: dict[str, Any] = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "torchscript": False,
    "use_bfloat16": False, "tf_legacy_loss": False, "pruned_heads": {}, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None, "add_cross_attention": False,
    "tie_encoder_decoder": False, "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False,
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1, "output_scores": False,
    "return_dict_in_generate": False, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "remove_invalid_values": False, "exponential_decay_length_penalty": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "finetuning_task": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "tokenizer_class": None, "prefix": None, "bos_token_id": 1,
    "sep_token_id": None, "decoder_start_token_id": None, "task_specific_params": None, "problem_type": None,
    "_name_or_path": "", "_attn_implementation_autoset": True, "transformers_version": "4.57.6",
}  # fmt: skip
"""What transformers 4 has in `to_dict()` of every config."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "phi3": {  # Phi-4-mini
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "embd_pdrop": 0.0,
    },
    "llama": {  # SmolLM2, Falcon 3, unsloth
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "activation": "swiglu",
        "pretraining_tp": 2,
        "unsloth_fixed": True,
        "unsloth_version": "2025.1",
        "layer_types": ["full_attention"] * 3,
    },
    "qwen2": {"use_mrope": False, "max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": False},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": 4096},
    "gemma3_text": {"_sliding_window_pattern": 6, "use_cache": True},
    "smollm3": {"pretraining_tp": 2, "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "olmo2": {"clip_qkv": None},
    "mistral": {"use_sliding_window": False, "max_window_layers": 28},
}


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A warning where none is expected is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        yield


def compose(config: dict[str, Any]) -> Any:
    return FAMILIES[config["model_type"]].decoder_config(copy.deepcopy(config))


def default_config(model_type: str) -> PreTrainedConfig:
    """Without dropout, which is no default but of one family: its warning is tested below."""
    config = AutoConfig.for_model(model_type, **copy.deepcopy(NEEDED.get(model_type, {})))
    return AutoConfig.for_model(model_type, **NO_DROPOUT) if hasattr(config, "residual_dropout") else config


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_configs_that_transformers_writes_pass(model_type: str) -> None:
    config = default_config(model_type)
    compose({**config.to_dict(), "dtype": "bfloat16"})
    compose(json.loads(config.to_json_string(use_diff=True)) | {"model_type": model_type})
    both = (
        for_export(config.to_dict(), lm.from_config(LLAMA, device="meta").dtype)
        if FAMILIES[model_type].text is None
        else {}
    )
    compose({**V4, **config.to_dict(), **both})


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_published_checkpoints_pass(name: str) -> None:
    config = CONFIGS[name]
    compose({**V4, **config, **PUBLISHED.get(config["model_type"], {})})


def test_every_field_that_some_families_read_is_known_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, set[str]] = {}
    check = fields.Fields.check_unread

    def record(self: fields.Fields) -> None:
        if self.where == "config.json" and "model_type" in self.config:
            read.setdefault(self.config["model_type"], set()).update(self._read)
        check(self)

    monkeypatch.setattr(fields.Fields, "check_unread", record)
    for model_type in FAMILIES:
        compose(default_config(model_type).to_dict())
    assert read.keys() == FAMILIES.keys()
    read = {model_type: names for model_type, names in read.items() if FAMILIES[model_type].text is None}
    for_some = set.union(*read.values()) - set.intersection(*read.values())
    assert for_some <= {*COMPUTATION, *HARMLESS, *DROPOUT}, for_some


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qk_norm", True),
        ("use_qk_norm", True),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("layer_types", "full_attention"),
        ("num_experts", 8),
        ("alibi", True),
        ("parallel_attn", True),
        ("clip_qkv", 8.0),
        ("use_mrope", True),
        ("rope_interleaved", True),
        ("embedding_multiplier", 12.0),
        ("logits_scaling", 0),
        ("use_rope", False),
        ("is_causal", False),
        ("is_causal", None),
        ("attn_logit_softcapping", 50.0),
        ("hidden_activation", "gelu"),
        ("activation", "relu"),
        ("is_encoder_decoder", True),
        ("vision_config", {"hidden_size": 3}),
    ],
)
def test_fields_that_change_the_computation_are_errors(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, name: value}))
    with pytest.raises(ConfigError, match=rf"config\.json: {name} = .* is not implemented for model_type 'llama'"):
        lm.from_config(tmp_path)


@pytest.mark.parametrize("value", [0.001, -3, True, 2.5, float("nan")])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama-3", "num_nextn_predict_layers"),  # read by no part of the model
        ("qwen3_5_text", "mtp_num_hidden_layers"),
        ("nemotron_h", "num_nextn_predict_layers"),  # read, and without effect
        ("bamba", "mamba_chunk_size"),
        ("deepseek_v2-greedy", "n_group"),
        ("deepseek_v3", "moe_layer_freq"),
        ("ernie4_5_moe", "moe_layer_end_index"),
        ("granitemoehybrid-dense-and-rope", "num_experts_per_tok"),
        ("phi3", "original_max_position_embeddings"),
    ],
)
def test_numbers_that_count_nothing_are_errors(family: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{name}.*, got|{name} = .* is not implemented"):
        lm.from_config({**CONFIGS[family], name: value}, device="meta")


@pytest.mark.parametrize("value", [0, 1, 1.0, None, False])
def test_counts_of_parts_outside_the_model(value: Any) -> None:
    assert compose({**LLAMA, "num_nextn_predict_layers": value}) == compose(LLAMA)


@pytest.mark.parametrize(("name", "other"), [("num_heads", "num_attention_heads"), ("block_dim", "hidden_size")])
def test_a_size_of_lfm2_that_two_fields_give(name: str, other: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = 7 must equal {other} = {CONFIGS['lfm2'][other]}"):
        lm.from_config({**CONFIGS["lfm2"], name: 7}, device="meta")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_topk_prob", False),
        ("group_limited_greedy", True),
        ("routed_scaling_factor", 2.0),
        ("use_mixed_mlp_moe", False),
        ("moe_layer_num_skipped", 1),
        ("use_rotary_pos_emb", False),
        ("position_embedding_xdrope", True),
        ("use_mla", True),
        ("use_cla", True),
    ],
)
def test_fields_of_hunyuan_that_transformers_does_not_read(name: str, value: Any) -> None:
    config = CONFIGS["hunyuan_v1_moe"]
    compose({**config, "routed_scaling_factor": False, "n_group": False, "kv_lora_rank": 512, "use_mla": False})
    with pytest.raises(ConfigError, match=rf"{name} = {value} is not implemented; implemented: "):
        compose({**config, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embedding_multiplier", 1.0),
        ("qk_norm", False),
        ("num_local_experts", 0),
        ("is_causal", True),
        ("hidden_activation", "silu"),
        ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default", "mrope_section": None}),
        ("never_heard_of", None),
        ("never_heard_of_lists", []),
        ("_never_heard_of", 3),
    ],
)
def test_values_that_change_nothing_pass(name: str, value: Any) -> None:
    assert compose({**LLAMA, name: value}) == compose(LLAMA)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("hidden_sizes", 64, "; did you mean 'hidden_size'?"),
        ("num_key_value_head", 64, "; did you mean 'num_key_value_heads'?"),
        ("xyzzy_42", {"a": [1]}, ""),
    ],
)
def test_unknown_fields_are_warnings(name: str, value: Any, hint: str) -> None:
    with pytest.warns(ConfigWarning) as caught:
        model = lm.from_config({**LLAMA, name: value}, device="meta")
    (warning,) = caught
    wanted = f"config.json: field {name!r} = {value!r} is unknown for model_type 'llama' and not used{hint}"
    assert str(warning.message) == wanted
    assert model.config == compose(LLAMA)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_architectures_of_another_family_are_a_warning(model_type: str) -> None:
    """And those that transformers has for the family are not."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_MAPPING_NAMES):
        named = mapping.get(model_type, [])
        for name in [named] if isinstance(named, str) else named:
            warn_of_other_family({"model_type": model_type, "architectures": [name]})
    other = "GemmaForCausalLM" if model_type != "gemma" else "LlamaForCausalLM"
    with pytest.warns(ConfigWarning, match=rf"architectures names '{other}', but model_type is '{model_type}'"):
        warn_of_other_family({"model_type": model_type, "architectures": [other]})


def test_a_warning_comes_once(tmp_path: Path) -> None:
    """When the config is read; not for its weights, for text, nor when it goes out again."""
    fields = {**LLAMA, "colour": "red", "architectures": ["GemmaForCausalLM"]}
    names = ["'colour' = 'red'", "architectures names 'GemmaForCausalLM'"]

    def shown(action: Callable[[], Any]) -> list[bool]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        messages = [str(each.message) for each in caught if each.category is ConfigWarning]
        assert len(messages) in (0, len(names))
        return [any(name in message for message in messages) for name in names]

    model = lm.from_config(LLAMA)
    assert shown(lambda: lm.from_config(fields, device="meta")) == [True, True]
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    loaded = []
    assert shown(lambda: loaded.append(lm.from_pretrained(tmp_path / "model"))) == [True, True]
    assert shown(lambda: loaded[0].generate([[1, 2]], 2)) == [False, False]
    assert shown(lambda: loaded[0].save_pretrained(tmp_path / "out")) == [False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = CliRunner().invoke(app, ["verify", str(tmp_path / "model")])
    assert [result.stderr.count(name) for name in names] == [1, 1]


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_settings_of_rope(field: str) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.warns(ConfigWarning, match=r"rope_parameters: field 'factors' = 2 is unknown and not used; did"):
        assert compose({**LLAMA, field: {**scaling, "factors": 2}}) == compose({**LLAMA, field: scaling})
    with pytest.raises(ConfigError, match=r"rope_parameters: mrope_section = \[2, 3\] is not implemented"):
        compose({**LLAMA, field: {**scaling, "mrope_section": [2, 3]}})


def test_fields_beside_a_text_model() -> None:
    config = AutoConfig.for_model("gemma3").to_dict()
    for unknown in ({"colour": "red"}, {"text_config": {**config["text_config"], "colour": "red"}}):
        with pytest.warns(ConfigWarning, match=r"'colour' = 'red' is unknown for model_type 'gemma3"):
            compose({**config, **unknown})
    with pytest.raises(ConfigError, match="qk_norm = True"):
        compose({**config, "qk_norm": True})


@pytest.mark.parametrize("name", NO_DROPOUT)
def test_the_dropout_of_published_seed_oss_is_a_warning(name: str) -> None:
    """They all say 0.1; training is without. Training with any other is an error, as everywhere."""
    config = {**CONFIGS["seed_oss"], **NO_DROPOUT}
    with pytest.warns(ConfigWarning, match=f"{name} = 0.1 is not implemented: training is without dropout"):
        assert compose({**config, name: 0.1}) == compose(config)
    assert compose({**config, name: 0.2}).dropout == (f"{name} = 0.2",)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LLAMA, {"attention_dropout": 0.1}),
        (LLAMA, {"hidden_dropout": 0.1, "attention_dropout": 0}),
        (CONFIGS["phi3"], {"resid_pdrop": 0.2, "embd_pdrop": 0.1}),
    ],
)
def test_dropout_is_loaded_and_training_with_it_is_an_error(config: dict[str, Any], fields: dict[str, Any]) -> None:
    """In evaluation it changes nothing."""
    model = lm.from_config({**config, **fields})
    assert not any(module.training for module in model.modules())
    ids = torch.arange(3, 9)[None]
    loss = model(ids, labels=ids).loss
    loss.backward()
    asked = ", ".join(f"{name} = {value}" for name, value in fields.items() if value)
    message = f"{asked}, and dropout is not implemented; to train without it, set it to 0"
    joint = lm.JointMedusa(lm.MedusaModel.from_base(lm.from_config({**config, **fields}), num_heads=2).eval())
    for refusing in (model, joint.medusa, joint.eval()):
        with pytest.raises(InputError, match=re.escape(message)):
            refusing.train()
        assert not any(module.training for module in refusing.modules())
    plain = lm.from_config({**config, **dict.fromkeys(fields, 0.0)}).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(ids, labels=ids).loss, loss)
    assert torch.equal(plain.generate(ids, 4), model.generate(ids, 4))
    heads = lm.MedusaModel.from_base(model, num_heads=2).train()  # freezes the model
    assert heads(ids, labels=ids).loss.isfinite()
    with pytest.raises(ConfigError, match="must be 0 or above"):
        lm.from_config({**config, **dict.fromkeys(fields, -0.1)})


@pytest.mark.parametrize(
    ("name", "fields", "refused"),
    [
        ("olmo3", {"rope_theta": 1e4}, "rope_theta"),
        ("olmo3-rope-by-type", {"rope_theta": 1e4}, None),
        ("olmo3", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ("mellum", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("mellum", {"rope_parameters": None, "rope_theta": 1e4}, "rope_theta"),
        ("mellum", {"rope_theta": 1e4}, None),
        ("gemma3_text", {"rope_theta": 1e4}, None),
        ("cohere2_moe", {"rope_scaling": LINEAR}, "rope_scaling"),
        ("cohere2_moe", {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 5e4}}, None),
        ("cohere2_moe", {"rope_scaling": {"rope_type": "default"}}, None),
        ("cohere2", {"rope_scaling": LINEAR}, None),
    ],
)
def test_fields_of_rope_on_which_readers_differ(name: str, fields: dict[str, Any], refused: str | None) -> None:
    """They are errors where they would make a difference."""
    if refused is None:
        compose({**CONFIGS[name], **fields})
        return
    with pytest.raises(ConfigError, match=f"{refused} = .* does not mean the same to all readers.*rope_parameters"):
        compose({**CONFIGS[name], **fields})


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "kimi_linear", "llama-3"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], "", 0, {"rope_type": None}])
def test_rotary_settings_that_cannot_be_saved_are_refused(name: str, field: str, value: Any) -> None:
    """Also of models without positions, which do not read them."""
    with pytest.raises(ConfigError, match=r"rope_(scaling|parameters)"):
        lm.from_config({**CONFIGS[name], field: value}, device="meta")
