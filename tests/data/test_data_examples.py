"""The examples in the docstrings of `ligermodels.data` run, and print the results that they show."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tokenizer_of
from tokenizers import decoders

from ligermodels.data import chat, corpus, documents, files, orders, packing, pairs, records, tokenizer
from ligermodels.generation import text_stream

MODULES = (chat, corpus, documents, files, orders, packing, pairs, records, text_stream, tokenizer)
NAMES: dict[str, Any] = {"Path": Path} | {name: item for module in MODULES for name, item in vars(module).items()}
EXAMPLES = [example for module in MODULES for example in doctest.DocTestFinder().find(module) if example.examples]
TEMPLATE = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds a checkpoint, a file of chats and a text in its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "MODEL").mkdir()
    backend = tokenizer_of("qwen2.5", tmp_path / "MODEL").backend
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "MODEL" / "tokenizer.json"))
    (tmp_path / "MODEL" / "config.json").write_text("{}")
    (tmp_path / "MODEL" / "chat_template.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "book.txt").write_text("Once upon a time\n")
    example.globs = dict(NAMES)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_classes_of_the_reference_have_examples() -> None:
    documented = {example.name.removeprefix("ligermodels.").removeprefix("data.") for example in EXAMPLES}
    expected = "tokenizer.Tokenizer tokenizer.Tokenizer.from_pretrained generation.text_stream.TextStream"
    expected += " chat.ChatTemplate chat.encode_chat records.parse_line corpus.Corpus documents.Documents"
    expected += " documents.TokenDocuments"
    assert {*expected.split(), "documents.Documents.of_checkpoint", "packing.PackedBatches"} <= documented
