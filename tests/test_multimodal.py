"""Text models within multimodal checkpoints, against transformers' own models called with tokens alone."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from zoo import MULTIMODAL, auto_class, gradients_of, make_checkpoint, plain, relative_error, stored_as

import ligermodels as lm
from ligermodels.archs import FAMILIES
from ligermodels.errors import ConfigError

TOLERANCE = 1e-5
Pair = tuple[Path, PreTrainedModel, lm.CausalLM]


def tokens(batch: int = 3, length: int = 41) -> Tensor:
    """Of text: those of images are above."""
    return torch.randint(3, 126, (batch, length), generator=torch.Generator().manual_seed(0))


def text_only(names: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What is the text model's, under the names that it has alone."""
    found = {name: each for name, each in names.items() if name.startswith(f"{prefix}.") or "lm_head" in name}
    return {"lm_head.weight" if "lm_head" in name else name.replace(prefix, "model", 1): t for name, t in found.items()}


@pytest.fixture(scope="module", params=MULTIMODAL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    oracle = make_checkpoint(folder, MULTIMODAL[request.param])
    return folder, oracle, lm.from_pretrained(folder)


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
    named = text_only(dict(oracle.named_parameters()), "model.language_model")
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
    options = {"max_new_tokens": 25, "suppress_tokens": [], "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    images = [[token] for token in range(126, 131)]
    theirs = oracle.generate(ids, attention_mask=mask, bad_words_ids=images, **options)

    def no_images(_: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(126, 131), -torch.inf)

    ours = model.generate(ids, attention_mask=mask, logits_processor=[no_images], max_new_tokens=25, eos_token_id=2)
    assert torch.equal(ours, theirs)


def test_export_of_the_text_model_opens_in_transformers(pair: Pair, tmp_path: Path) -> None:
    _, oracle, model = pair
    model.save_pretrained(tmp_path)
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
    towers = (key for key in state if not key.startswith("model.language_model.") and "lm_head" not in key)
    here = "" if prefix != "model.language_model" else "model."
    stored = {key.replace("model.", here, 1): state[key] for key in towers}
    text = text_only(state, "model.language_model")
    stored |= {head if key == "lm_head.weight" else key.replace("model", prefix, 1): t for key, t in text.items()}
    if oracle.config.tie_word_embeddings:
        del stored[head]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    model = lm.from_pretrained(folder)
    model.save_pretrained(out, keep="all")
    after = load_file(out / "model.safetensors")
    assert after.keys() == stored.keys() and all(torch.equal(after[key], stored[key]) for key in stored)
    reopened, info = auto_class(oracle.config).from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        wanted = oracle(tokens()).logits
        assert relative_error(plain(reopened)(tokens()).logits, wanted) < TOLERANCE
        assert relative_error(model(tokens()).logits, wanted) < TOLERANCE
    rewritten = {"rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "rope_local_base_freq"}
    rewritten.add("partial_rotary_factor")
    for key in ("text_config", None):
        parts = [json.loads((at / "config.json").read_text()) for at in (out, folder)]
        parts = [part.get(key, {}) if key else part for part in parts]
        kept = [{k: v for k, v in part.items() if k not in {*rewritten, "text_config"}} for part in parts]
        assert kept[0] == kept[1]


@pytest.mark.parametrize("beside", [True, False, None])
@pytest.mark.parametrize("within", [True, False, None])
@pytest.mark.parametrize("stored", ["no", "equal", "other"])
def test_a_head_is_tied_as_the_file_says(beside: bool | None, within: bool | None, stored: str, tmp_path: Path) -> None:
    config = copy.deepcopy(MULTIMODAL["mistral3"])
    make_checkpoint(tmp_path, config)
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = beside, within
    for each in (config, config["text_config"]):
        if each["tie_word_embeddings"] is None:
            del each["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    if stored == "no":
        del tensors[head]
    elif stored == "equal":
        tensors[head] = tensors[embedding].clone()
    save_file(tensors, file)
    if beside is not None and beside == within:
        if (beside, stored) in ((True, "other"), (False, "no")):
            with pytest.raises(lm.errors.CheckpointError, match=r"lm_head\.weight"):
                lm.from_pretrained(tmp_path)
            return
        tied = beside
    else:
        tied = stored != "other"
    model = lm.from_pretrained(tmp_path)
    assert model.config.head.tied == tied == model.hf_config["tie_word_embeddings"]


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
def test_faults_beside_the_text_config_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match="qk_norm = True is not implemented"):
        lm.from_config({**MULTIMODAL[name], "qk_norm": True}, device="meta")
    with pytest.raises(ConfigError, match="field 'text_config' must be an object, got 'x'"):
        lm.from_config({**MULTIMODAL[name], "text_config": "x"}, device="meta")
