"""Fields that transformers reads under further names, or with defaults of its modules rather than of its configs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from zoo import CONFIGS, make_checkpoint, plain, relative_error

import ligermodels as lm
from ligermodels.archs.nemotron import OTHER_FIELDS
from ligermodels.errors import ConfigError, ConfigWarning

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
LONG_YARN = {**YARN, "original_max_position_embeddings": 4096}
NO_BASE = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
MAMBA = {"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_min": 0.3, "mamba_chunk_size": 8}
MAMBA |= {"mamba_expand": 3, "mamba_dt_max": 0.5, "mamba_dt_init_floor": 1e-3}


@pytest.mark.parametrize(
    ("name", "without", "fields"),
    [
        ("mimo_v2_flash", [], {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}}),
        ("mimo_v2_flash", [], {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
        ("nemotron_h", [*OTHER_FIELDS, "chunk_size", "expand"], MAMBA),
        # Null is false, also where the default is true.
        ("bamba", [], {"mamba_conv_bias": None}),
        ("falcon_h1", [], {"mamba_conv_bias": None}),
        ("kimi_linear", ["norm_topk_prob"], {"moe_renormalize": None}),
        ("bailing_hybrid", ["norm_topk_prob"], {"moe_renormalize": None}),
        # Not where transformers does not read the field.
        ("bailing_hybrid", [], {"rope_interleave": None}),
        ("deepseek_v2", [], {"rope_interleave": None}),
        ("qwen3", ["rope_theta"], {"rope_parameters": {**LONG_YARN, "truncate": None}}),
        ("lfm3", [], {"rope_parameters": {"full_attention": NO_BASE, "sliding_attention": NO_BASE}}),
        ("hy_v3", ["first_k_dense_replace"], {"mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2}),
        ("hy_v3", ["first_k_dense_replace"], {"num_hidden_layers": 2}),
        ("hy_v3", [], {"num_hidden_layers": 2, "mlp_layer_types": ["dense"] * 2, "first_k_dense_replace": 3}),
    ],
)
@torch.no_grad()
def test_as_in_transformers(name: str, without: list[str], fields: dict[str, Any], tmp_path: Path) -> None:
    """And so is what transformers reads of the export."""
    config = {key: value for key, value in {**CONFIGS[name], **fields}.items() if key not in without}
    oracle = make_checkpoint(tmp_path / "model", config)
    model = lm.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, 131, (2, 41), generator=torch.Generator().manual_seed(0))
    wanted = oracle(ids).logits
    assert relative_error(model(ids).logits, wanted) < 2e-5
    model.save_pretrained(tmp_path / "out")
    again = plain(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))
    assert relative_error(again(ids).logits, wanted) < 2e-5


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("phi3", {"rope_scaling": YARN}, "rope_type = 'yarn' does not mean the same to all readers of phi3"),
        ("nemotron_h", {"mamba_n_groups": 7}, "n_groups = 3 contradicts mamba_n_groups = 7"),
        ("nemotron_h", {"mamba_n_groups": 7, "n_groups": None}, "mamba_n_groups 7 does not divide mamba_num_heads 12"),
        ("nemotron_h", {"time_step_limit": [0.1, float("inf")]}, "time_step_limit is not implemented; the lower bound"),
        ("nemotron_h", {"mamba_dt_limit": [0.0, 0.1]}, "mamba_dt_limit is not implemented; the lower bound"),
        ("nemotron_h", {"mamba_dt_limit": 0.1}, "field 'mamba_dt_limit' must be two numbers"),
        ("nemotron_h", {"mamba_d_conv": 0}, "field 'mamba_d_conv' must be a whole number above 0"),
        (
            "laguna",
            {"moe_router_score_func": "sqrtsoftplus"},
            "moe_router_score_func = 'sqrtsoftplus' is not implemented",
        ),
        ("laguna", {"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled = True is not implemented"),
        ("laguna", {"swa_rope_parameters": PLAIN}, "swa_rope_parameters = "),
        ("laguna", {"mlp_only_layers": [0, 1]}, "mlp_only_layers contradicts mlp_layer_types, or its default"),
        ("cohere2_moe", {"logit_scale": -0.7}, "field 'logit_scale' must be above 0"),
        ("falcon_h1", {"lm_head_multiplier": -0.7}, "field 'lm_head_multiplier' must be above 0"),
        ("muse_glimmer_text", {"output_multiplier": 0}, "field 'output_multiplier' must be above 0"),
        ("hy_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2 contradicts mlp_layer_types"),
        ("hy_v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be a whole number from 0 on, got -1"),
        (
            "hy_v3",
            {"mlp_layer_types": ["sparse", "dense"], "num_hidden_layers": 2},
            "first_k_dense_replace = 1 contradicts mlp_layer_types",
        ),
        # transformers 5 reads no base beside default settings; transformers 4 did.
        ("apertus", {"rope_parameters": None, "rope_theta": 700.0}, "rope_theta = 700.0 does not mean the same to all"),
        ("exaone_moe", {"sliding_windows": [7, 9]}, "sliding_windows = [7, 9] is not implemented"),
        ("exaone_moe", {"swiglu_limits": [0.0, 7.0]}, "swiglu_limits = [0.0, 7.0] is not implemented"),
    ],
)
def test_fields_that_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lm.from_config({**CONFIGS[name], **fields}, device="meta")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "laguna",
            {"moe_router_score_func": "sigmoid", "swa_attention_sink_enabled": False, "swa_rope_parameters": None},
        ),
        ("gemma3_text", {"rope_scaling": {**CONFIGS["gemma3_text"]["rope_scaling"], "type": "linear"}}),
        ("laguna", {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
        ("nemotron_h", {"mamba_dt_limit": [0.0, "Infinity"]}),
        ("exaone_moe", {"sliding_windows": None, "swiglu_limits": [0, None]}),
    ],
)
def test_fields_that_change_nothing(name: str, fields: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    configs = [lm.from_config({**CONFIGS[name], **more}, device="meta").config for more in ({}, fields)]
    assert configs[0] == configs[1] and not [each for each in recwarn if each.category is ConfigWarning]
