"""Trained rows of single tokens, `trainable_token_indices`: the same files, logits and gradients as PEFT's."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

pytest.importorskip("peft", reason="needs ligermodels[integrations]")
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import ligermodels as lm

TOLERANCE = 1e-5
KINDS = {
    "untied": {**BASE, "model_type": "llama", "num_hidden_layers": 2, "pad_token_id": 9},
    "tied": {**CONFIGS["qwen3"], "tie_word_embeddings": True, "pad_token_id": 9},
    "scaled embedding": CONFIGS["gemma2"],  # tied
}
IDS = torch.tensor([[3, 9, 4, 11, 30, 9, 25, 3, 8, 4, 40, 2]])
ROWS = [11, 3, 9, 25]  # in no order, and the padding token among them
OF_EACH = {"embed_tokens": ROWS, "lm_head": ROWS}
PREFIX = "base_model.model."
DELTA = "token_adapter.trainable_tokens_delta"


def config_of(indices: Any, **options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], trainable_token_indices=indices, **options)


def changed(model: Any) -> Any:
    """With random values in all that is trained."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def trained_rows(model: lm.CausalLM) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith("rows")}


@pytest.mark.parametrize("indices", [ROWS, OF_EACH], ids=["list", "dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways(kind: str, indices: Any, tmp_path: Path) -> None:
    """PEFT's adapter in ours, with logits, loss and gradients; ours again in PEFT; merged in transformers."""
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    theirs = changed(get_peft_model(copy.deepcopy(oracle), config_of(indices)))
    theirs.save_pretrained(tmp_path / "theirs")
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs", is_trainable=True).eval()
    is_tied = model.config.head.tied
    wanted = theirs(IDS, labels=IDS)
    assert relative_error(model(IDS).logits, wanted.logits) < TOLERANCE
    found = model(IDS, labels=IDS)
    assert relative_error(found.loss, wanted.loss) < TOLERANCE

    # Only A, B and the rows are trained.
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    rows = {"decoder.embed.update.rows", *(["head.update.rows"] if indices is OF_EACH and not is_tied else [])}
    assert {name for name in names if "lora" not in name} == rows == trained_rows(model).keys()
    wanted.loss.backward()
    for output in (found.loss, model(IDS, labels=IDS, return_logits=True).logits.square().sum()):
        model.zero_grad()
        output.backward()
        if output is not found.loss:
            theirs.zero_grad()
            theirs(IDS).logits.square().sum().backward()
        gradients = {name: p.grad for name, p in theirs.named_parameters() if "trainable_tokens_delta" in name}
        assert len(gradients) == len(rows)
        for name, p in trained_rows(model).items():
            other = next(grad for key, grad in gradients.items() if ("lm_head" in key) == name.startswith("head"))
            assert relative_error(p.grad, other) < TOLERANCE
        b = model.get_parameter("decoder.blocks.0.mixer.qkv.update.lora_B_q_proj").grad
        assert (
            relative_error(b, next(p.grad for n, p in theirs.named_parameters() if "0.self_attn.q_proj.lora_B" in n))
            < 1e-4
        )

    lm.save_adapter(model, tmp_path / "ours")
    tensors, expected = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("ours", "theirs"))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert f"{PREFIX}model.embed_tokens.{DELTA}" in tensors
    again = PeftModel.from_pretrained(copy.deepcopy(oracle), str(tmp_path / "ours")).eval()
    assert torch.equal(again(IDS).logits, theirs(IDS).logits)

    lm.merge_lora(model).save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert relative_error(merged(IDS).logits, wanted.logits) < TOLERANCE
    assert merged.config.tie_word_embeddings == is_tied
    assert relative_error(theirs.merge_and_unload()(IDS).logits, wanted.logits) < TOLERANCE


@pytest.mark.parametrize("indices", [ROWS, OF_EACH], ids=["list", "dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_starts_as_the_base_and_goes_to_peft(kind: str, indices: Any, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    base = lm.from_pretrained(tmp_path / "base")
    before = base(IDS).logits
    model = lm.add_lora(base, r=3, target_modules=["q_proj"], trainable_token_indices=indices)
    assert relative_error(model(IDS).logits, before) < TOLERANCE
    lm.save_adapter(changed(model), tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    both = {"model.embed_tokens": ROWS, "lm_head": ROWS}
    assert config["trainable_token_indices"] == (both if indices is OF_EACH and kind == "untied" else ROWS)
    theirs = PeftModel.from_pretrained(copy.deepcopy(oracle), str(tmp_path / "ours")).eval()
    assert relative_error(theirs(IDS).logits, model(IDS).logits) < TOLERANCE
    assert relative_error(model(IDS).logits, before) > 0.01
    with theirs.disable_adapter(), lm.adapt.lora.lora_disabled(model):
        assert torch.equal(model(IDS).logits, before) and relative_error(theirs(IDS).logits, before) < TOLERANCE


@pytest.mark.parametrize("indices", [[11, 3, -1, -3], {"embed_tokens": [11, -2, 3], "lm_head": [-1, 11]}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_peft_saves_a_resized_vocabulary_beside_the_rows(kind: str, indices: Any, tmp_path: Path) -> None:
    """The rows become part of the whole embedding and head, which PEFT opens as `modules_to_save`."""
    oracle = make_checkpoint(tmp_path / "base", KINDS[kind])
    size = oracle.config.vocab_size + 3
    if isinstance(indices, dict):
        if kind != "untied":
            indices = dict.fromkeys(indices, indices["embed_tokens"])
        indices = {key: [i % size for i in ids] for key, ids in indices.items()}
    else:
        indices = [i % size for i in indices]
    resized = copy.deepcopy(oracle)
    resized.resize_token_embeddings(size, mean_resizing=False)
    theirs = changed(get_peft_model(copy.deepcopy(resized), config_of(indices)))
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    ids = torch.cat([IDS, torch.arange(size - 4, size)[None]], 1)
    wanted = theirs(ids).logits
    model = lm.load_adapter(lm.from_pretrained(tmp_path / "base"), tmp_path / "theirs").eval()
    assert model.config.vocab_size == size and relative_error(model(ids).logits, wanted) < TOLERANCE
    lm.save_adapter(model, tmp_path / "ours")
    again = PeftModel.from_pretrained(resized, str(tmp_path / "ours")).eval()
    assert relative_error(again(ids).logits, wanted) < TOLERANCE
