"""Text models within multimodal checkpoints, against transformers' own models called with tokens alone."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo import MULTIMODAL, auto_class, gradients_of, make_checkpoint, plain, relative_error, stored_as, thinker

import ligermodels as lm
from ligermodels.archs import FAMILIES
from ligermodels.convert.config_json import nested_configs
from ligermodels.convert.quantization import Quantization, without_quantization
from ligermodels.errors import ConfigError

TOLERANCE = 1e-5
Pair = tuple[Path, PreTrainedModel, lm.CausalLM]


def tokens(batch: int = 3, length: int = 41) -> Tensor:
    """Of text: those of images are above."""
    return torch.randint(3, 126, (batch, length), generator=torch.Generator().manual_seed(0))


def text_only(names: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What is the text model's, under the names that it has alone."""
    head = f"{prefix.removesuffix('model.language_model').removesuffix('model')}lm_head.weight"
    found = {name: each for name, each in names.items() if name.startswith(f"{prefix}.") or name == head}
    return {"lm_head.weight" if name == head else name.replace(prefix, "model", 1): t for name, t in found.items()}


@pytest.fixture(scope="module", params=MULTIMODAL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    oracle = make_checkpoint(folder, MULTIMODAL[request.param])
    return folder, thinker(oracle), lm.from_pretrained(folder)


def test_logits_loss_and_every_gradient_of_text(pair: Pair) -> None:
    _, oracle, model = pair
    ids, labels = tokens(), tokens()
    labels[0, :7] = labels[1, 20:30] = -100
    oracle.zero_grad()
    model.zero_grad()
    wanted = oracle(ids, labels=labels)
    wanted.loss.backward()
    output = model(ids, labels=labels, return_logits=True)
    output.loss.backward()
    assert relative_error(output.logits, wanted.logits) < TOLERANCE
    assert relative_error(output.loss, wanted.loss) < TOLERANCE
    places = ("model.language_model", "language_model.model")
    parameters = dict(oracle.named_parameters())
    named = text_only(parameters, next(place for place in places if f"{place}.norm.weight" in parameters))
    theirs = {name: parameter.grad for name, parameter in named.items()}
    ours = stored_as(named, gradients_of(model))
    assert set(ours) == set(theirs)
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 2 * TOLERANCE, errors


def test_greedy_tokens_of_text_in_a_padded_batch(pair: Pair) -> None:
    _, oracle, model = pair
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :8] = 0
    ids[mask == 0] = 0
    # Beyond the ids of text are those of images, after which transformers' positions are no longer those of text.
    options = {"max_new_tokens": 8, "suppress_tokens": [], "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    images = [[token] for token in range(126, 131)]
    theirs = oracle.generate(ids, attention_mask=mask, bad_words_ids=images, **options)

    def no_images(_: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(126, 131), -torch.inf)

    ours = model.generate(ids, attention_mask=mask, logits_processor=[no_images], max_new_tokens=8, eos_token_id=2)
    assert torch.equal(ours, theirs)


def test_export_of_the_text_model_opens_in_transformers(pair: Pair, tmp_path: Path) -> None:
    _, oracle, model = pair
    model.save_pretrained(tmp_path, keep="model")
    alone, info = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == model.hf_config["model_type"] and type(alone).__name__ in config["architectures"]
    with torch.no_grad():
        assert relative_error(plain(alone)(tokens()).logits, oracle(tokens()).logits) < TOLERANCE
        assert relative_error(lm.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits) < TOLERANCE


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """As the configs of Qwen2-VL on the hub: the text model's fields beside the others, and the older rope."""
    text = copy.deepcopy(config["text_config"])
    rope = {"rope_scaling": {**text.pop("rope_parameters"), "type": "mrope"}}
    del text["model_type"]
    rope["rope_scaling"] = {key: rope["rope_scaling"][key] for key in ("type", "mrope_section")}
    return {**text, **rope, **{name: value for name, value in config.items() if name != "text_config"}}


WHOLE = [
    pytest.param(config, layout, id=f"{name} at {layout['prefix']}")
    for name, config in MULTIMODAL.items()
    for layout in {each["prefix"]: each for each in FAMILIES[config["model_type"]].layouts}.values()
]
WHOLE.append(pytest.param(flattened(MULTIMODAL["qwen2_vl"]), FAMILIES["qwen2_vl"].layouts[1], id="qwen2_vl, flat"))


@pytest.mark.parametrize(("config", "layout"), WHOLE)
def test_export_of_everything_in_every_layout(config: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    """Loaded and written back whole: every tensor to the byte, the config but for rope, in a form that opens."""
    folder, out = tmp_path / "model", tmp_path / "out"
    prefix, head = layout["prefix"], layout["head"]
    oracle = make_checkpoint(folder, config)
    state = {key: t.contiguous() for key, t in oracle.state_dict().items()}
    whole = "thinker." if "thinker_config" in config else ""
    text = text_only(state, f"{whole}model.language_model")
    stored = {head if key == "lm_head.weight" else key.replace("model", prefix, 1): t for key, t in text.items()}
    here = "thinker." * prefix.startswith("thinker.") + "model." * prefix.endswith("model.language_model")
    for key in state:
        if not key.startswith((f"{whole}model.language_model.", f"{whole}lm_head.")):
            inner = key.startswith(f"{whole}model.")
            stored[here + key.removeprefix(f"{whole}model.") if inner else key] = state[key]
    if getattr(thinker(oracle).config, "tie_word_embeddings", False):
        del stored[head]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    model = lm.from_pretrained(folder)
    model.save_pretrained(out)
    after = load_file(out / "model.safetensors")
    assert after.keys() == stored.keys() and all(torch.equal(after[key], stored[key]) for key in stored)
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    with torch.no_grad():
        wanted = thinker(oracle)(tokens()).logits
        assert relative_error(model(tokens()).logits, wanted) < TOLERANCE
        # In other layouts transformers has the same config, and the tensors of the files that came in.
        if layout is FAMILIES[config["model_type"]].layouts[0] or config not in MULTIMODAL.values():
            opened = PreTrainedModel.from_pretrained.__func__  # Qwen2.5-Omni's own gives no info.
            reopened, info = opened(type(oracle), out, attn_implementation="eager", output_loading_info=True)
            assert not any(info.values()), info
            assert relative_error(thinker(plain(reopened))(tokens()).logits, wanted) < TOLERANCE
    rewritten = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "rope_local_base_freq"}
    rewritten |= {"partial_rotary_factor", "mtp_num_hidden_layers"}  # there are no tensors of the head
    nested = ("thinker_config", "text_config")
    parts = [json.loads((at / "config.json").read_text()) for at in (out, folder)]
    for key in nested:
        kept = [{k: v for k, v in part.items() if k not in {*rewritten, *nested}} for part in parts]
        assert kept[0] == kept[1]
        parts = [part.get(key, part) for part in parts]
    kept = [{k: v for k, v in part.items() if k not in rewritten} for part in parts]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("name", "prefix", "text"),
    [
        ("mistral3", "language_model.", "language_model.model"),
        ("qwen2_vl", "", "model"),
        ("qwen3_omni_moe", "thinker.", "thinker.model"),
    ],
    ids=["mistral3", "qwen2_vl", "qwen3_omni_moe"],
)
@pytest.mark.parametrize("beside", [True, False, None])
@pytest.mark.parametrize("within", [True, False, None])
@pytest.mark.parametrize("stored", ["no", "equal", "other"])
def test_a_head_is_tied_as_the_file_says(
    beside: bool | None, within: bool | None, stored: str, name: str, prefix: str, text: str, tmp_path: Path
) -> None:
    config = copy.deepcopy(MULTIMODAL[name])
    make_checkpoint(tmp_path, config)
    holder = config.get("thinker_config", config)
    holder["tie_word_embeddings"], holder["text_config"]["tie_word_embeddings"] = beside, within
    for each in (holder, holder["text_config"]):
        if each["tie_word_embeddings"] is None:
            del each["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head, embedding = f"{prefix}lm_head.weight", f"{text}.embed_tokens.weight"
    if stored == "no":
        tensors.pop(head, None)
    elif stored == "equal":
        tensors[head] = tensors[embedding].clone()
    else:
        tensors[head] = tensors.get(head, tensors[embedding]) + 1
    save_file(tensors, file)
    if beside is not None and beside == within:
        if (beside, stored) == (False, "no"):
            with pytest.raises(lm.errors.CheckpointError, match=r"lm_head\.weight"):
                lm.from_pretrained(tmp_path)
            return
        if (beside, stored) == (True, "other"):
            with pytest.warns(
                lm.errors.ConfigWarning, match=r"tie_word_embeddings: is true, but .*lm_head\.weight is stored"
            ):
                model = lm.from_pretrained(tmp_path)
            model.save_pretrained(tmp_path / "saved")
            model = lm.from_pretrained(tmp_path / "saved")
            assert not model.config.head.tied and model.hf_config["tie_word_embeddings"] is False
            return
        tied = beside
    else:
        tied = stored != "other"
    model = lm.from_pretrained(tmp_path)
    assert model.config.head.tied == tied == model.hf_config["tie_word_embeddings"]


@pytest.mark.every_case
@pytest.mark.parametrize("within", [True, False, None])
@pytest.mark.parametrize("beside", [True, False, None])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_tied_flags_without_weights_are_those_of_transformers(
    name: str, beside: bool | None, within: bool | None
) -> None:
    """Or an error where releases differ, for an inner flag alone."""
    config = copy.deepcopy(MULTIMODAL[name])
    holder = config.get("thinker_config", config)
    for level, flag in ((holder, beside), (holder["text_config"], within)):
        level.pop("tie_word_embeddings", None)
        level |= {} if flag is None else {"tie_word_embeddings": flag}
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    wanted = bool(getattr(getattr(theirs, "thinker_config", theirs), "tie_word_embeddings", False))
    try:
        model = lm.from_config(config, device="meta")
    except ConfigError as error:
        assert beside is None and within is not None and "set tie_word_embeddings beside text_config too" in str(error)
    else:
        assert model.config.head.tied == wanted


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl", "qwen2_5_omni_thinker"])
@pytest.mark.parametrize("keep", ["all", "model"])
def test_token_ids_beside_the_text_config(name: str, keep: Any, tmp_path: Path) -> None:
    """transformers generates by them, and leaves out no gradient of the padding token among them. Options of generation
    in old configs still count."""
    config = copy.deepcopy(MULTIMODAL[name])
    config["text_config"] = {**config["text_config"], "eos_token_id": 2, "bos_token_id": 3}
    del config["text_config"]["pad_token_id"]
    config |= {"pad_token_id": 7, "eos_token_id": [4, 5], "bos_token_id": 6}
    oracle = make_checkpoint(tmp_path / "model", config)
    (tmp_path / "model" / "generation_config.json").unlink()
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    stored["text_config"] |= {"top_p": 0.5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(stored))
    model = lm.from_pretrained(tmp_path / "model")
    assert model.decoder.embed.padding_idx == oracle.get_input_embeddings().padding_idx != 7
    theirs = GenerationConfig.from_model_config(oracle.config)
    wanted = {"eos_token_id": [4, 5], "pad_token_id": 7}
    assert {id: getattr(theirs, id) for id in wanted} == wanted
    wanted |= {"top_p": 0.5}
    model.save_pretrained(tmp_path / "out", keep=keep)
    for each in (model, lm.from_pretrained(tmp_path / "out")):
        defaults = each.generation_defaults()
        assert {id: defaults[id] for id in wanted} == wanted
        assert each.config.padding_idx == model.config.padding_idx
    opened = auto_class(AutoConfig.from_pretrained(tmp_path / "out")).from_pretrained(tmp_path / "out")
    assert {id: getattr(opened.generation_config, id) for id in wanted} == wanted
    assert opened.generation_config.bos_token_id == 6


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "mistral3",
            {"model_type": "mixtral"},
            r"text_config\.model_type = 'mixtral' is not implemented for .*mistral3",
        ),
        ("mistral3", {"model_type": ["mistral"]}, r"text_config\.model_type = \['mistral'\] is not"),
        ("mistral3", {"rms_norm_eps": "x"}, r"'rms_norm_eps' must be a finite number"),
        ("qwen2_vl", {"head_dim": 14}, "head_dim = 14 is not read for model_type 'qwen2_vl'"),
        ("qwen2_5_omni_thinker", {"head_dim": 14}, "head_dim = 14 is not read for .*'qwen2_5_omni_thinker'"),
        ("qwen3_omni_moe_thinker", {"use_qk_norm": False}, "text_config: use_qk_norm = False is not implemented"),
        # Fields that transformers does not read here.
        ("qwen3_vl", {"use_sliding_window": True, "sliding_window": 5}, "text_config: use_sliding_window = True is"),
        ("qwen3_vl_moe", {"use_sliding_window": True}, "text_config: use_sliding_window = True is not implemented"),
        ("qwen3_omni_moe_thinker", {"use_sliding_window": True}, "text_config: use_sliding_window = True is not"),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "text_config: norm_topk_prob = False is not implemented"),
        ("qwen3_vl", {"rope_parameters": {"rope_type": "spiral"}}, r"rope_parameters: rope_type = 'spiral'"),
        ("qwen3_vl", {"rope_parameters": {"rotary_dim": 4}}, r"rope_parameters: rotary_dim = 4 is not implemented"),
    ],
)
def test_faults_of_the_text_config_are_named(name: str, text: dict[str, Any], message: str) -> None:
    config = copy.deepcopy(MULTIMODAL[name])
    config["text_config"] |= text
    with pytest.raises(ConfigError, match=message):
        lm.from_config(config, device="meta")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_field_that_the_text_config_leaves_out_is_as_in_transformers(name: str) -> None:
    """Some follow from other fields. Where transformers' config is refused, its default does not fit these sizes."""
    compose = FAMILIES[MULTIMODAL[name]["model_type"]].decoder_config
    for field in list(nested_configs(MULTIMODAL[name]).values())[-1]:
        config = copy.deepcopy(MULTIMODAL[name])
        del list(nested_configs(config).values())[-1][field]  # type: ignore[attr-defined]
        try:
            theirs = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)).to_dict()
            wanted = compose(theirs)
        except (ConfigError, StrictDataclassClassValidationError):
            continue
        assert compose(config) == wanted, field


def test_null_is_no_change_of_a_field_that_transformers_does_not_read() -> None:
    config = copy.deepcopy(MULTIMODAL["qwen3_vl_moe"])
    wanted = lm.from_config(config, device="meta").config
    config["text_config"] |= {"norm_topk_prob": None, "use_sliding_window": None}
    assert lm.from_config(config, device="meta").config == wanted


@pytest.mark.parametrize("name", MULTIMODAL)
def test_faults_beside_the_text_config_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match="qk_norm = True is not implemented"):
        lm.from_config({**MULTIMODAL[name], "qk_norm": True}, device="meta")
    field = "thinker_config" if "thinker_config" in MULTIMODAL[name] else "text_config"
    with pytest.raises(ConfigError, match=f"field '{field}' must be an object, got 'x'"):
        lm.from_config({**MULTIMODAL[name], field: "x"}, device="meta")


@pytest.mark.parametrize(
    ("thinker_config", "message"),
    [
        (None, "field 'thinker_config' must be an object, got None"),
        (
            {"model_type": "qwen2_5_vl"},
            r"thinker_config\.model_type = 'qwen2_5_vl' is not implemented for .*'qwen2_5_omni'",
        ),
        ({"text_config": {"hidden_size": 3}}, "thinker_config: text_config: hidden_size 3 is no multiple of"),
        ({"qk_norm": True}, "thinker_config: qk_norm = True is not implemented"),
    ],
)
def test_faults_of_the_thinker_are_named(thinker_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({"model_type": "qwen2_5_omni", "thinker_config": thinker_config}, device="meta")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_quantization_of_a_thinker_is_read_wherever_it_stands(depth: int) -> None:
    config: dict[str, Any] = {"model_type": "qwen3_omni_moe", "thinker_config": {"a": 1, "text_config": {"b": 2}}}
    found = copy.deepcopy(config)
    holder = list(nested_configs(found).values())[depth]
    holder["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 4]}  # type: ignore[index]
    assert without_quantization(found) == (config, Quantization("fp8", (8, 4)))
