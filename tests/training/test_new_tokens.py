"""Base models trained on chats by a built-in template: new tokens, resized embeddings, and exports that agree."""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from chat_templates import tokenizer_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo import LLAMA, make_checkpoint

import ligermodels as lm
from ligermodels.adapt.adapter import rewrite_adapter
from ligermodels.convert.config_json import read_json
from ligermodels.convert.more_rows import zero_rows
from ligermodels.data.chat import ChatTemplate
from ligermodels.data.new_tokens import with_tokens
from ligermodels.data.template_files import missing_tokens
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, CheckpointWarning, ConfigError
from ligermodels.training import Console, FineTuningRecipe, MedusaRecipe, fine_tune, train_heads
from ligermodels.training.base import Base
from ligermodels.training.fine_tuning import export_adapter

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = ("<|im_start|>", "<|im_end|>")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def make_base(folder: Path, *, spare: int = 0, **config: Any) -> int:
    """A tiny Llama 3 base model, with `spare` unused rows, or without rows for its last tokens (Gemma 3 1B has a token
    for images without a row). Returns the number of its tokens."""
    tokenizer = tokenizer_of("llama-3.1", folder)
    tokenizer.backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    added = {str(tokenizer.backend.token_to_id(token)): {"content": token, "special": True} for token in (begin, end)}
    fields: dict[str, Any] = {"bos_token": begin, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    fields["added_tokens_decoder"] = added  # read by transformers 4
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    used = max(tokenizer.backend.get_vocab().values()) + 1
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    ids = {"bos_token_id": tokenizer.backend.token_to_id(begin), "eos_token_id": tokenizer.backend.token_to_id(end)}
    make_checkpoint(folder, {**LLAMA, **small, "vocab_size": used + spare, **ids, **config})
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return used


def padded(size: int) -> int:
    return math.ceil(size / 64) * 64


def recipe_of(base: Path, data: Path, **settings: Any) -> FineTuningRecipe:
    common = {"validation_fraction": 0, "seq_len": 32, "batch_tokens": 32, "steps": 2, "checkpoint_every": None}
    return FineTuningRecipe().changed({"base": base, "data": data, "chat_template": "chatml", **common, **settings})


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 4)
    return tmp_path / "chats.jsonl"


@pytest.mark.parametrize("shard", [None, "20KB"])
@pytest.mark.parametrize("spare", [-2, 0, 1, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_new_tokens_are_those_of_transformers(
    tmp_path: Path, spare: int, tied: bool, shard: str | None
) -> None:
    base = tmp_path / "base"
    used = make_base(base, spare=spare, tie_word_embeddings=tied)
    before = AutoModelForCausalLM.from_pretrained(base)
    if shard:
        (base / "model.safetensors").unlink()
        before.save_pretrained(base, max_shard_size=shard)
        assert (base / "model.safetensors.index.json").is_file()
    assert missing_tokens(base, "chatml") == list(NEW) and missing_tokens(base, "llama3") == []
    folder = with_tokens(base / "config.json", base, base, NEW)
    after = AutoModelForCausalLM.from_pretrained(folder)
    size = used + spare if spare >= 2 else padded(used + 2)
    assert (
        read_json(folder / "config.json")["vocab_size"] == size
        and len(AutoTokenizer.from_pretrained(folder)) == used + 2
    )
    with torch.no_grad():  # transformers' mean is of all rows: leave only those that tokens have
        before.resize_token_embeddings(known := min(used, used + spare))
        before.resize_token_embeddings(used + 2)  # noise of 1e-9 times the covariance
    for resized, expected in (
        (after.get_input_embeddings(), before.get_input_embeddings()),
        (after.get_output_embeddings(), before.get_output_embeddings()),
    ):
        torch.testing.assert_close(resized.weight[: used + 2], expected.weight, rtol=0, atol=1e-4)
        assert torch.equal(resized.weight[:known], expected.weight[:known]) and len(resized.weight) == size
    assert any(path.is_symlink() for path in folder.glob("*.safetensors")) == bool(shard)
    assert with_tokens(base / "config.json", base, base, NEW) == folder
    lm.from_pretrained(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_the_export_of_a_base_model_with_new_tokens(tmp_path: Path, chats: Path, tied: bool) -> None:
    base, out, said = tmp_path / "base", tmp_path / "out", list[str]()
    used = make_base(base, tie_word_embeddings=tied)
    fine_tune(recipe_of(base, chats), out, console=Console(say=said.append))
    assert "the tokenizer and the embeddings get <|im_start|>, <|im_end|> for the chat template" in said
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == used + 1 and model.config.vocab_size == padded(used + 2) and len(tokenizer) == used + 2
    added = read_json(out / "tokenizer_config.json")["added_tokens_decoder"]
    assert added[str(end)]["content"] == "<|im_end|>" and added[str(end)]["special"] and len(added) == 4
    assert model.generation_config.eos_token_id == [model.config.eos_token_id, end]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert ids[0].tolist() == Tokenizer(out).encode(text) and (ids == end).sum() == 2
    with torch.no_grad():
        torch.testing.assert_close(lm.from_pretrained(out)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        start = AutoModelForCausalLM.from_pretrained(with_tokens(base / "config.json", base, base, NEW))
        assert not torch.equal(model.get_input_embeddings().weight[end], start.get_input_embeddings().weight[end])


def test_a_config_without_weights_gets_a_larger_vocabulary(tmp_path: Path, chats: Path) -> None:
    base = tmp_path / "base"
    used = make_base(base)
    (base / "model.safetensors").unlink()
    fine_tune(recipe_of(base, chats, dtype="float32"), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == padded(used + 2)


def test_embeddings_that_are_not_trained_get_no_tokens(tmp_path: Path, chats: Path) -> None:
    base = tmp_path / "base"
    make_base(base)
    heads = MedusaRecipe(base=base, data=chats, chat_template="chatml")
    with pytest.raises(
        ConfigError, match=r"chatml needs <\|im_start\|>, <\|im_end\|>.*Train the base model on chats first"
    ):
        train_heads(heads, tmp_path / "out")
    fine_tune(recipe_of(base, chats, lora_rank=2, chat_template="llama3"), tmp_path / "adapter")
    assert "<|eot_id|>" in (tmp_path / "adapter/chat_template.jinja").read_text()
    with pytest.raises(CheckpointError, match=r"the tokenizer lacks <\|im_start\|>.* of the chat template chatml"):
        ChatTemplate.from_folder(base, "chatml")
    found = Base.find(recipe_of(base, chats, chat_template="llama3"))
    assert found.tokenizer == base and not found.new_tokens


@pytest.mark.parametrize("spare", [-1, 0, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_lora_with_new_tokens(
    tmp_path: Path, chats: Path, tied: bool, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter has the rows and the tokenizer, and names the original base, whose vocabulary grows with it."""
    base, out = tmp_path / "base", tmp_path / "out"
    used = make_base(base, spare=spare, tie_word_embeddings=tied)
    settings = {"lora_rank": 2, "learning_rate": 0.01, "dtype": "float32"}
    monkeypatch.chdir(tmp_path)
    recipe, said = recipe_of(Path("base"), chats, checkpoint_every=1, **settings), list[str]()
    fine_tune(recipe.changed({"steps": 1}), out, console=Console(say=said.append))
    new = range(min(used, used + spare), used + 2)
    rows = ", ".join(map(str, new))
    assert f"lora_trainable_token_indices: is {rows}, which trains the rows of the new tokens" in said
    assert fine_tune(recipe, out, resume=True).step == 2
    assert read_json(out / "adapter_config.json")["base_model_name_or_path"] == str(base)
    tokenizer = AutoTokenizer.from_pretrained(out)
    end, size = tokenizer.convert_tokens_to_ids("<|im_end|>"), max(used + 2, used + spare)
    assert end == used + 1 and len(tokenizer) == used + 2
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    model = lm.load_adapter(lm.from_pretrained(base), out).eval()
    assert model.config.vocab_size == size and model.config.head.tied == tied
    logits = model(ids).logits
    lm.save_adapter(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    stored = load_file(out / "adapter_model.safetensors")
    assert {name: len(tensor) for name, tensor in stored.items() if "lora" not in name} == {
        f"base_model.model.{module}.token_adapter.trainable_tokens_delta": len(new)
        for module in (["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"])
    }
    assert again.keys() == stored.keys() and all(torch.equal(again[name], stored[name]) for name in stored)
    rewrite_adapter(lm.from_pretrained(base, device="meta"), out, tmp_path / "rewritten")
    assert load_file(tmp_path / "rewritten" / "adapter_model.safetensors").keys() == stored.keys()

    lm.merge_lora(model)
    model.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == size
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)

    export_adapter(out, tmp_path / "checkpoint")  # the last checkpoint of the run
    found = load_file(tmp_path / "checkpoint" / "adapter_model.safetensors")
    assert found.keys() == stored.keys() and all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.parametrize("spare", [-1, 0, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_peft_opens_lora_with_new_tokens(tmp_path: Path, chats: Path, tied: bool, spare: int) -> None:
    """As it is, through the tokenizer beside the adapter; or on a base that was resized for it."""
    peft = pytest.importorskip("peft", reason="needs ligermodels[integrations]")
    base, out = tmp_path / "base", tmp_path / "out"
    used = make_base(base, spare=spare, tie_word_embeddings=tied)
    fine_tune(recipe_of(base, chats, lora_rank=2, learning_rate=0.05, dtype="float32"), out)
    ids = torch.tensor([[3, used, 5, used + 1, 7]])
    logits = lm.load_adapter(lm.from_pretrained(base), out).eval()(ids).logits[..., : used + 2]
    resized = AutoModelForCausalLM.from_pretrained(base)
    if spare < 2:
        resized.resize_token_embeddings(used + 2)
    with torch.no_grad():
        for theirs in (
            peft.AutoPeftModelForCausalLM.from_pretrained(out),
            peft.PeftModel.from_pretrained(resized, out),
        ):
            torch.testing.assert_close(theirs.eval()(ids).logits[..., : used + 2], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whole", ["lora_modules_to_save", "a bias of the head", "an older run"])
def test_lora_with_new_tokens_trains_whole_modules_that_have_no_single_rows(
    tmp_path: Path, chats: Path, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_base(tmp_path / "base")
    recipe = recipe_of(tmp_path / "base", chats, lora_rank=2)
    before = {"lora_modules_to_save": ["embed_tokens", "lm_head"]} if whole == "an older run" else {}
    if whole == "lora_modules_to_save":
        recipe = recipe.changed({whole: ["embed_tokens"]})
    elif not before:
        head = SimpleNamespace(head=SimpleNamespace(bias=torch.zeros(1)))
        monkeypatch.setattr("ligermodels.training.base.from_config", lambda *_, **__: head)
        monkeypatch.setattr("ligermodels.training.base.token_modules", lambda _: ["embed_tokens", "lm_head"])
    recipe = Base.find(recipe).with_token_rows(recipe, before)
    assert recipe.lora_modules_to_save == ("embed_tokens", "lm_head") and not recipe.lora_trainable_token_indices


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_an_adapter_names_the_base_on_the_hub(
    template: str, tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the folder of the hub's cache, nor that of a copy with new tokens."""
    make_base(tmp_path / "snapshot")
    monkeypatch.setattr(
        "ligermodels.convert.hub.resolve",
        lambda name, **_: tmp_path / "snapshot" if str(name) == "some/base" else Path(name),
    )
    monkeypatch.chdir(tmp_path)
    settings = {"lora_rank": 2, "lora_modules_to_save": ["embed_tokens", "lm_head"], "chat_template": template}
    fine_tune(recipe_of(Path("some/base"), chats, **settings), tmp_path / "out")
    assert read_json(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"] == "some/base"


@pytest.mark.parametrize("names_vocab_size", [True, False])
def test_embeddings_that_the_base_model_left_at_zero(tmp_path: Path, chats: Path, names_vocab_size: bool) -> None:
    """As Llama 3's base models have them: nearly zero."""
    used = make_base(tmp_path / "base")
    make_base(tmp_path / "base", spare=32_000 - used, hidden_size=8, head_dim=2, intermediate_size=8)
    config = read_json(tmp_path / "base/config.json")
    if not names_vocab_size:  # the default of transformers' class
        del config["vocab_size"]
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "base/model.safetensors")
    end = Tokenizer(tmp_path / "base").backend.token_to_id("<|eot_id|>")
    for name, rows in weights.items():
        if "embed" in name or "lm_head" in name:
            rows[end] = 1e-23
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    with pytest.warns(CheckpointWarning, match=r"embeddings of <\|eot_id\|> in .*base are zero"):
        Base.find(recipe_of(tmp_path / "base", chats, lora_rank=2, chat_template="llama3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = {"lora_rank": 2, "lora_trainable_token_indices": [end]}
        Base.find(recipe_of(tmp_path / "base", chats, **rows, chat_template="llama3"))
        Base.find(recipe_of(tmp_path / "base", chats, chat_template="llama3"))
        Base.find(recipe_of(tmp_path / "base", chats, lora_rank=2, chat_template="alpaca"))


def test_a_token_without_a_row_is_not_at_zero(tmp_path: Path) -> None:
    used = make_base(tmp_path)
    assert zero_rows(tmp_path, used, [0, used, used + 10**6]) == []


def test_a_run_with_new_tokens_resumes(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    make_base(base)
    fine_tune(recipe_of(base, chats, checkpoint_every=1), tmp_path / "out")
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "other"))  # the copy of the base is made again
    longer = recipe_of(base, chats, checkpoint_every=1, steps=4)
    assert fine_tune(longer, tmp_path / "out", resume=True).step == 4
    assert len(list((tmp_path / "other/checkpoints").glob("*-base"))) == 1


def test_files_with_new_tokens_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    make_base(tmp_path, note="é")
    program = f"""if True:
        from pathlib import Path
        from ligermodels.data.new_tokens import with_tokens
        folder = Path({str(tmp_path)!r})
        print(with_tokens(folder / "config.json", folder, None, ["<\\uff5cend>"]))"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program]
    folder = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, check=True).stdout.decode()
    assert read_json(Path(folder.strip()) / "config.json")["note"] == "é"


def test_embeddings_that_cannot_be_resized_are_named(tmp_path: Path) -> None:
    make_base(tmp_path, spare=2)
    config = read_json(tmp_path / "config.json")
    for change, message in (
        ({"vocab_size_per_layer_input": 5, "vocab_size": config["vocab_size"] - 2}, "vocab_size_per_layer_input"),
        ({"vocab_size": None}, "vocab_size: there is none"),
    ):
        changed = {key: value for key, value in {**config, **change}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            with_tokens(tmp_path / "config.json", tmp_path, None, NEW)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = lm.from_pretrained(tmp_path).hf_state_dict()
    halved = {name: tensor.to(torch.float8_e4m3fn) if "embed" in name else tensor for name, tensor in weights.items()}
    save_file(halved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' is quantised"):
        with_tokens(tmp_path / "config.json", tmp_path, tmp_path, NEW)
