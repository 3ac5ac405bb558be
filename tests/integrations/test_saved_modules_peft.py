"""Modules trained whole beside LoRA, `modules_to_save`: the same files and logits as PEFT on transformers' models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

pytest.importorskip("peft", reason="needs ligermodels[integrations]")
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import ligermodels as lm

TOLERANCE = 1e-5
TIED = {**CONFIGS["qwen3"], "tie_word_embeddings": True}
KINDS = {
    "untied": {**BASE, "model_type": "llama", "num_hidden_layers": 3},
    "tied": TIED,
    "scaled embedding": CONFIGS["gemma2"],  # tied, and norms are stored minus 1
    "experts": CONFIGS["mixtral"],
}
IDS = torch.arange(3, 40)[None]


def changed(model: Any) -> Any:
    """With random values in all that is trained."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"], ["norm"]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_theirs_in_ours(kind: str, modules: list[str], tmp_path: Path) -> None:
    """PEFT gives a tied embedding and head each a copy, which are trained apart: the model is untied."""
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], modules_to_save=modules)
    theirs = changed(get_peft_model(copy.deepcopy(oracle), config))
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = theirs(IDS).logits
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs").eval()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert relative_error(model(IDS).logits, wanted) < TOLERANCE

    lm.save_adapter(model, tmp_path / "ours")
    found, expected = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)

    lm.merge_lora(model).save_pretrained(tmp_path / "merged")
    options = {"experts_implementation": "eager"} if kind == "experts" else {}  # sizes that grouped_mm does not take
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, **options).eval()
    assert relative_error(merged(IDS).logits, wanted) < TOLERANCE


@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], ["lm_head"], ["input_layernorm"]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ours_in_peft(kind: str, modules: list[str], tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    base = lm.from_pretrained(tmp_path / "base")
    own = {name for name, _ in base.named_parameters()}
    model = lm.add_lora(base, r=3, target_modules=["v_proj"], modules_to_save=modules)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    is_tied = model.config.head.tied
    wanted = {"decoder.embed.weight"} if is_tied else {"decoder.embed.weight", "head.weight"}
    if modules == ["lm_head"]:
        wanted = {"decoder.embed.weight"} if is_tied else {"head.weight"}
    if modules == ["input_layernorm"]:
        wanted = {name for name in own if name.endswith("norm.weight") and "blocks" in name} & trained
        assert len(wanted) == len(model.config.blocks)
    assert trained & own == wanted and len(trained) > len(wanted)

    ids = IDS.clone()
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    lm.save_adapter(changed(model), tmp_path / "ours")
    theirs = PeftModel.from_pretrained(copy.deepcopy(oracle), str(tmp_path / "ours")).eval()
    logits = model(IDS).logits
    assert relative_error(theirs(IDS).logits, logits) < TOLERANCE
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "ours", is_trainable=True)
    assert again.config.head.tied == is_tied
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    assert torch.equal(again.eval()(IDS).logits, logits)
    assert theirs.merge_and_unload().config.tie_word_embeddings == is_tied  # PEFT trains one weight, too
    assert relative_error(lm.merge_lora(model)(IDS).logits, logits) < TOLERANCE


def test_peft_saves_the_embedding_of_a_model_whose_head_it_adapts(tmp_path: Path) -> None:
    """LoRA of the head itself is not implemented, and named; the embedding beside it is no reason."""
    oracle = make_checkpoint(tmp_path / "base", TIED)
    theirs = changed(get_peft_model(oracle, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"])))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    assert "base_model.model.model.embed_tokens.weight" in load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs").eval()
    assert relative_error(model(IDS).logits, theirs(IDS).logits) < TOLERANCE and model.config.head.tied


@pytest.mark.parametrize("modules", [["embed_tokens", "lm_head"], None], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_vocabulary(kind: str, modules: list[str] | None, tmp_path: Path) -> None:
    """PEFT writes embedding and head of a resized model too, and loads ours on a base that is resized."""
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    size = oracle.config.vocab_size + 3
    resized = copy.deepcopy(oracle)
    resized.resize_token_embeddings(size, mean_resizing=False)
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], modules_to_save=modules)
    theirs = changed(get_peft_model(copy.deepcopy(resized), config))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    ids = torch.arange(size - 9, size)[None]
    wanted = theirs(ids).logits
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs").eval()
    assert model.config.vocab_size == size and relative_error(model(ids).logits, wanted) < TOLERANCE

    lm.save_adapter(model, tmp_path / "ours")
    loaded = PeftModel.from_pretrained(resized, tmp_path / "ours").eval()
    assert relative_error(loaded(ids).logits, wanted) < TOLERANCE

    lm.merge_lora(model).save_pretrained(tmp_path / "merged")
    options = {"experts_implementation": "eager"} if kind == "experts" else {}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, **options).eval()
    assert merged.config.vocab_size == size and relative_error(merged(ids).logits, wanted) < TOLERANCE


@pytest.mark.parametrize(("kind", "module"), [("deepseek_v3", "gate"), ("apertus", "mlp")])
def test_buffers_of_whole_modules(kind: str, module: str, tmp_path: Path) -> None:
    """PEFT writes them beside the parameters (the bias of a router), and opens no adapter without them."""
    oracle = make_checkpoint(tmp_path / "base", CONFIGS[kind])
    config = LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["o_proj"], modules_to_save=[module])
    theirs = changed(get_peft_model(copy.deepcopy(oracle), config))
    with torch.no_grad():
        for name, buffer in theirs.named_buffers():
            if "modules_to_save" in name and name.endswith("bias"):
                buffer.add_(torch.randn_like(buffer))
    theirs.save_pretrained(tmp_path / "theirs")
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs").eval()
    assert relative_error(model(IDS).logits, theirs(IDS).logits) < TOLERANCE
    lm.save_adapter(model, tmp_path / "ours")
    found, expected = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)

    options: dict[str, Any] = {"target_modules": ["o_proj"], "modules_to_save": [module]}
    new = changed(lm.add_lora(lm.from_pretrained(tmp_path / "base"), r=3, **options))
    lm.save_adapter(new, tmp_path / "new")
    opened = PeftModel.from_pretrained(copy.deepcopy(oracle), tmp_path / "new").eval()
    assert relative_error(opened(IDS).logits, new(IDS).logits) < TOLERANCE
    merged = lm.merge_lora(new)
    assert not merged.modules_to_save and not any(p.requires_grad for p in merged.parameters())
