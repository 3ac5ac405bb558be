"""Rotary positions of draft heads are their own: on models without positions in some layers, and with other pairs of
channels (Cohere 2)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from named_exports import export_named
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.errors import ConfigError, ConfigWarning
from ligermodels.speculative.draft_layer import layer_like
from ligermodels.speculative.verify import verify_heads

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]
MODELS: dict[str, Any] = {"eagle3": lm.Eagle3Model, "dflash": lm.DFlashModel, "dspark": lm.DSparkModel}
FORMATS = [
    ("eagle3", "speculators", {"num_steps": 3}),
    ("eagle3", "specforge", {"num_steps": 3}),
    ("eagle3", "deepspec", {"num_steps": 3, "layer": "qwen3", "boundaries": (1, 2, 3, 4, 5)}),
    ("dflash", "speculators", {"block_size": 4, "num_layers": 2}),
    ("dflash", "z-lab", {"block_size": 4, "num_layers": 2}),
    ("dspark", "speculators", {"block_size": 3, "num_layers": 2}),
    ("dspark", "deepspec", {"block_size": 3, "num_layers": 2}),
]


@pytest.mark.parametrize(
    ("name", "change", "theta"),
    [
        ("cohere2", {"rope_theta": 50000.0}, 50000.0),  # full attention has no positions
        ("cohere2_moe", {"rope_theta": 70000.0}, 70000.0),
        ("smollm3", {"rope_theta": 2e6, "no_rope_layers": [1, 1, 1, 0]}, 2e6),  # the last layer has no positions
        ("smollm3", {"rope_theta": 2e6, "no_rope_layers": [0] * 4}, 10000.0),  # no layer has
        ("gemma3_text", {"rope_theta": 3e6, "rope_local_base_freq": 2e4}, 3e6),  # that of full attention
        ("nemotron_h", {}, 10000.0),
    ],
)
def test_the_base_of_new_heads(name: str, change: dict[str, Any], theta: float) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key not in ("rope_parameters", "rope_scaling")}
    config = lm.from_config({**config, **change}, device="meta").config
    assert layer_like(config, "llama")["rope_theta"] == theta


@pytest.mark.parametrize(("kind", "profile", "options"), [FORMATS[i] for i in (1, 2, 4, 5)])
def test_heads_on_cohere_2(kind: str, profile: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Lossless; files name the base, and a head of such files computes the same, as plain formulas do, which turn the
    halves of a head."""
    oracle = make_checkpoint(tmp_path / "base", CONFIGS["cohere2"])
    base = lm.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = MODELS[kind].from_base(base, **options)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    texts = {"eos_token_id": None, "pad_token_id": 0}
    alone = oracle.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, do_sample=False, **texts)
    wanted = base.generate(PROMPTS, 12, do_sample=False, **texts)
    assert wanted[0, -12:].tolist() == alone[0, -12:].tolist()
    drafted = model.generate(PROMPTS, 12, return_stats=True, **texts)
    assert torch.equal(drafted.sequences, wanted)
    ids = torch.randint(3, 131, (2, 30), generator=torch.Generator().manual_seed(2))
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    export_named(model, tmp_path / "head", profile, str(tmp_path / "base"))
    stored = json.loads((tmp_path / "head" / "config.json").read_text())
    assert stored.get("transformer_layer_config", stored)["rope_theta"] == CONFIGS["cohere2"]["rope_theta"] == 50000
    again = MODELS[kind].from_pretrained(base, tmp_path / "head")
    found = again.generate(PROMPTS, 12, return_stats=True, **texts)
    assert torch.equal(found.sequences, wanted) and found.steps == drafted.steps
    report = verify_heads(tmp_path / "head", tmp_path / "base")
    assert report.passed, [check for check in report.checks if not check.passed]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_interleave", True),
        ("rope_interleaved", True),
        ("is_neox_style", False),
        ("rope_is_neox_style", False),
        ("position_embedding_type", "rope_gptj"),
        ("partial_rotary_factor", 0.5),
        ("rotary_dim", 4),
        ("logit_scale", 0.5),
    ],
)
@pytest.mark.parametrize(("kind", "profile", "options"), [FORMATS[i] for i in (0, 1, 4, 5, 6)])
def test_other_computations_are_refused(
    kind: str, profile: str, options: dict[str, Any], field: str, value: Any, tmp_path: Path
) -> None:
    """The layers of such heads cannot have them: servers would rotate whole halves, or scale the logits."""
    base = lm.from_config(CONFIGS["cohere2"])
    export_named(MODELS[kind].from_base(base, **options), tmp_path, profile, "base")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.get("transformer_layer_config", config)[field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=field):
        MODELS[kind].from_pretrained(base, tmp_path)
    neutral = {"partial_rotary_factor": 1.0, "position_embedding_type": "rope", "logit_scale": 1.0}.get(
        field, not value
    )
    config.get("transformer_layer_config", config)[field] = neutral
    path.write_text(json.dumps(config))
    MODELS[kind].from_pretrained(base, tmp_path)


@pytest.mark.parametrize(("kind", "profile", "options"), FORMATS)
def test_fields_that_are_not_read_are_a_warning(
    kind: str, profile: str, options: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A misspelt field, and a computation that such heads do not have, were dropped without a word from files in which
    the fields of the layers stand beside the fields of the head, and beside the layers in speculators' form."""
    base = lm.from_config(CONFIGS["cohere2"])
    export_named(MODELS[kind].from_base(base, **options), tmp_path, profile, "base")
    MODELS[kind].from_pretrained(base, tmp_path)
    assert not [warning for warning in recwarn if "not used" in str(warning.message)]
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    further = {"draft_vocab_siz": 131, "qk_norm": True, "residual_multiplier": 1.0, "use_cache": True, "bias": False}
    path.write_text(json.dumps({**config, **further, "attention_dropout": 0.0, "_note": "a"}))
    head = r"^config\.json of the head: field"
    with (
        pytest.warns(ConfigWarning, match=rf"{head} draft_vocab_siz = 131 is not used; did you mean 'draft_v"),
        pytest.warns(ConfigWarning, match=rf"{head} qk_norm = True is not used$"),
    ):
        MODELS[kind].from_pretrained(base, tmp_path)
    if kind == "eagle3":
        path.write_text(json.dumps({**config, "eagle_config": {**config.get("eagle_config", {}), "norms": 3}}))
        with pytest.warns(ConfigWarning, match=rf"{head} eagle_config\.norms = 3 is not used"):
            MODELS[kind].from_pretrained(base, tmp_path)


PUBLISHED: dict[str, dict[str, Any]] = {
    "any": {"target_model_type": "qwen3_vl", "modal_type": "VLM", "image_token_id": 3, "vision_start_token_id": 4},
    "eagle3": {
        "eagle_config": {
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
        },
    },
    "dflash": {"loss_decay_gamma": 7.0, "attention_backend": "flex_attention"},
}  # fmt: skip
"""Further fields of heads by SpecForge and AngelSlim, by NVIDIA's ModelOpt, and by trainers of DFlash."""


GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": CONFIGS["cohere2"]["vocab_size"], "hidden_size": 60,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 2, "head_dim": 4, "global_head_dim": 6, "layer_types": ["full_attention"],
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "profile", "options"),
    [*(FORMATS[i] for i in (1, 4, 6)), ("dspark", "deepspec", {"block_size": 3, "layers": GEMMA4})],
)
def test_usual_fields_of_published_heads_are_no_warning(
    kind: str, profile: str, options: dict[str, Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """A warning says that a field may change the head; these do not, with these values."""
    base = lm.from_config(CONFIGS["cohere2"])
    export_named(MODELS[kind].from_base(base, **options), tmp_path, profile, "base")
    path = tmp_path / "config.json"
    config, further = json.loads(path.read_text()), {**PUBLISHED["any"], **PUBLISHED.get(kind, {})}
    assert options.get("layers", {}).items() <= config.items()
    path.write_text(json.dumps({**config, **further}))
    MODELS[kind].from_pretrained(base, tmp_path)
    assert not [warning for warning in recwarn if "not used" in str(warning.message)]
    if kind == "eagle3":
        nested = {**further["eagle_config"], "parallel_draft_step": 2}
        path.write_text(json.dumps({**config, "eagle_config": nested}))
        with pytest.warns(ConfigWarning, match=r"eagle_config\.parallel_draft_step = 2 is not used"):
            MODELS[kind].from_pretrained(base, tmp_path)
