"""Preference data: the records of the hub's data sets, and which tokens of a batch count, written out by hand."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import save_template, tokenizer_of

from ligermodels.data.examples import ExampleBatches, Examples
from ligermodels.data.pairs import read_labelled, read_pair
from ligermodels.data.records import Completion
from ligermodels.errors import InputError

U, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
B, S = {"role": "assistant", "content": "No."}, {"role": "system", "content": "Be kind."}
CHAT = [[U, A], {}], [[U, B], {}]


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": who, "value": text} for who, text in zip(("human", "gpt"), texts, strict=False)]


PAIRS: dict[str, tuple[dict[str, Any], Any]] = {
    "TRL, text": (
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        (Completion("2 + 2 =", " 4"), Completion("2 + 2 =", " 5")),
    ),
    "TRL, turns": ({"prompt": [U], "chosen": [A], "rejected": [B]}, CHAT),
    "TRL, implicit": ({"chosen": [U, A], "rejected": [U, B]}, CHAT),
    "TRL, implicit text": (
        {"chosen": "Human: Hi Bot: Hello!", "rejected": "Human: Hi Bot: No."},
        (Completion("Human: Hi Bot:", " Hello!"), Completion("Human: Hi Bot:", " No.")),
    ),
    "UltraFeedback": (
        {"prompt": "Hi", "prompt_id": "7", "chosen": [U, A], "rejected": [U, B], "messages": [U, A], "score": 9.0},
        CHAT,
    ),
    "a prompt as a text and answers as turns": ({"prompt": "Hi", "chosen": [A], "rejected": [B]}, CHAT),
    "a prompt as turns and answers as texts": ({"prompt": [U], "chosen": "Hello!", "rejected": "No."}, CHAT),
    "a prompt that both sides repeat": ({"prompt": [U], "chosen": [U, A], "rejected": [U, B]}, CHAT),
    "Orca": (
        {"system": "Be kind.", "question": "Hi", "chosen": "Hello!", "rejected": "No."},
        ([[S, U, A], {}], [[S, U, B], {}]),
    ),
    "a system prompt beside texts": (
        {"system": "Be kind.", "prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
        ([[S, U, A], {}], [[S, U, B], {}]),
    ),
    "Alpaca": ({"instruction": "Hi", "input": "", "chosen": "Hello!", "rejected": "No."}, CHAT),
    "a prompt twice": ({"prompt": "Hi", "question": "Hi", "chosen": [U, A], "rejected": [U, B]}, CHAT),
    "distilabel": ({"input": "Hi", "chosen": "Hello!", "rejected": "No.", "generations": ["x"]}, CHAT),
    "LLaMA-Factory": (
        {"conversations": turns("Hi"), "chosen": turns("", "Hello!")[1], "rejected": turns("", "No.")[1]},
        CHAT,
    ),
    "ms-swift": ({"messages": [U, A], "rejected_response": "No."}, CHAT),
    "ms-swift, turns": ({"messages": [U, A], "rejected_messages": [U, B]}, CHAT),
    "an earlier answer is not trained on": (
        {"chosen": [U, B, U, A], "rejected": [U, B, U, B]},
        ([[U, {**B, "weight": 0}, U, A], {}], [[U, {**B, "weight": 0}, U, B], {}]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    record, (chosen, rejected) = PAIRS[name]
    found, unused = read_pair(record)
    for ours, wanted in zip(found, (chosen, rejected), strict=True):
        assert ours == wanted if isinstance(wanted, Completion) else list(ours) == wanted
    assert set(unused) <= {"prompt_id", "messages", "score", "generations"}


LABELLED: dict[str, tuple[dict[str, Any], list[tuple[Any, bool]]]] = {
    "TRL": ({"prompt": "Hi", "completion": " ho", "label": True}, [(Completion("Hi", " ho"), True)]),
    "TRL, turns": ({"prompt": [U], "completion": [B], "label": False}, [(([U, B], {}), False)]),
    "numbers": ({"prompt": "Hi", "completion": " ho", "label": 0}, [(Completion("Hi", " ho"), False)]),
    "texts of a table": ({"prompt": "Hi", "completion": " ho", "label": "False"}, [(Completion("Hi", " ho"), False)]),
    "LLaMA-Factory": ({"messages": [U, A], "kto_tag": True}, [(([U, A], {}), True)]),
    "LLaMA-Factory, Alpaca": (
        {"instruction": "Hi", "input": "", "output": "No.", "history": [["Hi", "Hello!"]], "kto_tag": "false"},
        [(([U, {**A, "weight": 0}, U, B], {}), False)],
    ),
    "ShareGPT": ({"conversations": turns("Hi", "No."), "label": False}, [(([U, B], {}), False)]),
    "a pair": ({"chosen": [U, A], "rejected": [U, B]}, [(([U, A], {}), True), (([U, B], {}), False)]),
    "two formats": ({"messages": [U, A], "prompt": "x", "completion": "y", "label": True}, [(([U, A], {}), True)]),
}


@pytest.mark.parametrize("name", LABELLED)
def test_completions_with_labels(name: str) -> None:
    record, wanted = LABELLED[name]
    found, unused = read_labelled(record)
    assert [tuple(each) for each in found] == wanted
    assert unused == (["prompt", "completion"] if name == "two formats" else [])


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (read_pair, {"prompt": "a", "chosen": "b"}, 'has no "rejected"; .* its fields are: prompt, chosen'),
        (read_pair, {"messages": [U, A]}, 'has no "chosen"'),
        (read_pair, {"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        (read_pair, {"prompt": "a", "chosen": "b", "rejected": ""}, "a completion is empty"),
        (read_labelled, {"prompt": "a", "completion": "", "label": False}, "a completion is empty"),
        (read_pair, {"prompt": "a", "question": "b", "chosen": "c", "rejected": "d"}, "several prompts"),
        (read_pair, {"chosen": [A], "rejected": [B]}, 'there is no "prompt"'),
        (read_pair, {"prompt": 1, "chosen": "c", "rejected": "d"}, '"prompt" must be'),
        (read_pair, {"prompt": "a", "chosen": 1, "rejected": "d"}, '"chosen" and "rejected" must be'),
        (read_pair, {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, '"images" is not text'),
        (read_pair, {"prompt": [U], "chosen": [A], "rejected": [{"role": "bot", "content": "x"}]}, "unknown role"),
        (read_labelled, {"prompt": "a", "completion": "b"}, 'has no "label"'),
        (read_labelled, {"prompt": "a", "completion": "b", "label": "good"}, '"label" must be true or false'),
        (
            read_labelled,
            {"prompt": "a", "completion": "b", "label": 1, "kto_tag": False},
            '"label" and "kto_tag" differ',
        ),
        (read_labelled, {"prompt": "a", "label": True}, 'has no "completion"'),
    ],
)
def test_a_record_that_is_none_is_an_error_that_names_the_field(read: Any, record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(record)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a token for each of these characters, and EOS 0."""
    tokenizer_of("qwen2.5", tmp_path)
    save_template("qwen2.5", tmp_path)
    eos = tokenizer_of("qwen2.5", tmp_path).backend.token_to_id("<|endoftext|>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    return tmp_path


def batches(
    folder: Path, records: list[dict[str, Any]], form: str, seq_len: int = 40, **options: Any
) -> ExampleBatches:
    file = options.pop("file", folder / "data.jsonl")
    if file.suffix == ".csv":
        with file.open("w", newline="") as table:
            rows = csv.DictWriter(table, records[0])
            rows.writeheader()
            rows.writerows(records)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    own = {name: options.pop(name) for name in ("mismatched", "excess_length_strategy") if name in options}
    documents: Any = Examples.of_checkpoint(folder, [file], form=form, seq_len=seq_len, **own)
    documents.notes.say = documents.said = [].append  # type: ignore[attr-defined]
    return ExampleBatches(documents, seq_len=4 * seq_len, batch_size=1, epochs=1, **options)


def counted(batch: Any, documents: Any) -> list[tuple[str, str]]:
    """Of each sequence its text, and the text of the tokens of its completion."""
    ids, bounds, decode = batch["input_ids"][0], batch["cu_seqlens"].tolist(), documents.tokenizer
    found = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own = batch["targets"][i][batch["completion_mask"][i]] + 1
        assert ((start < own) & (own < end)).all()
        found.append(("".join(map(name(decode), ids[start:end])), "".join(map(name(decode), ids[own]))))
    return found


def name(tokenizer: Any) -> Any:
    return lambda token: tokenizer.backend.id_to_token(int(token)).replace("Ġ", " ").replace("Ċ", "\n")


def test_the_tokens_of_a_pair(folder: Path) -> None:
    """The chosen sequences, then the rejected ones; the completion and its end count."""
    user, chosen = {"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}
    records = [
        {"prompt": [user], "chosen": [chosen], "rejected": [{**chosen, "content": "d"}]},
        {"prompt": "ab", "chosen": " c", "rejected": " de"},
    ]
    made = batches(folder, records, "pairs", seq_len=90)
    (batch,) = made
    pairs = {row: counted(batch, made._documents)[i::2] for i, row in enumerate(batch["examples"][:, 0].tolist())}
    ((whole, own), (_, other)) = pairs[0]
    assert whole.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n")
    assert (own, other) == ("bc<|im_end|>", "d<|im_end|>")
    assert pairs[1] == [("ab c<|endoftext|>", " c<|endoftext|>"), ("ab de<|endoftext|>", " de<|endoftext|>")]
    assert (batch["labels"][0][batch["targets"][batch["targets"] >= 0] + 1] != -100).all()
    assert (batch["labels"] != -100).sum() == (batch["targets"] >= 0).sum()


@pytest.mark.parametrize("write", [json.dumps, str])
def test_turns_in_cells_of_a_table(folder: Path, write: Any) -> None:
    sides = ([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in ("bc", "d"))
    record = dict(zip(("chosen", "rejected"), map(write, sides), strict=True))
    made = batches(folder, [record], "pairs", seq_len=90, file=folder / "pairs.csv")
    (batch,) = made
    ((whole, own), (_, other)) = counted(batch, made._documents)
    assert whole.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n")
    assert (own, other) == ("bc<|im_end|>", "d<|im_end|>")


@pytest.mark.parametrize("form", ["pairs", "unpaired"])
def test_batches_are_on_the_cpu_under_another_default_device(folder: Path, form: str) -> None:
    records = [{"prompt": "ab", "chosen": "cd", "rejected": "e"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    made = batches(folder, records, form, mismatched=form == "unpaired")
    made._examples.reference = np.zeros((2, 4))
    with torch.device("meta"):
        (batch,) = made
    assert {tensor.device.type for tensor in batch.values()} == {"cpu"} and "ref_log_probs" in batch


def test_prompts_of_chosen_sequences_count_for_orpo(folder: Path) -> None:
    """All tokens but the first of the chosen sequence have a label; of the rejected one those of the completion."""
    made = batches(folder, [{"prompt": "ab", "chosen": "c", "rejected": "d"}], "pairs", prompt_targets=True)
    (batch,) = made
    assert counted(batch, made._documents) == [
        ("abc<|endoftext|>", "c<|endoftext|>"),
        ("abd<|endoftext|>", "d<|endoftext|>"),
    ]
    ids = batch["input_ids"][0].tolist()
    assert batch["labels"][0].tolist() == [-100, *ids[1:4], -100, -100, *ids[6:]]
    assert batch["targets"].tolist() == [[0, 1, 2], [5, 6, -1]]
    assert batch["completion_mask"].tolist() == [[False, True, True], [True, True, False]]


def test_mismatched_completions_for_kto(folder: Path) -> None:
    """The prompt of each record with the completion of the record before it; unusable records are skipped."""
    records = [{"prompt": p, "completion": c, "label": p == "b"} for p, c in zip("abd", ("e", " f", "gh"), strict=True)]
    made = batches(folder, [records[0], {"prompt": "x"}, *records[1:]], "unpaired", mismatched=True)
    documents: Any = made._documents
    documents._max_bad_lines = 1
    (batch,) = made
    rows = batch["examples"][:, 0].tolist()
    assert batch["desirable"].tolist() == [row == 2 for row in rows]
    found = dict(zip(rows, counted(batch, documents), strict=True))
    assert {row: own for row, (_, own) in found.items()} == {
        0: "e<|endoftext|>", 2: " f<|endoftext|>", 3: "gh<|endoftext|>",
    }  # fmt: skip
    ids, labels = batch["kl_input_ids"][0], batch["kl_labels"][0]
    assert torch.equal(labels[labels != -100], ids[labels != -100])
    sizes = batch["kl_cu_seqlens"].diff().tolist()
    whole, own = (
        ["".join(map(name(documents.tokenizer), part[part >= 0])) for part in row.split(sizes)] for row in (ids, labels)
    )
    assert dict(zip(rows, zip(whole, own, strict=True), strict=True)) == {
        0: ("agh<|endoftext|>", "gh<|endoftext|>"),
        2: ("be<|endoftext|>", "e<|endoftext|>"),
        3: ("d f<|endoftext|>", " f<|endoftext|>"),
    }


def test_long_sequences(folder: Path) -> None:
    """As TRL's "keep_start": the first tokens remain; a pair without a token of one completion is left out."""
    records = [
        {"prompt": "ab", "chosen": "cdefgh", "rejected": "c"},
        {"prompt": "abcdefgh", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    made = batches(folder, records, "pairs", seq_len=5)
    (batch,) = made
    assert sorted(batch["examples"][:, 0].tolist()) == [0, 2]
    found = dict(zip(batch["examples"][:, 0].tolist(), counted(batch, made._documents), strict=False))
    assert found[0] == ("abcde", "cde")
    reason = "have more than seq_len (5) tokens: "
    assert made._documents.notes.totals()[f"{reason}truncated"] == (2, 4 + 5 + 5)
    made = batches(folder, records, "pairs", seq_len=5, excess_length_strategy="drop")
    (batch,) = made
    assert batch["examples"][:, 0].tolist() == [2]
    assert made._documents.notes.totals()[f"{reason}left out"] == (2, 9 + 4 + 10 + 10)
    made = batches(folder, records, "unpaired", seq_len=5, excess_length_strategy="drop")
    assert sorted(len(row) for batch in made for row in batch["examples"]) == [2, 2, 2]
    assert made._documents.notes.totals()[f"{reason}left out"] == (2, 9 + 10 + 10)
    with pytest.raises(InputError, match=r"data\.jsonl:1: has 9 tokens, more than seq_len \(5\)"):
        list(batches(folder, records, "pairs", seq_len=5, excess_length_strategy="raise"))


def test_a_stream_of_pairs_resumes_anywhere(folder: Path) -> None:
    records = [{"prompt": "a" * (1 + i % 5), "chosen": "b" * (1 + i % 3), "rejected": "c"} for i in range(23)]
    options: dict[str, Any] = {"seq_len": 10, "seed": 3}
    whole = list(batches(folder, records, "pairs", **options))
    assert sorted(row for batch in whole for row in batch["examples"][:, 0].tolist()) == list(range(23))
    for taken in (1, len(whole) - 1):
        first = batches(folder, records, "pairs", **options)
        for _ in range(taken):
            next(first)
        state = json.loads(json.dumps(first.state_dict()))
        second = batches(folder, records, "pairs", **options)
        second.load_state_dict(state)
        rest = list(second)
        assert len(rest) == len(whole) - taken
        for ours, wanted in zip(rest, whole[taken:], strict=True):
            assert ours.keys() == wanted.keys() and all(torch.equal(ours[key], wanted[key]) for key in wanted)
