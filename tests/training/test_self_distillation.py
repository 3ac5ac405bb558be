"""Self-distillation data: the model's own continuations, turn by turn, the same through stops and kills."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import add_bos
from runs import command, with_decoder
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.documents import Documents
from ligermodels.errors import InputError
from ligermodels.training.self_distillation import SelfDistillation, write_self_distillation_data

pytestmark = pytest.mark.usefixtures("one_thread")


CHATS: list[dict[str, Any]] = [
    {"text": "Hello there , how are you ? " * 5},
    {
        "conversations": [
            {"from": w, "value": v} for w, v in zip(["human", "gpt"] * 2, ["Hi", "x", "How", "y"], strict=True)
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "You"},
            {"role": "assistant"},
        ]
    },
    {"text": ""},
    {
        "messages": [{"role": "user", "content": "fine"}, {"role": "assistant", "content": "z"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    {"messages": [{"role": "user", "content": "I"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
]


def test_a_model_goes_on_in_its_own_words(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each document alone, turn by turn, with what the model itself has said before."""
    CHATS[2]["messages"][2]["content"] = "w"
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in CHATS) + "no json\n")
    model = lm.from_pretrained(base)
    said: list[str] = []
    documents = Documents.of_checkpoint(base, [file], max_bad_lines=1, on_bad_line=said.append)
    tokenizer, template = documents.tokenizer, documents.template
    add_bos(tokenizer, "<|endoftext|>")  # Which makes a token of an empty text.

    def alone(prompt: list[int], ends: list[int]) -> list[int]:
        new = model.generate([prompt], 12, eos_token_id=ends, pad_token_id=0)[0, len(prompt) :].tolist()
        return new[: min((new.index(end) for end in ends if end in new), default=len(new)) + 1]

    def prompt_of(messages: list[Any], **variables: Any) -> list[int]:
        text = template.render(messages, add_generation_prompt=True, **variables)
        return tokenizer.encode_with_offsets(text)[0]

    # A token that the model says after some of the prompts is to end a turn.
    first = [prompt_of([{"role": "user", "content": "Hi"}]), prompt_of(CHATS[2]["messages"][:2])]
    ends = [alone(first[0], [])[7], alone(first[1], [])[4]]
    monkeypatch.setattr(model, "generation_defaults", lambda do_sample=None: {"eos_token_id": ends})
    words = SelfDistillation(model, documents, temperature=0, max_new_tokens=12, prompt_tokens=9)
    found = words.records(range(7))
    assert said[0].startswith(f"{file}:4: nothing to learn: the text is empty")
    assert said[1:] == [f"{file}:7: not JSON (Expecting value: line 1 column 1 (char 0)); line skipped"]
    prompt = tokenizer.encode(CHATS[0]["text"])[:9]
    new = alone(prompt, ends)
    cut = {} if new[-1] in ends else {"finish_reason": "length"}
    assert found[0] == {"text": tokenizer.decode(prompt + new), **cut}
    for index, asked in ((1, ["Hi", "How"]), (2, ["You"]), (4, ["fine"])):
        messages: list[Any] = [CHATS[index]["messages"][0]] if index == 2 else []
        variables = {"tools": CHATS[index]["tools"]} if index == 4 else {}
        wanted = None
        for question in asked:
            messages.append({"role": "user", "content": question})
            prompt = prompt_of(messages, **variables)
            new = alone(prompt, ends)
            ended = new[-1] in ends
            said_last = tokenizer.continuation(prompt, new[:-1] if ended else new)
            cut = {} if ended else {"finish_reason": "length"}
            messages.append({"role": "assistant", "content": said_last if ended else said_last.rstrip("\ufffd"), **cut})
            wanted = {"messages": list(messages), **variables}
            if not ended:
                break
        assert found[index] == wanted
    assert found[1] is not None and found[2] is not None and found[3] is None and found[5] is None

    written = write_self_distillation_data(words, 7, tmp_path / "own.jsonl", batch_size=2)
    assert written == sum(each is not None for each in found)
    again = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert again == [each for each in found if each is not None]
    read = Documents.of_checkpoint(base, [tmp_path / "own.jsonl"]).read(range(len(again)))
    assert all(each is not None and any(label >= 0 for label in each.labels) for each in read)
    for record, tokens in zip(again, read, strict=True):  # a cut answer is not trained to end
        if "messages" in record:
            end = tokenizer.backend.token_to_id("<|im_end|>")
            assert (end in tokens.labels) == (
                len(record["messages"]) > 2 or "finish_reason" not in record["messages"][-1]
            )
    monkeypatch.setattr(model, "generation_defaults", lambda do_sample=None: {})
    kept, dropped = (
        SelfDistillation(model, documents, temperature=0, max_new_tokens=3, truncated=truncated)
        for truncated in ("keep", "drop")
    )
    assert [record["messages"][-1]["finish_reason"] for record in kept.records([1, 2, 0])[:2]] == ["length"] * 2
    assert dropped.records([1, 2, 0])[:2] == [None, None] and kept.num_cut == dropped.num_cut == 2
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHATS[2]))
    chat = Documents.of_checkpoint(base, [tmp_path / "chat.jsonl"])
    endless = SelfDistillation(model, chat, max_new_tokens=3, truncated="drop")
    with pytest.raises(InputError, match="no document could be continued"):
        write_self_distillation_data(endless, 1, tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("*none.jsonl*"))
    with pytest.raises(InputError, match="temperature"):
        SelfDistillation(model, documents, temperature=-1)


def test_a_prompt_and_given_turns_stay(base: Path, tmp_path: Path) -> None:
    """The completion is the model's own; a turn that is not trained on is the record's."""
    given = {"role": "assistant", "content": "fine", "weight": 0}
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}
    lines = [{"prompt": "Hi there", "completion": "x"}, {"messages": [user, given, user, answer]}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    documents = Documents.of_checkpoint(base, [tmp_path / "data.jsonl"])
    source = SelfDistillation(lm.from_pretrained(base), documents, temperature=0, max_new_tokens=5)
    completion, chat = source.records([0, 1])
    assert completion is not None and chat is not None
    assert completion["prompt"] == "Hi there" and completion["completion"] != "x"
    assert chat["messages"][:3] == [user, given, user] and chat["messages"][3]["content"] != "x"


def test_a_text_that_is_cut_within_a_character(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_decoder(base, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "the quick"}))
    model, documents = lm.from_pretrained(folder), Documents.of_checkpoint(folder, [tmp_path / "data.jsonl"])
    begin, _ = documents.tokenizer.encode("\u00e9")
    monkeypatch.setattr(model, "generate", lambda prompts, count, **_: torch.tensor([[*ids, begin] for ids in prompts]))
    (record,) = SelfDistillation(model, documents, prompt_tokens=99).records([0])
    assert record == {"text": "the quick", "finish_reason": "length"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature: must be a number of at least 0, got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be a whole number of at least 1, got 0"),
        ({"prompt_tokens": 1.5}, "prompt_tokens: must be a whole number of at least 1, got 1.5"),
        ({"truncated": "yes"}, "truncated: must be one of keep, drop, got 'yes'"),
        ({"batch_size": 0}, "batch_size: must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "the quick"}))
    documents = Documents.of_checkpoint(base, [tmp_path / "data.jsonl"])
    kept, batch_size = {k: v for k, v in options.items() if k != "batch_size"}, options.get("batch_size", 1)
    with pytest.raises(InputError, match=message):
        source = SelfDistillation(lm.from_pretrained(base), documents, **kept)
        write_self_distillation_data(source, 1, tmp_path / "own.jsonl", batch_size=batch_size)


def test_data_from_the_command_line(base: Path, data: Path, tmp_path: Path) -> None:
    def run(name: str, *options: object) -> Any:
        arguments = ["medusa", "self-distillation-data", base, "--data", data, "--out", tmp_path / name]
        more = ["--max-bad-lines", 1, "--max-new-tokens", 5, "--prompt-tokens", 4, *options]
        return CliRunner().invoke(app, list(map(str, [*arguments, *more])))

    assert run("a.jsonl").exit_code == 0 and run("b.jsonl").exit_code == 0
    texts = [(tmp_path / name).read_text() for name in ("a.jsonl", "b.jsonl")]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) >= 11
    result = run("b.jsonl", "--seed", 1, "--overwrite", "--temperature", 2.0)
    assert (tmp_path / "b.jsonl").read_text() != texts[0] and "b.jsonl: " in result.stderr
    for name, words in (("a.jsonl", "already"), ("a.json", "ends in .jsonl"), ("no/a.jsonl", "its folder does")):
        assert run(name).exit_code == 1 and words in run(name).stderr


def test_the_data_is_not_replaced(base: Path, data: Path, tmp_path: Path) -> None:
    """`--overwrite` replaced the file that the command read, under any name of it."""
    path, content = tmp_path / "data.jsonl", data.read_bytes()
    path.write_bytes(content)
    (tmp_path / "link.jsonl").symlink_to(path)
    arguments = ["medusa", "self-distillation-data", str(base), "--overwrite", "--max-bad-lines", "9"]
    for given, out in ((path, path), (path, tmp_path / "link.jsonl"), (tmp_path / "*.jsonl", path)):
        result = CliRunner().invoke(app, [*arguments, "--data", str(given), "--out", str(out)])
        assert result.exit_code == 1 and "is a file of the data, which the result would replace" in result.stderr
        assert path.read_bytes() == content
    chat = [{"role": "user", "content": "Hi"}]
    path.write_text(json.dumps({"messages": chat}))
    result = CliRunner().invoke(app, [*arguments, "--data", str(path), "--out", str(tmp_path / "own.jsonl")])
    assert result.exit_code == 1 and "or chats with turns of the assistant" in result.stderr


def test_a_file_of_text_is_enough(base: Path, tmp_path: Path) -> None:
    """Pieces of it are continued, as many as it has of the length that they become."""
    (tmp_path / "book.txt").write_text("words of a text\n" * 100)
    arguments = ["--data", tmp_path / "book.txt", "--out", tmp_path / "own.jsonl", "--max-new-tokens", 16]
    command = ["medusa", "self-distillation-data", base, *arguments, "--prompt-tokens", 9]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    assert 16 <= len((tmp_path / "own.jsonl").read_text().splitlines()) <= 20  # of 1,600 bytes, 100 each at most


def test_own_words_go_on_where_they_were_killed(base: Path, data: Path, tmp_path: Path, children: Any) -> None:
    out = {name: tmp_path / f"{name}.jsonl" for name in ("whole", "killed")}
    options = ["--max-bad-lines", "1", "--max-new-tokens", "24", "--prompt-tokens", "4", "--batch-size", "2"]

    def arguments(name: str, *more: str) -> list[str]:
        return [str(base), "--data", str(data), "--out", str(out[name]), *options, "--resume", *more]

    def run(name: str, *more: str) -> Any:
        return CliRunner().invoke(app, ["medusa", "self-distillation-data", *arguments(name, *more)])

    first = run("whole")
    assert first.exit_code == 0 and "there is nothing to resume" in first.stderr
    progress, partial = (tmp_path / f".killed.jsonl.{ending}" for ending in ("progress", "partial"))
    draw, reached = random.Random(0), set[int]()
    for target in (1, 13):
        child = children.Process(
            target=command, args=arguments("killed"), kwargs={"name": "medusa self-distillation-data"}
        )
        child.start()
        while child.is_alive() and not (progress.is_file() and json.loads(progress.read_text())["done"] >= target):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        child.kill()
        child.join()
        assert not out["killed"].exists()
        reached.add(json.loads(progress.read_text())["done"])
        with partial.open("ab") as file:
            file.write(b'{"text": "half a li' * 10_000)
    assert len(reached) == 2, reached
    assert (
        "--temperature" not in options and "temperature was 0.3, is 1.0" in run("killed", "--temperature", "1").stderr
    )
    result = run("killed")
    assert result.exit_code == 0 and out["killed"].read_bytes() == out["whole"].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.jsonl", "whole.jsonl"]
    # Again there is nothing left to do; and what is damaged is named.
    before = out["whole"].stat().st_mtime_ns
    assert run("whole").exit_code == 0 and out["whole"].stat().st_mtime_ns == before
    out["killed"].unlink()
    progress.write_text('{"done": 3}')
    assert "damaged; remove it" in run("killed").stderr


def test_own_words_go_on_with_the_model_that_began_them(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by what is in the files, wherever they are; and on the day that it was."""
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "a.jinja"
    shutil.copytree(base, here)
    file.write_text("{{ strftime_now('%Y-%m-%d') }} {{ messages[-1].content }}")

    def run(name: str, model: Path, template: Path, *more: str) -> Any:
        files = [model, "--data", data, "--out", tmp_path / f"{name}.jsonl", "--chat-template", template]
        options = ["--max-bad-lines", 1, "--max-new-tokens", 5, "--prompt-tokens", 4, "--batch-size", 4]
        return CliRunner().invoke(app, ["medusa", "self-distillation-data", *map(str, [*files, *options]), *more])

    records, calls = SelfDistillation.records, list[Any]()

    def stopped(self: SelfDistillation, indices: Any) -> Any:
        calls.append(indices)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return records(self, indices)

    with monkeypatch.context() as patched:
        patched.setattr(SelfDistillation, "records", stopped)
        assert "--resume continues" in run("stopped", here, file, "--date", "2001-02-03").stderr
    here.rename(there)
    moved = shutil.copy(file, there)
    shutil.copytree(base, here)
    weights = bytearray((here / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (here / "model.safetensors").write_bytes(weights)
    assert "base: differs from the start of the run: model" in run("stopped", here, file, "--resume").stderr
    file.write_text("{{ messages[0].content }}")
    assert "chat_template: differs from the start of the run: a.jinja" in run("stopped", there, file, "--resume").stderr
    told = "date was '2001-02-03', is '2001-02-04'"  # That of the start holds, whichever day it is.
    assert told in run("stopped", there, moved, "--resume", "--date", "2001-02-04").stderr
    assert run("stopped", there, moved, "--resume").exit_code == 0
    assert run("whole", base, moved, "--date", "2001-02-03").exit_code == 0
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
