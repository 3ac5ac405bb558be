"""Streamed data: the documents of the index, in bounded memory, resumed at the exact document."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.data import streaming
from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.packing import PackedBatches
from ligermodels.data.streaming import StreamedCorpus, Windowed
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import InputError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of("qwen2.5", tmp_path_factory.mktemp("streaming"))


def files_in(folder: Path) -> list[Path]:
    """Lines, with blank ones and without a line end at the end; nothing; and texts."""
    names = ["a.jsonl", "empty.jsonl", "b.txt", "c.jsonl", "d.txt", "empty.txt"]
    contents = [
        "\n".join(json.dumps({"text": f"Hi {i} " * (i % 7 + 1)}) + "\n" * (i % 3) for i in range(60)),
        "",
        "".join(f"é{i} 漢 " + "\n" * (i % 5 == 0) for i in range(200)),
        "\n  \n" + "".join(json.dumps({"text": f"there {i}"}) + "\n" for i in range(30)),
        "x" * 100,
        "",
    ]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in names]


def all_of(corpus: StreamedCorpus) -> list[int]:
    return [index for number in range(corpus.num_files) for index in corpus.starts(number)]


def test_documents_are_those_of_the_index(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    indexed, streamed = Corpus(files, piece=32), StreamedCorpus(files, piece=32)
    indices = all_of(streamed)
    assert [streamed.read(i) for i in indices] == [indexed.read(i) for i in range(len(indexed))]
    assert [streamed.name(i) for i in indices] == [indexed.name(i) for i in range(len(indexed))]
    assert streamed.fingerprint == indexed.fingerprint
    assert [list(lines) for lines in streamed.files_of_lines()] == [indices[:60], [], indices[-34:-4]]


@given(text=st.text(st.sampled_from("a\né漢😀"), max_size=60), size=st.integers(4, 20))
def test_pieces_can_be_read_from_any_place(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "text"
    path.write_text(text, encoding="utf-8", newline="")
    indexed, streamed = Corpus([path], piece=size), StreamedCorpus([path], piece=size)
    starts = list(streamed.starts(0))
    assert [streamed.read(i) for i in starts] == [indexed.read(i) for i in range(len(indexed))]
    for number, start in enumerate(starts):
        assert list(streamed.starts(0, start)) == starts[number:]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_an_order_has_each_document_once_and_goes_on_from_any_place(tmp_path: Path, seed: Any, window: int) -> None:
    corpus = StreamedCorpus(files_in(tmp_path), piece=32)
    validation = corpus.validation(0.2, seed=1)
    order = Windowed(corpus, validation, window)
    epochs = [list(order.documents(seed, epoch, 0)) for epoch in range(2)]
    for epoch in epochs:
        assert sorted([*(index for index, _ in epoch), *validation]) == sorted(all_of(corpus))
    orders = [[index for index, _ in epoch] for epoch in epochs]
    assert (orders[0] == orders[1] == sorted(orders[0])) == (seed is None)
    assert orders[0] == [index for index, _ in order.documents(seed, 0, 0)]
    count = len(epochs[1])
    for number in sorted({0, 1, *range(2, count, 5), count - 2, count - 1}):
        place = json.loads(json.dumps(epochs[1][number][1]))
        assert list(order.documents(seed, 1, place)) == epochs[1][number + 1 :]


def test_the_validation_split_is_of_the_first_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST", 40)
    corpus = StreamedCorpus(files_in(tmp_path), piece=32)
    first = all_of(corpus)[:40]
    validation = corpus.validation(0.25, seed=0)
    assert len(validation) == 10 and set(validation.tolist()) < set(first)
    assert np.array_equal(validation, corpus.validation(0.25, seed=0))
    assert not np.array_equal(validation, corpus.validation(0.25, seed=1))
    assert not len(corpus.validation(0, seed=0))
    (tmp_path / "one.jsonl").write_text("{}")
    with pytest.raises(InputError, match="too few to split"):
        StreamedCorpus([tmp_path / "one.jsonl"]).validation(0.1, 0)


def batches_of(corpus: StreamedCorpus, tokenizer: Tokenizer, window: int = 20) -> PackedBatches:
    order = Windowed(corpus, corpus.validation(0.1, 0), window)
    return PackedBatches(Documents(corpus, tokenizer), order, seq_len=24, batch_size=2, seed=0, epochs=2)


def ids(batch: Batch) -> list[int]:
    found: list[int] = batch["input_ids"][0].tolist()
    return found


def test_batches_resume_at_the_exact_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = StreamedCorpus(files_in(tmp_path), piece=32)
    rows = [ids(batch) for batch in batches_of(corpus, tokenizer)]
    state: dict[str, Any] = {}
    for stop in (1, len(rows) // 2, len(rows) - 1):
        batches = batches_of(corpus, tokenizer)
        assert [ids(next(batches)) for _ in range(stop)] == rows[:stop]
        state = json.loads(json.dumps(batches.state_dict()))
        again = batches_of(corpus, tokenizer)
        again.load_state_dict(state)
        assert [ids(batch) for batch in again] == rows[stop:]
    with pytest.raises(InputError, match="documents was"):
        batches_of(corpus, tokenizer, window=21).load_state_dict(state)

    def count(indices: Any) -> Counter[int]:
        found = Documents(corpus, tokenizer).read(indices)
        usable = [document.ids for document in found if document and len(document.ids) > 1]
        return Counter(token for document in usable for token in document)

    trained = count(all_of(corpus)) - count(corpus.validation(0.1, 0))
    assert Counter(token for row in rows for token in row) == trained + trained  # two epochs


def test_memory_does_not_grow_with_the_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = json.dumps({"text": "Hi there you are"}) + "\n"
    peaks = []
    for count in (2_000, 30_000):
        (tmp_path / "lines.jsonl").write_text(line * count)
        tracemalloc.start()
        corpus = StreamedCorpus([tmp_path / "lines.jsonl"])
        order = Windowed(corpus, corpus.validation(0, 0), 500)
        assert sum(1 for _ in order.documents(0, 0, 0)) == count
        batches = PackedBatches(Documents(corpus, tokenizer), order, seq_len=64, batch_size=1, seed=0)
        for _ in range(50):
            next(batches)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 100_000
