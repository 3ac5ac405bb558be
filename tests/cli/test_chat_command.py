"""`ligermodels chat`: the answers of transformers, turn by turn, from a terminal or a pipe."""

import json
import os
import pty
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import with_decoder
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.cli.chat import converse
from ligermodels.data.chat import ChatTemplate, Message, end_of_turn
from ligermodels.data.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 8


@pytest.fixture(scope="module")
def speaker(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base` with a decoder of its tokens: what it says is text."""
    return with_decoder(base, tmp_path_factory.mktemp("speaker") / "model")


def chat(path: object, *arguments: object, input: str) -> Result:
    given = ["chat", path, "--max-new-tokens", TOKENS, "--greedy", "--device", "cpu", *arguments]
    return CliRunner().invoke(app, list(map(str, given)), input=input)


def answers(speaker: Path, turns: list[str], opening: list[dict[str, str]]) -> list[str]:
    """Greedy answers in one conversation, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(speaker), AutoTokenizer.from_pretrained(speaker)
    messages, found = list(opening), []
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        mask = torch.ones_like(ids)
        row = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=end)
        found.append(tokenizer.decode(row[0, ids.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def test_a_conversation_is_that_of_transformers(speaker: Path, tmp_path: Path) -> None:
    turns, opening = ["May I copy it?", "And change it?"], [{"role": "system", "content": "Be brief."}]
    first, second = answers(speaker, turns, opening)
    assert first != second and answers(speaker, turns[1:], opening) != [second]
    lines = f"{turns[0]}\n\n  {turns[1]}\n/reset\n{turns[0]}\n/exit\nnever\n"
    result = chat(speaker, "--system", "Be brief.", input=lines)
    assert result.exit_code == 0 and result.stdout == f"{first}\n{second}\n{first}\n", result.output
    # With heads the same, and without a last line end.
    lm.MedusaModel.from_base(lm.from_pretrained(speaker), num_heads=2).save_pretrained(tmp_path / "heads")
    result = chat(speaker, "--system", "Be brief.", "--heads", tmp_path / "heads", input="\n".join(turns))
    assert result.exit_code == 0 and result.stdout == f"{first}\n{second}\n", result.output
    sampled = ["--sample", "--temperature", 2.0, "--heads", tmp_path / "heads", "--seed"]
    results = [chat(speaker, *sampled, seed, input=turns[0]).stdout for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2] != f"{first}\n"


def test_an_answer_ends_with_its_turn(speaker: Path, tmp_path: Path) -> None:
    """Even where the checkpoint names another EOS."""
    folder = shutil.copytree(speaker, tmp_path / "model")
    tokenizer, template = Tokenizer(folder), ChatTemplate.from_folder(folder)
    (end,) = end_of_turn(template, tokenizer)
    assert end == tokenizer.backend.token_to_id("<|im_end|>")
    model = lm.from_pretrained(folder)
    model.hf_config["eos_token_id"] = tokenizer.backend.token_to_id("<|im_start|>")
    text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode_with_offsets(text)[0]])
    with torch.no_grad():
        model.head.weight[end] = 10 * model(ids, return_last_hidden_state=True).last_hidden_state[0, -1]
    model.save_pretrained(folder, overwrite=True)
    assert lm.from_pretrained(folder).generate(ids, 2, do_sample=False).shape[1] == ids.shape[1] + 2
    result = chat(folder, input="Hi\n")
    assert result.exit_code == 0 and result.stdout == "\n", result.output


def test_ctrl_c_at_the_prompt_ends_a_chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def read(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    converse(lambda *_: pytest.fail("there is no turn"), [])
    assert capsys.readouterr().out == "\n"


def chat_in(terminal: str, out: Path, err: Path, arguments: list[str]) -> None:
    """The command with its input from a terminal, and its output in files."""
    for number, file, flags in ((0, terminal, os.O_RDONLY), (1, out, WRITE), (2, err, WRITE)):
        os.dup2(os.open(file, flags), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    app(["chat", *arguments])


WRITE = os.O_WRONLY | os.O_CREAT


def test_in_a_terminal(speaker: Path, tmp_path: Path, children: Any) -> None:
    (first,) = answers(speaker, ["Hi"], [])
    ours, theirs = pty.openpty()
    arguments = [str(speaker), "--greedy", "--max-new-tokens", str(TOKENS), "--device", "cpu"]
    files = tmp_path / "out", tmp_path / "err"
    child = children.Process(target=chat_in, args=(os.ttyname(theirs), *files, arguments))
    child.start()
    os.write(ours, b"Hi\n/reset\nHi\n\x04")
    child.join(60)
    out, err = (file.read_text(encoding="utf-8") for file in files)
    assert child.exitcode == 0 and out.count(first) == 2, (out, err)
    assert "/reset starts over" in err and out.count("> ") == 4


def test_what_cannot_chat_is_named(speaker: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(speaker, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    result = chat(folder, input="Hi\n")
    assert result.exit_code == 1 and f"{folder}: has no chat template" in result.stderr and not result.stdout
    (tmp_path / "template.jinja").write_text(template)
    assert chat(folder, "--chat-template", tmp_path / "template.jinja", input="Hi\n").exit_code == 0
    for flags in (["--top-k", 3], ["--seed", 1, "--heads", "x"], ["--top-p", 0.5, "--heads", "x"]):
        result = chat(folder, *flags, input="Hi\n")
        assert result.exit_code == 2 and "need --sample" in result.stderr


@pytest.mark.parametrize("factor", [None, 8])
def test_a_chat_beyond_the_context_says_so(factor: int | None, speaker: Path, tmp_path: Path) -> None:
    """The context is that of the rotary scaling, where it is longer than max_position_embeddings."""
    folder = shutil.copytree(speaker, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 100}
    config.pop("rope_parameters", None)
    if factor is not None:
        config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(config))
    long = chat(folder, input="may " * 200 + "\n")
    assert long.exit_code == 0 and ("the model's context has 100; /reset" in long.stderr) == (factor is None)


def test_an_interrupted_answer_stays_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[Message]] = []

    def answer(messages: list[Message], show: Callable[[str], None]) -> None:
        seen.append(list(messages))
        show("half")
        if len(seen) == 1:
            raise KeyboardInterrupt
        show(" more")

    lines = iter(["one", "", "two"])

    def read(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    converse(answer, [])
    assert capsys.readouterr().out == "half\nhalf more\n\n"
    assert [message["content"] for message in seen[1]] == ["one", "half", "two"]
