"""`ligermodels data` shows the tokens that are trained on, and counts them as training does."""

import json
from pathlib import Path

import pytest
import tokenizers
from chat_templates import tokenizer_of
from runs import make_base, make_data
from typer.testing import CliRunner

from ligermodels import console
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.training import Console, FineTuningRecipe, fine_tune

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Hello, you?"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = tokenizer_of("qwen2.5", tmp_path)
    tokenizer.backend.decoder = tokenizers.decoders.ByteLevel()
    end = tokenizer.backend.token_to_id("<|endoftext|>")
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": end}))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return tmp_path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = [{"messages": CHAT}, {"text": "Hi"}, 5, {"messages": CHAT[:1]}, {"prompt": "Hi", "completion": " there!"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tokens_that_are_trained_on_are_marked(model: Path, data: Path) -> None:
    lines = run(data, "--model", model).split("\n")
    end = "<|endoftext|>"
    assert lines[0].startswith(f"{data}:1: ") and lines[1:7] == [
        "<|im_start|>user", "Hi there!<|im_end|>", "<|im_start|>assistant", "⟦Hello, you?<|im_end|>⟧", "", "",
    ]  # fmt: skip
    assert lines[7] == f"{data}:2: 2 tokens, 2 trained on" and lines[8] == f"⟦Hi{end}⟧"
    assert lines[11] == f"Hi⟦ there!{end}⟧"
    assert ["documents", "3"] in [line.split() for line in lines]


def test_unusable_lines_are_counted_unless_a_flag_limits_them(model: Path, data: Path) -> None:
    arguments = ["data", str(data), "--model", str(model), "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["unusable"] == 1
    assert CliRunner().invoke(app, [*arguments, "--max-bad-lines", "1"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--max-bad-lines", "0"]).exit_code == 1
    option = CliRunner().invoke(app, ["data", "--help"]).stdout.partition("--max-bad-lines")[2]
    assert "[default: any number]" in " ".join(option.split())[:200]


def test_counts(model: Path, data: Path) -> None:
    tokenizer = Tokenizer(model)
    chat = "<|im_start|>user\nHi there!<|im_end|>\n<|im_start|>assistant\nHello, you?<|im_end|>\n"
    size, answer, rest = (len(tokenizer.encode(text)) for text in (chat, "Hello, you?<|im_end|>", " there!"))
    counts = json.loads(run(data, "--model", model, "--json", "--documents", 1, "--seq-len", size - 1))
    assert (counts["documents"], counts["unusable"]) == (3, 1)
    assert counts["tokens"] == size + 2 + 1 + rest + 1
    assert counts["trained_tokens"] == answer + 2 + rest + 1
    assert counts["lengths"]["100"] == size and counts["lengths"]["0"] == 2
    # The last token of the chat (a line end) is cut, and the first token of "Hi" follows no token.
    assert counts["used_tokens"] == counts["tokens"] - 1 and counts["targets"] == counts["trained_tokens"] - 1
    assert counts["notes"] == {
        "have nothing to learn; they are left out": [1, 0],
        f"have more than seq_len ({size - 1}) tokens: truncated": [1, 1],
    }
    (shown,) = counts["shown"]
    assert shown["spans"][1] == {"text": "Hello, you?<|im_end|>", "is_trained": True} and shown["cut"] == 1
    dropped = json.loads(
        run(data, "--model", model, "--json", "--seq-len", size - 1, "--excess-length-strategy", "drop")
    )
    assert dropped["used_tokens"] == 2 + 1 + rest + 1 and dropped["notes"].popitem()[1] == [1, size]


def test_pairs_and_labels_are_shown_with_their_trained_tokens(model: Path, tmp_path: Path) -> None:
    end, data = "<|endoftext|>", tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "Hi", "chosen": " there!", "rejected": " you"}, 5]
    pairs.append({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "Hi"}]})
    data.write_text("".join(json.dumps(record) + "\n" for record in pairs))
    lines = run(data, "--model", model, "--objective", "dpo", "--documents", 1).split("\n")
    assert [line for line in lines if "⟦" in line] == [f"Hi⟦ there!{end}⟧", f"Hi⟦ you{end}⟧"]
    assert lines[0].startswith(f"{data}:1 chosen: ") and lines[3].startswith(f"{data}:1 rejected: ")
    assert ["documents", "2"] in [line.split() for line in lines]
    counts = json.loads(run(data, "--model", model, "--objective", "dpo", "--seq-len", 64, "--json"))
    sizes = [(shown["tokens"], shown["trained_tokens"]) for shown in counts["shown"]]
    assert len(sizes) == 4 and counts["unusable"] == 1 and counts["sequences"] == 1
    assert counts["tokens"] == counts["used_tokens"] == sum(size for size, _ in sizes)
    assert counts["trained_tokens"] == counts["targets"] == sum(trained for _, trained in sizes)
    assert counts["shown"][2]["spans"][1] == {"text": "Hello, you?<|im_end|>", "is_trained": True}

    labels = [{"prompt": "Hi", "completion": text, "label": text == " you"} for text in (" there!", " you")]
    data.write_text("".join(json.dumps(record) + "\n" for record in labels))
    shown = json.loads(run(data, "--model", model, "--objective", "kto", "--json"))["shown"]
    assert [(one["name"], one["spans"][1]["text"]) for one in shown] == [
        (f"{data}:1 undesirable", f" there!{end}"), (f"{data}:2 desirable", f" you{end}"),
    ]  # fmt: skip


def test_prompts_have_no_counts_of_what_is_trained_on(model: Path, data: Path) -> None:
    data.write_text('{"prompt": "Hi"}\n{"prompt": "Hi there, how are you today and tomorrow"}\n')
    sizes = ["--seq-len", 16, "--max-completion-length", 12]
    rows = run(data, "--model", model, "--objective", "grpo", "--documents", 0, *sizes)
    assert "trained on" not in rows and "sequences" not in rows and "tokens of a prompt: the longest" in rows
    assert "documents that have more than seq_len less max_completion_length (4) tokens: left out" in rows
    counts = json.loads(run(data, "--model", model, "--objective", "grpo", "--json", *sizes))
    assert counts["lengths"]["100"] > 4 and counts["documents"] == 2 and counts["sequences"] == 1


def test_colours_on_a_terminal(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert console.console().is_terminal
    out = run(data, "--model", model, "--documents", 1)
    assert "\x1b[32mHello, you?<|im_end|>\x1b[0m" in out and "⟦" not in out


@pytest.mark.usefixtures("one_thread")
def test_training_uses_the_same_tokens(tmp_path: Path) -> None:
    """The tokens that are counted are those of a run, also where chats are cut and a line is unusable."""
    make_base(tmp_path / "base")
    make_data(tmp_path / "data.jsonl")
    counts = json.loads(run(tmp_path / "data.jsonl", "--model", tmp_path / "base", "--json", "--seq-len", 16))
    assert counts["unusable"] == 1 and counts["used_tokens"] < counts["tokens"]
    settings = {"seq_len": 16, "batch_tokens": 512, "max_bad_lines": 1, "validation_fraction": 0, "dtype": "float32"}
    recipe = FineTuningRecipe(base=tmp_path / "base", data=tmp_path / "data.jsonl", **settings)
    said = list[str]()
    fine_tune(recipe, tmp_path / "out", console=Console(say=said.append))
    (tokens,) = (line.split(" tokens in ")[0].split()[-1] for line in said if " tokens in " in line)
    assert int(tokens.replace(",", "")) == counts["used_tokens"]
