"""Native LoRA against PEFT's on transformers' models: logits, gradients, merged weights and files, of every family."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_keep import make_gemma3
from torch import Tensor
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

pytest.importorskip("peft", reason="needs ligermodels[integrations]")
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

import ligermodels as lm
from ligermodels.adapt.adapter import adapter_map
from ligermodels.adapt.lora import lora_layers
from ligermodels.adapt.targets import layouts_of, leaf, targets, transformers_layout
from ligermodels.errors import CheckpointError, ConfigError

TOLERANCE = 1e-5
LLAMA = {**BASE, "model_type": "llama", "num_hidden_layers": 3}


# PEFT takes a model of these types to have experts, and adapts nothing in dense layers.
WITH_MAMBA = ("falcon_h1", "nemotron_h")
"""Types of models in which PEFT refuses to adapt `out_proj`."""
WITHOUT_EXPERTS = {"qwen3_next-without-experts", "deepseek_v3-without-experts"}


@pytest.fixture(scope="module", params=sorted(CONFIGS.keys() - WITHOUT_EXPERTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, CONFIGS[request.param])


def tokens() -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(0))


def draw(model: Any) -> Any:
    """B is zero at first; then nothing that is wrong with A or B would show."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


def opened(oracle: Any, adapter: Path, **options: Any) -> Any:
    """By PEFT, which only warns of tensors that it lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return PeftModel.from_pretrained(copy.deepcopy(oracle), str(adapter), **options)


def by_hf_name(model: lm.CausalLM, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = lora_layers(model)
    own = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
    return {each.name: each.read() for each in adapter_map(layers).export(own)}


def in_peft(model: Any, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name.replace(".default", ""): tensor for name, tensor in tensors.items() if "lora_" in name}


def leaves(model: lm.CausalLM) -> list[str]:
    paths = targets(model, transformers_layout(model), layouts_of(model))
    refused = {"out_proj"} if model.hf_config["model_type"] in WITH_MAMBA else set()
    return [name for name in dict.fromkeys(map(leaf, paths)) if name not in refused]


def test_ours_in_peft(pair: tuple[Path, Any], tmp_path: Path) -> None:
    folder, oracle = pair
    model = lm.from_pretrained(folder)
    chosen = {"target_modules": leaves(model)} if oracle.config.model_type in WITH_MAMBA else {}
    model = draw(lm.add_lora(model, r=3, lora_alpha=7, **chosen))
    lm.save_adapter(model, tmp_path / "adapter")
    theirs = opened(oracle, tmp_path / "adapter", is_trainable=True)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    held = in_peft(theirs, dict(theirs.named_parameters()))
    assert set(held) == set(stored) and all(torch.equal(held[name], stored[name]) for name in stored)

    ids = tokens()
    for module in (model.train(), theirs.train()):
        module(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all("lora_" in name for name in gradients)
    ours = by_hf_name(model, gradients)
    wanted = in_peft(theirs, {name: p.grad for name, p in theirs.named_parameters()})
    assert set(ours) == set(wanted)
    errors = {name: relative_error(ours[name], wanted[name]) for name in ours}
    assert max(errors.values()) < 10 * TOLERANCE, errors

    logits = model.eval()(ids).logits
    assert relative_error(logits, theirs.eval()(ids).logits) < TOLERANCE
    merged = lm.merge_lora(model)
    assert relative_error(merged(ids).logits, logits) < TOLERANCE
    state = theirs.merge_and_unload().state_dict()
    found = merged.hf_state_dict()
    assert set(found) == set(state) and all(torch.equal(found[name], state[name]) for name in state)


def test_theirs_in_ours(pair: tuple[Path, Any], tmp_path: Path) -> None:
    """With ranks and scalings that differ between the parts of a fused weight."""
    folder, oracle = pair
    model = lm.from_pretrained(folder)
    names = leaves(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        target_modules=names,
        rank_pattern={names[0]: 2, "layers.1.self_attn.o_proj": 5},
        alpha_pattern={names[-1]: 3},
    )
    theirs = draw(get_peft_model(copy.deepcopy(oracle), config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    assert lm.load_adapter(model, tmp_path / "theirs") is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert relative_error(model(tokens()).logits, theirs(tokens()).logits) < TOLERANCE
    lm.save_adapter(model, tmp_path / "ours")
    found, wanted = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(opened(oracle, tmp_path / "ours").eval()(tokens()).logits, theirs(tokens()).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_bfloat16_model_merges_as_in_peft(dtype: torch.dtype, use_rslora: bool, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "model", LLAMA, dtype=torch.bfloat16)
    model = lm.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    chosen = ["q_proj", "v_proj", "up_proj", "layers.0.self_attn.o_proj"]
    draw(lm.add_lora(model, 3, lora_alpha=7, target_modules=chosen, use_rslora=use_rslora, dtype=dtype))
    lm.save_adapter(model, tmp_path / "adapter")
    theirs = opened(oracle, tmp_path / "adapter", autocast_adapter_dtype=dtype == torch.float32)
    assert {p.dtype for name, p in theirs.named_parameters() if "lora_" in name} == {dtype}
    state, found = theirs.merge_and_unload().state_dict(), lm.merge_lora(model).hf_state_dict()
    assert set(found) == set(state)
    for name, tensor in state.items():  # PEFT also rounds an update in bfloat16; ours is rounded once
        at_most = 0 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found[name], tensor, rtol=at_most, atol=at_most)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (IA3Config(task_type="CAUSAL_LM"), "peft_type"),
        (LoraConfig(use_dora=True, target_modules=["q_proj"]), "use_dora"),
        (LoraConfig(bias="lora_only", target_modules=["q_proj"]), "bias"),
        (LoraConfig(lora_bias=True, target_modules=["q_proj"]), "lora_bias"),
        (LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]), "init_lora_weights"),
        (LoraConfig(target_modules=["lm_head", "q_proj"]), "lm_head"),
        (LoraConfig(target_modules=["embed_tokens"]), "embed_tokens"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_not_implemented_is_named(config: Any, error: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "model", LLAMA)
    model = lm.from_pretrained(tmp_path / "model")
    get_peft_model(oracle, config).save_pretrained(tmp_path / "adapter")
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises((ConfigError, CheckpointError), match=error):
        lm.load_adapter(model, tmp_path / "adapter")
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}


def test_a_model_with_a_vision_tower(tmp_path: Path) -> None:
    """Its layers have other names there than in the text model alone, and the tower's have the same."""
    make_gemma3(tmp_path / "model")
    oracle = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    ids = tokens().clamp(max=120)
    chosen = ["q_proj", "v_proj", "down_proj"]
    model = draw(lm.add_lora(lm.from_pretrained(tmp_path / "model"), r=3, target_modules=chosen))
    lm.save_adapter(model, tmp_path / "adapter")
    wanted = model(ids).logits
    assert relative_error(wanted, opened(oracle, tmp_path / "adapter").eval()(ids).logits) < TOLERANCE

    merged = lm.merge_lora(model)
    merged.save_pretrained(tmp_path / "text")
    assert (
        relative_error(AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()(ids).logits, wanted) < TOLERANCE
    )

    config = LoraConfig(r=3, target_modules=r".*language_model.*\.(k_proj|up_proj)")
    theirs = draw(get_peft_model(oracle, config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "model"), tmp_path / "theirs")
    assert relative_error(again(ids).logits, theirs(ids).logits) < TOLERANCE
