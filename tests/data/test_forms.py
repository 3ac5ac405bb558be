"""Each form of data as a small file in tests/data/forms, with the tokens that are trained on written out by hand."""

import gzip
import json
from pathlib import Path

import pytest
import tokenizers
from chat_templates import tokenizer_of
from transformers import AutoTokenizer

from ligermodels.data.documents import Documents
from ligermodels.data.survey import spans

FORMS = Path(__file__).parent / "forms"
END = "<|endoftext|>"


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
EXPECTED = {
    "alpaca.json": [
        user("Do\nit") + "[Yes<|im_end|>]\n",
        BRIEF + user("Hi") + "[Hello<|im_end|>]\n" + user("Who?") + "[Me<|im_end|>]\n",
    ],
    "chats.jsonl": [
        BRIEF + user("Hi") + "[Hello<|im_end|>]\n",
        user("Hi") + "No<|im_end|>\n" + user("Who?") + "[Me<|im_end|>]\n",
    ],
    "sharegpt.json": [
        BRIEF + user("Hi") + "[Hello<|im_end|>]\n",
        f"{user('Hi')}[{CALL}]\n{user('')}".replace(
            "user\n<|im_end|>", "user\n<tool_response>\n5\n</tool_response><|im_end|>"
        ) + "[It is 5<|im_end|>]\n",
    ],
    "completions.csv": [f"Hi, you[é{END}]", f"two\nlines[ three{END}]"],
    "questions.tsv": [user("Who?") + "[Me<|im_end|>]\n"],
    "conversational.jsonl": [user("Hi") + "No<|im_end|>\n" + user("Who?") + "[Me<|im_end|>]\n"],
    "texts.jsonl": [f"[Hello there{END}]", "[cut of]"],
    "dolly.jsonl": [user("Do\nit") + "[Yes<|im_end|>]\n"],
    "page.md": [f"[# Hi\n\nHello, you?\n{END}]"],
}  # fmt: skip
"""File -> its documents as text, with brackets around the tokens that are trained on."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of("qwen2.5", folder)
    tokenizer.backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.backend.token_to_id(END)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def check(model: Path, file: Path, expected: list[str]) -> None:
    documents = Documents.of_checkpoint(model, [file], chat_template="chatml", on_bad_line=str)
    found = documents.read(range(len(documents)))
    by_transformers = AutoTokenizer.from_pretrained(model)
    for tokens, marked in zip(found, expected, strict=True):
        parts = spans(tokens, documents.tokenizer)
        assert "".join(f"[{part.text}]" if part.is_trained else part.text for part in parts) == marked
        plain = marked.replace("[", "").replace("]", "")
        assert tokens.ids == by_transformers(plain, add_special_tokens=False).input_ids


@pytest.mark.parametrize("name", EXPECTED)
def test_the_tokens_of_a_form(model: Path, name: str, tmp_path: Path) -> None:
    check(model, FORMS / name, EXPECTED[name])
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((FORMS / name).read_bytes()))
    check(model, tmp_path / f"{name}.gz", EXPECTED[name])


def test_all_forms_are_checked() -> None:
    assert {path.name for path in FORMS.iterdir()} == EXPECTED.keys()


@pytest.mark.parametrize("name", ["chats.jsonl", "conversational.jsonl", "texts.jsonl"])
def test_the_tokens_of_parquet(model: Path, name: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [json.loads(line) for line in (FORMS / name).read_text().splitlines()]
    columns = {key: [record.get(key) for record in records] for record in records for key in record}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    check(model, tmp_path / "a.parquet", EXPECTED[name])


def test_a_folder_of_all_forms(model: Path) -> None:
    check(model, FORMS, [text for name in sorted(EXPECTED) for text in EXPECTED[name]])
