"""Arguments of draft heads, in Python and in their files: each has its effect, or is an error that names it."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from named_exports import export_named
from safetensors.torch import load_file, save_file
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generation import sample_with_log_probs
from ligermodels.speculative import block_formats, eagle3_formats
from ligermodels.speculative.draft_layer import layer_like
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.speculative.load import load_multi_head
from ligermodels.speculative.verify import verify_heads
from ligermodels.training import MedusaRecipe
from ligermodels.training.medusa import _heads_on as heads_on

IDS = torch.tensor([[5, 9, 17, 3], [11, 40, 7, 66]])
LLAMA = {**CONFIGS["llama-3"], "initializer_range": 0.3}
SMALL: dict[str, Any] = {"block_size": 3, "num_layers": 1}


@pytest.fixture(scope="module")
def base() -> lm.CausalLM:
    return lm.from_config(LLAMA)


# -- dtype -------------------------------------------------------------------------------------------------------------

HEADS: dict[str, Callable[[lm.CausalLM], Any]] = {
    "medusa": lambda base: lm.MedusaModel.from_base(base, 2),
    "medusa, shared lm_head": lambda base: lm.MedusaModel.from_base(base, 2, lm_head="shared"),
    "mtp": lambda base: lm.MTPModel.from_base(base, 2),
    "eagle": lambda base: lm.Eagle3Model.from_base(base, 2),
    "dflash": lambda base: lm.DFlashModel.from_base(base, **SMALL),
    "dspark": lambda base: lm.DSparkModel.from_base(base, **SMALL, markov_rank=4),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_in_float32_on_a_model_in_bfloat16(kind: str) -> None:
    """As they are for training: gradients in float32, and decoding as without heads."""
    base = lm.from_config(LLAMA, dtype=torch.bfloat16)
    heads = HEADS[kind](base)
    for parameter in heads.head_parameters():
        parameter.data = parameter.data.float()
    heads(IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad for parameter in heads.head_parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
    options: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(heads.generate(IDS, **options), base.generate(IDS, **options))
    sampled = heads.generate(IDS, do_sample=True, top_k=9, generator=torch.Generator().manual_seed(1), **options)
    assert sampled.shape == (2, 10)


@pytest.mark.parametrize("kind", [*HEADS, "dflash, causal"])
def test_heads_decode_under_autocast(base: lm.CausalLM, kind: str) -> None:
    heads = HEADS[kind](base) if kind in HEADS else lm.DFlashModel.from_base(base, **SMALL, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for options in ({}, {"do_sample": True}):
            assert heads.generate(IDS, 6, pad_token_id=0, **options).shape == (2, 10)


# -- torch's default device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*HEADS, "eagle, draft tokens"])
def test_heads_under_another_default_device(kind: str, tmp_path: Path) -> None:
    """Heads are where their model is; what the host computes with stays on the CPU. "meta" tensors have no values."""
    config = LLAMA | {"architectures": ["LlamaForCausalLM"]}
    base, counts = lm.from_config(config), torch.arange(LLAMA["vocab_size"])
    make = HEADS.get(kind) or (
        lambda base: lm.Eagle3Model.from_base(base, 2, vocabulary=DraftVocabulary.of_counts(counts, 9))
    )
    options: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0}
    lists = [[5, 9], [7]]
    wanted = [base.generate(prompts, **options) for prompts in (IDS, lists)]
    with torch.device("meta"):
        heads = make(base)
        (heads.save_head if kind == "mtp" else heads.save_pretrained)(tmp_path)
        assert verify_heads(tmp_path, config).passed
        heads = load_multi_head(base, tmp_path)
        for prompts, expected in zip((IDS, lists), wanted, strict=True):
            assert torch.equal(heads.generate(prompts, **options), expected)
        assert torch.equal(base.generate(lists, **options), wanted[1])
        for rule in ({"do_sample": True, "top_k": 9}, {"temperature": 0.7}):
            assert heads.generate(IDS, **options, **rule).device.type == "cpu"
        assert heads(IDS, labels=IDS).loss.isfinite()


# -- options of decoding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("return_stats", True), ("on_tokens", print), ("epsilon", 0.2), ("delta", 0.1)]
)
def test_options_of_heads_given_to_the_model_say_where_they_go(base: lm.CausalLM, name: str, value: Any) -> None:
    heads = lm.MedusaModel.from_base(base, 2)
    with pytest.raises(InputError, match=rf"^{name}: is an option of the generate of draft heads; call heads.generate"):
        base.generate(IDS, 2, draft=heads, **{name: value})
    with pytest.raises(InputError, match=r"^draft: the generate of draft heads decodes with these heads; leave it out"):
        heads.generate(IDS, 2, draft=heads)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"do_sample": True, "temperature": 0.7}])
@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_options_of_typical_acceptance_have_no_other_use(base: lm.CausalLM, name: str, options: dict[str, Any]) -> None:
    heads = lm.MedusaModel.from_base(base, 2)
    with pytest.raises(InputError, match=f"^{name}: is for typical acceptance; give a temperature above 0 without"):
        heads.generate(IDS, 2, **options, **{name: 0.2})
    assert heads.generate(IDS, 2, temperature=0.7, **{name: 0.2}).shape == (2, 6)


def test_a_repetition_penalty_of_none_is_not_given(base: lm.CausalLM) -> None:
    heads = lm.MedusaModel.from_base(base, 2)
    assert torch.equal(heads.generate(IDS, 2, repetition_penalty=None), heads.generate(IDS, 2))
    with pytest.raises(InputError, match=r"^repetition_penalty must be a number above 0, got 'a'"):
        heads.generate(IDS, 2, repetition_penalty="a")


OPTIONS: dict[str, dict[str, Any]] = {
    "samples": {"num_return_sequences": None}, "max_length": {"max_length": None}, "do_sample": {"do_sample": None},
    "sampling": {"do_sample": True}, "processors": {"logits_processor": []},
    "criteria": {"stopping_criteria": []}, "strings": {"stop_strings": []}, "routing": {"return_routing": False},
    "batches": {"batch_invariant": False}, "graphs": {"cuda_graph": None},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_without_a_value_are_not_given(base: lm.CausalLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the model alone: None is the checkpoint's value, and an empty list or False changes nothing."""
    stored = {"max_length": 7, "temperature": 1e-4, "pad_token_id": 0}
    monkeypatch.setattr(base, "export_spec", replace(base.require_export_spec(), generation_config=stored))
    heads, options = lm.MedusaModel.from_base(base, 2), OPTIONS[name]
    wanted = base.generate(IDS, 3)  # what a temperature of nearly 0 samples too
    for generate in (base.generate, heads.generate, partial(base.generate, draft=heads)):
        assert torch.equal(generate(IDS, **options), wanted)


@torch.no_grad()
def test_none_turns_the_checkpoints_temperature_and_penalty_off(
    base: lm.CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"max_length": 30, "do_sample": True, "temperature": 1e-4, "repetition_penalty": 2.0, "pad_token_id": 0}
    monkeypatch.setattr(base, "export_spec", replace(base.require_export_spec(), generation_config=stored))
    heads = lm.MedusaModel.from_base(base, 2)
    given: dict[str, Any] = {"do_sample": True, "temperature": None, "repetition_penalty": None}
    for generate in (base.generate, heads.generate, partial(base.generate, draft=heads)):
        samples = {tuple(generate(IDS[:1], **given)[0].tolist()) for _ in range(3)}
        assert len(samples) == 3
    assert sample_with_log_probs(base, IDS, 2, temperature=None, repetition_penalty=None)[1].shape == (2, 2)


# -- stage 2 -----------------------------------------------------------------------------------------------------------


def test_arguments_of_joint_training_have_an_effect() -> None:
    medusa = lm.MedusaModel.from_base(lm.from_config(LLAMA), 2)
    with pytest.raises(InputError, match=r"^reference: is the base model itself, so the KL to it is always 0; give"):
        JointMedusa(medusa, medusa.base)
    with pytest.raises(InputError, match=r"^reference: has 50 tokens, and the base model 131$"):
        JointMedusa(medusa, lm.from_config({**LLAMA, "vocab_size": 50}))
    with pytest.raises(InputError, match=r"^place: must be 'device' or 'cpu_offload', got 'cpu'"):
        frozen_copy(medusa.base, "cpu")  # type: ignore[arg-type]
    joint = JointMedusa(medusa, frozen_copy(medusa.base))
    with pytest.raises(InputError, match=r"^labels: the joint loss needs them"):
        joint(IDS, labels=None)
    for value in (-1, "a", None, float("nan")):
        with pytest.raises(InputError, match=r"^heads_loss_weight: must be a number of at least 0, got "):
            joint(IDS, labels=IDS, heads_loss_weight=value)
    weighted = (joint(IDS, labels=IDS, heads_loss_weight=weight).loss for weight in (0.5, torch.tensor(0.5)))
    assert torch.equal(*weighted)


# -- the caller's objects ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_head_keeps_its_own_config_of_layers(base: lm.CausalLM, kind: str, tmp_path: Path) -> None:
    layers = layer_like(base.config, "qwen3") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    if kind == "eagle":
        heads: Any = lm.Eagle3Model.from_base(base, layer=layers)
    else:
        heads = lm.DFlashModel.from_base(base, 3, layers=layers)
    layers["rope_parameters"]["rope_theta"], layers["num_attention_heads"] = 7.0, 1
    heads.save_pretrained(tmp_path)
    again = type(heads).from_pretrained(base, tmp_path)
    assert again.config.decoder == heads.config.decoder and torch.equal(again(IDS).logits, heads(IDS).logits)


def test_a_base_model_stays_trainable_where_heads_do_not_load(tmp_path: Path) -> None:
    base = lm.from_config(LLAMA)
    lm.MedusaModel(base, 2).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"^own_lm_heads: must be True or False, got 'no'"):
        lm.MedusaModel.from_pretrained(base, tmp_path, own_lm_heads="no")  # type: ignore[arg-type]
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"blocks.1.layers.0.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(CheckpointError, match="wrong shape"):
        lm.MedusaModel.from_pretrained(base, tmp_path)
    assert all(parameter.requires_grad for parameter in base.parameters())


def test_new_heads_are_cast_one_by_one() -> None:
    """In float32 all of them would take twice the memory of the heads in bfloat16."""
    made: list[Any] = []

    class Watched(lm.MedusaModel):
        def _new_head(self, lm_head_state: Any) -> Any:
            assert {x.dtype for head in made for x in head.parameters()} <= {torch.bfloat16}
            made.append(super()._new_head(lm_head_state))
            return made[-1]

    assert Watched(lm.from_config(LLAMA, dtype=torch.bfloat16), 3).num_heads == len(made)


# -- the network -------------------------------------------------------------------------------------------------------


def test_a_layer_that_no_step_reaches_is_an_error(base: lm.CausalLM) -> None:
    with pytest.raises(InputError, match=r"^num_steps: 2 steps do not reach all of 3 layers"):
        lm.MTPModel.from_base(base, 2, num_layers=3)


def test_layers_that_name_no_number_are_as_many_as_the_head_has(base: lm.CausalLM) -> None:
    layers = layer_like(base.config, "qwen3")
    del layers["num_hidden_layers"]  # 32 of Qwen3 by default
    deep = lm.from_config({**LLAMA, "num_hidden_layers": 40})
    heads = lm.DFlashModel.from_base(deep, 3, layers=layers)
    assert len(heads.head.layers) == len(heads.config.boundaries) == 32
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        lm.DFlashModel.from_base(base, 3, layers={**layers, "num_hidden_layers": "2x"})


def test_a_mask_of_another_shape_counts_no_targets(base: lm.CausalLM) -> None:
    for kind in ("dflash", "medusa"):
        with pytest.raises(InputError, match=r"^attention_mask: must have the inputs' shape \(2, 4\), got \(1, 4\)"):
            HEADS[kind](base).num_targets(IDS, attention_mask=torch.ones(1, 4))


def test_the_dtype_of_a_head_alone_is_its_own(tmp_path: Path) -> None:
    heads = lm.MTPModel.from_base(lm.from_config(LLAMA, dtype=torch.bfloat16), 2)
    heads.head.float()
    heads.save_head(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


FLAGS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "norm_before_residual": (lm.Eagle3Model, {}, "norm_before_residual"),
    "norm_output": (lm.Eagle3Model, {}, "norm_output"),
    "causal": (lm.DFlashModel, SMALL, "causal"),
    "confidence": (lm.DSparkModel, SMALL, "enable_confidence_head"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(base: lm.CausalLM, name: str) -> None:
    heads, options, field = FLAGS[name]
    with pytest.raises(InputError, match=f"^{field}: must be True or False, got 'no'"):
        heads.from_base(base, **options, **{name: "no"})


FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "eagle, flag": ("eagle", {"norm_before_residual": "no"}, "norm_before_residual: must be True or False, got 'no'"),
    "eagle, layers": ("eagle", {"eagle_aux_hidden_state_layer_ids": "x"}, "eagle_aux_hidden_state_layer_ids: must be"),
    "eagle, no layers": (
        "eagle",
        {"eagle_aux_hidden_state_layer_ids": []},
        "eagle_aux_hidden_state_layer_ids: must be a list of whole numbers, at least one, got []",
    ),
    "dspark, flag": ("dspark", {"enable_confidence_head": "no"}, "enable_confidence_head: must be True or False"),
    "dspark, anchor": ("dspark", {"sample_from_anchor": "no"}, "sample_from_anchor: no is not implemented"),
    "eagle, serving": ("eagle", {"speculators_config": 5}, "speculators_config: must be an object, got 5"),
    "eagle, steps": (
        "eagle",
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5000}]}},
        "speculative_tokens: must be at most 1,000, got 5000",
    ),
    "eagle, decay": ("eagle", {"step_loss_decay": "x"}, "step_loss_decay: must be a number of at least 0, got 'x'"),
    "dflash, types": (
        "dflash",
        {"transformer_layer_config": {"model_type": "qwen3", "layer_types": 5}},
        "layer_types: must be a list of names, got 5",
    ),
    "dflash, layers": (
        "dflash",
        {"transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": "x"}},
        "config.json: field 'num_hidden_layers' must be a whole number above 0, got 'x'",
    ),
    "dspark, windows": (
        "dspark",
        {"transformer_layer_config": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None}},
        "max_window_layers: must be a whole",
    ),
    "dflash, token": ("dflash", {"mask_token_id": 500}, "mask_token_id: must be at most 130, got 500"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_values_in_files_name_the_folder_and_the_field(base: lm.CausalLM, case: str, tmp_path: Path) -> None:
    kind, fields, message = FILES[case]
    heads = HEADS[kind](base)
    heads.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError) as raised:
        type(heads).from_pretrained(base, tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: {message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types = ['sliding_attention'] is not implemented"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state: false"),
        ({"layer_types": ["full_attention"] * 36, "eagle_config": {"use_aux_hidden_state": True}}, None),
    ],
)
def test_fields_of_specforge_that_change_a_head(
    base: lm.CausalLM, fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    lm.Eagle3Model.from_base(base).export(tmp_path, profile="specforge")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        lm.Eagle3Model.from_pretrained(base, tmp_path)


@pytest.mark.parametrize("formats", [eagle3_formats, block_formats])
def test_facts_about_a_bad_config_are_an_error_that_names_the_field(formats: Any) -> None:
    for fields, name in (
        ({"speculators_config": [1]}, "speculators_config"),
        ({"speculators_config": {"verifier": "x"}}, "speculators_config.verifier"),
        ({"transformer_layer_config": 5}, "transformer_layer_config"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}: must be an object, got "):
            formats.facts_of(fields)
    for methods in (5, [], ["x"], {"x": 1}):
        assert formats.facts_of({"speculators_config": {"proposal_methods": methods}})["base_model"] is None
    with pytest.raises(ConfigError, match=r"^dflash_config: must be an object, got \['x'\]"):
        block_formats.facts_of({"dflash_config": ["x"]})


@pytest.mark.parametrize("d2t", [torch.tensor(0), torch.zeros(2, 2).long(), torch.tensor([0.0, 1.5])])
def test_offsets_of_draft_tokens_are_whole_numbers(d2t: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"^d2t: must be whole numbers \(n,\), got torch."):
        DraftVocabulary.from_tables(d2t, None, 9)


@pytest.mark.parametrize(("kind", "profile"), [("eagle", "specforge"), ("dflash", "z-lab"), ("dspark", "deepspec")])
def test_only_formats_that_name_the_model_need_its_name(
    base: lm.CausalLM, kind: str, profile: str, tmp_path: Path
) -> None:
    heads = HEADS[kind](base)
    heads.export(tmp_path, profile=profile)
    assert type(heads).from_pretrained(base, tmp_path).num_heads
    with pytest.raises(InputError, match=r"^base_model: config.json of this format names the base model; give its"):
        heads.export(tmp_path / "other", profile="speculators")
    with pytest.raises(InputError, match=r"^profile: must be one of speculators.*got \['speculators'\]"):
        heads.export(tmp_path / "other", profile=["speculators"])
    assert not (tmp_path / "other").exists()
    heads.export(tmp_path / "other", base_model=Path("owner/name"))
    stored = json.loads((tmp_path / "other" / "config.json").read_text())
    assert stored["speculators_config"]["verifier"]["name_or_path"] == "owner/name"


@pytest.mark.parametrize(
    ("name", "value", "stored"), [("num_heads", 5, 2), ("num_layers", 3, 1), ("lm_head", "shared", "own")]
)
def test_a_setting_that_heads_to_start_from_do_not_have_is_named(
    base: lm.CausalLM, name: str, value: Any, stored: Any, tmp_path: Path
) -> None:
    heads = lm.MedusaModel.from_base(base, 2)
    heads.heads[0].lm_head.weight.data.add_(0.1)
    heads.save_pretrained(tmp_path)
    recipe = MedusaRecipe(base="base", data="data.txt", start_from=str(tmp_path), num_heads=2)
    assert heads_on(base, recipe, resuming=False).num_heads == 2
    with pytest.raises(ConfigError) as raised:
        heads_on(base, recipe.changed({name: value}), resuming=False)
    assert str(raised.value) == (
        f"{name}: is {value}, but {stored} in the heads to start from, {tmp_path}; set it to {stored}"
    )


@pytest.mark.parametrize("profile", ["speculators", "specforge"])
@pytest.mark.parametrize("size", [9, LLAMA["vocab_size"]])
def test_a_shared_lm_head_is_shared_after_a_round_trip(
    base: lm.CausalLM, size: int, profile: str, tmp_path: Path
) -> None:
    """Formats repeat its rows in the file, and training goes on with the same parameters; a trained one stays."""
    counts = torch.arange(LLAMA["vocab_size"])
    options: dict[str, Any] = {"num_steps": 2, "vocabulary": DraftVocabulary.of_counts(counts, size)}
    eagle = lm.Eagle3Model.from_base(base, lm_head="shared", **options)
    export_named(eagle, tmp_path, profile, "base")
    loaded = lm.Eagle3Model.from_pretrained(base, tmp_path, num_steps=2)
    pairs = zip(eagle.head_parameters(), loaded.head_parameters(), strict=True)
    assert loaded.lm_head is None and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert torch.equal(loaded(IDS, labels=IDS).loss, eagle(IDS, labels=IDS).loss)
    own = lm.Eagle3Model.from_base(base, **options)
    assert own.lm_head is not None
    own.lm_head.weight.data.add_(0.1)
    export_named(own, tmp_path, profile, "base", overwrite=True)
    loaded = lm.Eagle3Model.from_pretrained(base, tmp_path, num_steps=2)
    assert loaded.lm_head is not None and torch.equal(loaded.lm_head.weight, own.lm_head.weight)


def test_a_file_without_a_vocabulary_size_is_an_error(base: lm.CausalLM, tmp_path: Path) -> None:
    lm.Eagle3Model.from_base(base).export(tmp_path, profile="specforge")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vocab_size"], config["draft_vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="draft_vocab_size: must be a whole number of at least 1, got 0"):
        lm.Eagle3Model.from_pretrained(base, tmp_path)


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        ("DSparkModel", {"markov_rank": 0, "markov_head_type": "gated"}, ("markov_head_type", "markov_rank is 0")),
        (
            "DSparkModel",
            {"confidence": False, "confidence_with_markov": False},
            ("confidence_with_markov", "confidence"),
        ),
        ("DSparkModel", {"confidence": False, "confidence_weight": 2.0}, ("confidence_weight", "confidence")),
        ("DFlashModel", {"confidence_weight": 2.0}, ("confidence_weight", "confidence")),
        ("DFlashModel", {"divergence": "jsd"}, ("divergence", "divergence_weight")),
        ("DFlashModel", {"gamma": 3.0, "dpace_alpha": 0.5}, ("gamma", "dpace_alpha")),
        ("DFlashModel", {"num_layers": 1, "layers": layer_like}, ("num_layers", "layers")),
        ("DSparkModel", {"num_layers": 1, "layers": layer_like}, ("num_layers", "layers")),
    ],
)
def test_arguments_without_effect(
    base: lm.CausalLM, kind: str, options: dict[str, Any], names: tuple[str, str], tmp_path: Path
) -> None:
    """An error names the argument, and why it has no effect; the model is not frozen. Defaults are none."""
    base.requires_grad_()
    given = {name: value(base.config, "qwen3") if callable(value) else value for name, value in options.items()}
    with pytest.raises(InputError, match=rf"^{names[0]}: .*{names[1]}"):
        getattr(lm, kind).from_base(base, 4, **given)
    assert all(parameter.requires_grad for parameter in base.parameters())
    if "divergence" in options or "gamma" in options:
        getattr(lm, kind).from_base(base, 4, num_layers=1).save_pretrained(tmp_path)
        with pytest.raises(InputError, match=rf"^{names[0]}: .*{names[1]}"):
            getattr(lm, kind).from_pretrained(base, tmp_path, **given)


@pytest.mark.parametrize(
    ("kind", "profile", "options"),
    [
        ("MedusaModel", "vllm", {"base_model": "x"}),
        ("MedusaModel", "full-hf", {"base_model": "x"}),
        ("MedusaModel", "tgi", {"max_shard_size": "1GB"}),
        ("Eagle3Model", "specforge", {"base_model": "x"}),
        ("DFlashModel", "z-lab", {"base_model": "x"}),
        ("DSparkModel", "deepspec", {"base_model": "x"}),
    ],
)
def test_arguments_without_a_place_in_the_file(
    base: lm.CausalLM, kind: str, profile: str, options: dict[str, str], tmp_path: Path
) -> None:
    model = getattr(lm, kind).from_base(base, 2)
    with pytest.raises(InputError, match=f"^{next(iter(options))}: .*profile '{profile}'"):
        model.export(tmp_path, profile, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", HEADS)
def test_heads_alone_do_not_replace_their_model(kind: str, tmp_path: Path) -> None:
    """With `overwrite`, `export` into the folder of the base model left the heads there in place of its weights."""
    lm.from_config(LLAMA).save_pretrained(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    heads = HEADS[kind](lm.from_pretrained(tmp_path / "model"))
    save = heads.save_head if kind == "mtp" else heads.save_pretrained
    for folder in ("model", "link"):
        with pytest.raises(InputError, match=f"{folder}: holds the base model, which the heads alone would replace"):
            save(tmp_path / folder, overwrite=True)
    lm.from_pretrained(tmp_path / "model")
    save(tmp_path / "heads")
    save(tmp_path / "heads", overwrite=True)
