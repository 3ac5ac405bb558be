"""LoRA of experts against PEFT's on transformers' models: logits, gradients, merged weights, files both ways."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_lora_peft import draw, in_peft, tokens
from torch import Tensor
from zoo import CONFIGS, WITHOUT_GATES, make_checkpoint, relative_error

pytest.importorskip("peft", reason="needs ligermodels[integrations]")
from peft import LoraConfig, PeftModel, get_peft_model

import ligermodels as lm
from ligermodels.adapt.adapter import adapter_map
from ligermodels.adapt.lora import lora_layers

TOLERANCE = 1e-5
FAMILIES = ["qwen3_moe-normalised", "mixtral", "gpt_oss", "gemma4_text-experts", "glm4_moe", "qwen3_5_moe_text"]
FAMILIES += ["nemotron_h", "nemotron_h-latent-experts-and-biases"]
LINEAR = ["gate_proj", "up_proj", "down_proj"]
HALVES = {"mixtral": ["w1", "w3", "w2"]}
CONVERTED = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return request.param, folder, make_checkpoint(folder, CONFIGS[request.param])


def opened(oracle: Any, adapter: Path, **options: Any) -> Any:
    """By PEFT, which only warns of tensors that it lacks. It also warns of patterns for parameters, which it uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings(
            "ignore", message="The following .*_pattern keys did not match", category=RuntimeWarning
        )
        return PeftModel.from_pretrained(copy.deepcopy(oracle), str(adapter), **options)


def test_ours_in_peft(pair: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, oracle = pair
    model = draw(lm.add_lora(lm.from_pretrained(folder), r=3, lora_alpha=7, target_modules=["experts", "v_proj"]))
    lm.save_adapter(model, tmp_path / "adapter")
    theirs = opened(oracle, tmp_path / "adapter", is_trainable=True)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    held = in_peft(theirs, dict(theirs.named_parameters()))
    assert set(held) == set(stored) and all(torch.equal(held[name], stored[name]) for name in stored)

    for module in (model.train(), theirs.train()):
        module(input_ids=tokens(), labels=tokens()).loss.backward()
    own: dict[str, Tensor] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {each.name: each.read() for each in adapter_map(lora_layers(model)).export(own)}
    wanted = in_peft(theirs, {name: p.grad for name, p in theirs.named_parameters()})
    assert set(ours) == set(wanted)
    errors = {name: relative_error(ours[name], wanted[name]) for name in ours}
    assert max(errors.values()) < 10 * TOLERANCE, errors

    logits = model.eval()(tokens()).logits
    assert relative_error(logits, theirs.eval()(tokens()).logits) < TOLERANCE
    state, found = theirs.merge_and_unload().state_dict(), lm.merge_lora(model).hf_state_dict()
    assert set(found) == set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore::ligermodels.errors.AdapterWarning")
@pytest.mark.parametrize("form", ["target_parameters", "per_expert"])
def test_a_matrix_for_each_projection(pair: tuple[str, Path, Any], form: Any, tmp_path: Path) -> None:
    """Gate and up with an A each are one update of twice the rank there.

    PEFT converts layers of experts for Qwen and Mixtral alone, and with rsLoRA to a wrong scaling."""
    name, folder, oracle = pair
    if form == "per_expert" and not name.startswith(CONVERTED):
        pytest.skip("PEFT converts layers of experts for Qwen and Mixtral alone")
    targets = HALVES.get(name, ["experts.gate_proj", "experts.up_proj", "down_proj"])
    targets = [target for target in targets if "gate" not in target or name not in WITHOUT_GATES]
    targets = [*targets, "q_proj"] if form == "target_parameters" else [*HALVES.get(name, LINEAR), "q_proj"]
    rslora = form == "target_parameters"
    model = draw(lm.add_lora(lm.from_pretrained(folder), r=3, target_modules=targets, use_rslora=rslora))
    lm.save_adapter(model, tmp_path / "adapter", expert_format=form)
    theirs = opened(oracle, tmp_path / "adapter").eval()
    assert relative_error(model.eval()(tokens()).logits, theirs(tokens()).logits) < TOLERANCE


@pytest.mark.parametrize("kind", ["target_parameters", "target_modules"])
def test_theirs_in_ours(pair: tuple[str, Path, Any], kind: str, tmp_path: Path) -> None:
    name, folder, oracle = pair
    first, layers = ("up_proj", "[35]") if name in WITHOUT_GATES else ("gate_up_proj", "1")
    options: dict[str, Any] = {"target_modules": ["k_proj"], "target_parameters": [f"experts.{first}"]}
    options["rank_pattern"], options["alpha_pattern"] = {f"layers.{layers}.*experts.{first}": 2}, {"k_proj": 3}
    if kind == "target_modules":
        if not name.startswith(CONVERTED):
            pytest.skip("PEFT converts names of experts for Qwen and Mixtral alone")
        options = {"target_modules": ["k_proj", *HALVES.get(name, LINEAR)]}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **options)
    theirs = draw(get_peft_model(copy.deepcopy(oracle), config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = lm.load_adapter(lm.from_pretrained(folder), tmp_path / "theirs")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert relative_error(model(tokens()).logits, theirs(tokens()).logits) < TOLERANCE
    lm.save_adapter(model, tmp_path / "ours")
    found, wanted = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert set(found) == set(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert torch.equal(opened(oracle, tmp_path / "ours").eval()(tokens()).logits, theirs(tokens()).logits)
