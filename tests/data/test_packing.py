"""Packing: no chat is cut, every token once an epoch, full sequences, and a stream that resumes anywhere."""

import json
import math
import threading
import warnings
from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import template_of, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments, Tokens
from ligermodels.data.packing import PackedBatches, Prefetcher, RankBatches
from ligermodels.data.rows import best_fit_decreasing
from ligermodels.errors import InputError
from ligermodels.layers import shift_labels


class Made(TokenDocuments):
    """Documents of given lengths: document d is 100 d, 100 d + 1 ... A negative length is a document that is not split,
    of which only every third token, from the second on, has a label."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__([range(100 * d, 100 * d + abs(length)) for d, length in enumerate(lengths)])
        self.lengths, self.said = lengths, list[str]()
        self.notes.say = self.said.append

    def read(self, indices: Any) -> list[Tokens | None]:
        found = []
        for d in indices:
            ids, whole = self.documents[d], self.lengths[d] < 0
            labels = [-100 if whole and i % 3 != 1 else token for i, token in enumerate(ids)]
            found.append(Tokens(ids, labels, splits=not whole) if ids else None)
        return found


def stream(lengths: list[int], seq_len: int, batch_size: int = 1, **options: Any) -> PackedBatches:
    return PackedBatches(Made(lengths), seq_len=seq_len, batch_size=batch_size, **{"epochs": 1, **options})


def pieces(batch: Batch) -> list[list[int]]:
    return [batch["input_ids"][0, a:b].tolist() for a, b in pairwise(batch["cu_seqlens"].tolist())]


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def lengths_of(rows: list[list[list[int]]]) -> list[list[tuple[int, int, int]]]:
    """Pieces as (document, first token, number of tokens)."""
    return [[(piece[0] // 100, piece[0] % 100, len(piece)) for piece in row] for row in rows]


BY_HAND: dict[str, tuple[list[int], dict[str, Any], list[list[tuple[int, int, int]]], list[str]]] = {
    "chats: the largest first, each where it fits best; the fullest sequence first": (
        [-4, -5, -3, -2, -8, -6],
        {},
        [[(4, 0, 8)], [(5, 0, 6), (3, 0, 2)], [(1, 0, 5), (2, 0, 3)], [(0, 0, 4)]],
        [],
    ),
    "texts: in order, split to fill sequences": (
        [5, 6, 2, 9],
        {},
        [[(0, 0, 5), (1, 0, 3)], [(1, 3, 3), (2, 0, 2), (3, 0, 3)], [(3, 3, 6)]],
        [],
    ),
    "texts fill what chats leave": (
        [4, -5, 7, -6],
        {},
        [[(3, 0, 6), (0, 0, 2)], [(1, 0, 5), (0, 2, 2), (2, 0, 1)], [(2, 1, 6)]],
        [],
    ),
    "a sequence without a target is left out": ([9], {}, [[(0, 0, 8)]], []),
    "a document without a target is left out": (
        [-1, 3],
        {},
        [[(1, 0, 3)]],
        [
            "document 0: nothing to learn: no token is predicted from the tokens before it; such documents are counted",
            "1 documents in all have nothing to learn; they are left out",
        ],
    ),
    "too long: truncated": (
        [-11, -4, -20],
        {},
        [[(0, 0, 8)], [(2, 0, 8)], [(1, 0, 4)]],
        [
            "document 0: has 11 tokens, more than seq_len (8) tokens: truncated; such documents are counted",
            "2 documents in all have more than seq_len (8) tokens: truncated (15 tokens are left out)",
        ],
    ),
    "too long: dropped": (
        [-11, -4],
        {"excess_length_strategy": "drop"},
        [[(1, 0, 4)]],
        [
            "document 0: has 11 tokens, more than seq_len (8) tokens: left out; such documents are counted",
            "1 documents in all have more than seq_len (8) tokens: left out (11 tokens are left out)",
        ],
    ),
    "too long: split, without a last part that has no target": (
        [-11, -17],
        {"excess_length_strategy": "split"},
        [[(0, 0, 8)], [(1, 0, 8)], [(1, 8, 8)], [(0, 8, 3)]],
        [
            "document 0: has 11 tokens, more than seq_len (8) tokens: split; such documents are counted",
            "2 documents in all have more than seq_len (8) tokens: split (1 tokens are left out)",
        ],
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_sequences_written_by_hand(case: str) -> None:
    lengths, options, wanted, said = BY_HAND[case]
    source = stream(lengths, 8, **options)
    assert lengths_of([pieces(batch) for batch in source]) == wanted
    assert source._documents.said == said


def test_a_document_that_is_too_long_can_be_an_error() -> None:
    with pytest.raises(InputError, match=r"document 1: has 11 tokens, more than seq_len \(8\)"):
        next(stream([-4, -11], 8, excess_length_strategy="raise"))
    with pytest.raises(InputError, match="excess_length_strategy: must be one of truncate, drop, split, raise"):
        stream([-4], 8, excess_length_strategy="cut")


@given(sizes=st.lists(st.integers(1, 12), max_size=40), capacity=st.integers(12, 20))
def test_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    """Every item once, no row too full, and the bound that is proved for it: at most 11/9 of the best, and 6/9."""
    rows = best_fit_decreasing(sizes, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    filled = [sum(sizes[item] for item in row) for row in rows]
    assert all(size <= capacity for size in filled) and filled == sorted(filled, reverse=True)
    assert len(rows) <= 11 / 9 * math.ceil(sum(sizes) / capacity) + 1 or any(2 * size > capacity for size in sizes)


@pytest.mark.parametrize("seq_len", [1024, 2048, 4096])
def test_chats_fill_sequences_nearly_as_well_as_all_at_once(seq_len: int) -> None:
    """Chats of 625 tokens on average: at least 98 % of what is there, and of what best fit over all of them reaches."""
    sizes = np.random.default_rng(0).lognormal(math.log(450), 0.8, 1500).astype(int).clip(20, seq_len)
    documents = TokenDocuments([[0] * size for size in sizes], splits=False)
    count = sum(1 for _ in PackedBatches(documents, seq_len=seq_len, batch_size=1, seed=0, epochs=1))
    assert count <= len(best_fit_decreasing(sizes.tolist(), seq_len)) / 0.98
    assert sum(sizes) / seq_len / count >= 0.98


@given(
    lengths=st.lists(st.integers(-15, 15), min_size=1, max_size=9).filter(any),
    seq_len=st.integers(3, 11),
    batch_size=st.integers(1, 3),
    seed=st.none() | st.integers(-3, 3),
    epochs=st.integers(1, 3),
    at_once=st.integers(1, 3),
    ahead=st.integers(1, 3),
    excess=st.sampled_from(["truncate", "drop", "split"]),
)
def test_the_stream_is_exact_and_resumes_anywhere(
    lengths: list[int],
    seq_len: int,
    batch_size: int,
    seed: int | None,
    epochs: int,
    at_once: int,
    ahead: int,
    excess: str,
) -> None:
    options = {"seed": seed, "epochs": epochs, "excess_length_strategy": excess}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ligermodels.data.packing.AT_ONCE", at_once)
        patched.setattr("ligermodels.data.rows.ROWS_AHEAD", ahead)
        try:
            rows = [pieces(batch) for batch in stream(lengths, seq_len, **options)]
        except InputError as error:
            assert "nothing to learn in any of the" in str(error)
            return
        # Every token of a text once an epoch, but for a last sequence without a target; texts in order.
        tokens = Counter(token for row in rows for piece in row for token in piece)
        texts = {d: range(100 * d, 100 * d + n) for d, n in enumerate(lengths) if n > 1}
        assert sum(epochs - tokens[token] for text in texts.values() for token in text) <= epochs
        assert all(tokens[token] <= epochs for token in tokens)
        # Every chat once an epoch: whole, or its beginning, or in parts; without parts that have no target.
        parts = [(d, n, s) for d, n in enumerate(map(abs, lengths)) if lengths[d] < 0 for s in range(0, n, seq_len)]
        kept = [
            (d, s, min(seq_len, n - s))
            for d, n, s in parts
            if (n <= seq_len or excess == "split" or (excess == "truncate" and not s))
            and any(i % 3 == 1 for i in range(s + 1, min(n, s + seq_len)))
        ]
        chats = [piece for piece in chain(*lengths_of(rows)) if lengths[piece[0]] < 0]
        assert sorted(chats) == sorted(kept * epochs)
        assert all(0 < sum(map(len, row)) <= seq_len for row in rows)
        assert all(piece == list(range(piece[0], piece[0] + len(piece))) for row in rows for piece in row)
        # A batch is as many sequences, with the documents' labels and a target in each.
        source = stream(lengths, seq_len, batch_size, **options)
        batches, states = [], [source.state_dict()]
        for batch in source:
            batches.append(batch)
            states.append(json.loads(json.dumps(source.state_dict())))
        groups = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
        assert [pieces(batch) for batch in batches] == [[piece for row in group for piece in row] for group in groups]
        for batch in batches:
            ids, labels = batch["input_ids"], batch["labels"]
            whole = torch.tensor(lengths)[ids // 100] < 0
            assert torch.equal(labels, ids.masked_fill(whole & (ids % 100 % 3 != 1), -100))
            assert (shift_labels(labels, 1, batch["cu_seqlens"]) >= 0).any()
        for done, state in enumerate(states):
            again = stream(lengths, seq_len, batch_size, **options)
            next(again, None)
            again.load_state_dict(state)
            assert all(equal(a, b) for a, b in zip(again, batches[done:], strict=True))


def test_no_word_of_the_assistant_is_trained_on_without_its_prompt(tmp_path: Path) -> None:
    """Real chats through a template: each piece starts where its chat starts; targets are those of the chats alone."""
    tokenizer, template = tokenizer_of("qwen2.5", tmp_path), template_of("qwen2.5")
    rng = np.random.default_rng(0)
    say = lambda: " ".join(rng.choice(["Hi", "there", "How", "are", "you"], rng.integers(1, 12)))  # noqa: E731
    lines = [
        {"messages": [{"role": role, "content": say()} for _ in range(rng.integers(1, 4)) for role in ROLES]}
        for _ in range(60)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said: list[str] = []
    documents = Documents(Corpus([tmp_path / "chats.jsonl"]), tokenizer, lambda: template, on_bad_line=said.append)
    alone = [tokens for tokens in documents.read(range(60)) if tokens is not None]
    seq_len = int(np.quantile([len(tokens.ids) for tokens in alone], 0.9))
    found = Counter[tuple[int, ...]]()
    for batch in PackedBatches(documents, seq_len=seq_len, batch_size=2, seed=0, epochs=1):
        for a, b in pairwise(batch["cu_seqlens"].tolist()):
            assert batch["input_ids"][0, a] == alone[0].ids[0]
            found[tuple(batch["labels"][0, a:b].tolist())] += 1
    assert found == Counter(tuple(tokens.labels[:seq_len]) for tokens in alone)
    lost = sum(max(0, len(tokens.ids) - seq_len) for tokens in alone)
    assert lost and said[-1].endswith(f"truncated ({lost:,} tokens are left out)")


ROLES = ("user", "assistant")


@pytest.mark.parametrize(("strategy", "splits"), [(None, "0011"), ("bfd", "0001"), ("wrapped", "1111")])
def test_what_may_be_split(tmp_path: Path, strategy: Any, splits: str) -> None:
    """Chats, prompts with completions, texts in lines, pieces of a text file."""
    chat = {"messages": [{"role": role, "content": "Hi"} for role in ROLES]}
    lines = [chat, {"prompt": "Hi", "completion": " there"}, {"text": "Hi there"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("Hi there")
    corpus, tokenizer = Corpus([tmp_path / "a.jsonl", tmp_path / "b.txt"]), tokenizer_of("qwen2.5", tmp_path)
    documents = Documents(corpus, tokenizer, lambda: template_of("qwen2.5"), packing_strategy=strategy)
    assert "".join(str(int(tokens.splits)) for tokens in documents.read(range(4)) if tokens) == splits


def test_documents_in_memory() -> None:
    documents = TokenDocuments([[1, 2, 3], [], [4, 5, 6]])
    batch = next(PackedBatches(documents, seq_len=4, batch_size=2, epochs=1))
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3, 4, 5, 6]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6] and batch.where() == "document 0, document 2"
    chunks = TokenDocuments.chunks([range(5), range(1), range(10, 14)], 2)
    assert chunks.documents == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert chunks.fingerprint == TokenDocuments(chunks.documents).fingerprint != documents.fingerprint
    for convert in (np.array, torch.tensor):
        assert TokenDocuments(map(convert, chunks.documents)).fingerprint == chunks.fingerprint
    for indices in ([3, 0], torch.tensor([3, 0])):
        (batch,) = PackedBatches(chunks, indices, seq_len=4, batch_size=1, epochs=1)
        assert batch["input_ids"].tolist() == [[12, 13, 0, 1]]


def test_a_state_after_the_last_epoch_gives_nothing() -> None:
    first = stream([3, 3], 3, epochs=3)
    for _ in range(5):
        next(first)
    assert first.state_dict()["epoch"] == 2
    shorter = stream([3, 3], 3, epochs=1)
    shorter.load_state_dict(first.state_dict())
    assert not list(islice(shorter, 3))


def test_orders_differ_by_seed_and_by_epoch() -> None:
    documents = Made([3] * 50)

    def starts(seed: int | None) -> list[list[int]]:
        source = PackedBatches(documents, np.arange(0, 50, 2), seq_len=5, batch_size=3, seed=seed, epochs=2)
        tokens = [token for batch in source for token in batch["input_ids"][0].tolist()]
        found = [token // 100 for token in tokens if token % 100 == 0]
        return [found[:25], found[25:]]

    orders = [*starts(0), *starts(1), starts(None)[0]]
    assert all(sorted(order) == list(range(0, 50, 2)) for order in orders)
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert starts(0) == starts(0)


def test_a_stream_of_nothing_or_of_something_else_is_an_error() -> None:
    for lengths in ([0, 0], [-1, 1]):
        with pytest.raises(InputError, match="nothing to learn in any of the 2"):
            next(stream(lengths, 5))
    with pytest.raises(InputError, match="no document"):
        PackedBatches(Made([3]), np.arange(0), seq_len=5, batch_size=1)
    for sizes, message in (((1, 1), "seq_len: .* at least 2, got 1"), ((5, "1"), "batch_size: .* at least 1, got '1'")):
        with pytest.raises(InputError, match=message):
            PackedBatches(Made([3, 3]), seq_len=sizes[0], batch_size=sizes[1])
    state = stream([3, 3], 5, seed=1).state_dict()
    for other in (stream([3, 3], 5, seed=2), stream([3], 5, seed=1), stream([3, 33], 5, seed=1)):
        with pytest.raises(InputError, match="differs from the start of the run"):
            other.load_state_dict(state)
    del state["pool"]
    with pytest.raises(InputError, match="another version, without 'pool'"):
        stream([3, 3], 5, seed=1).load_state_dict(state)


def test_ranks_divide_the_batches() -> None:
    """Every batch on one rank; where they do not divide, the other ranks get one without targets."""
    wanted = list(stream([-3, 8, -5], 5, 1))
    shares = [list(RankBatches(stream([-3, 8, -5], 5, 1), rank, 2)) for rank in range(2)]
    assert len(wanted) % 2 and len(shares[0]) == len(shares[1]) == (len(wanted) + 1) // 2
    for i, batch in enumerate(wanted):
        assert equal(shares[i % 2][i // 2], batch)
    assert (shares[1][-1]["labels"] == -100).all()


def test_batches_made_ahead_are_the_same() -> None:
    def source() -> PackedBatches:
        return stream([3, -8, -1, 5, -4], 5, seed=1, epochs=3)

    plain, states = source(), []
    wanted = [(batch, plain.state_dict()) for batch in plain]
    ahead = Prefetcher(source())
    for batch, state in wanted:
        states.append(ahead.state_dict())
        assert equal(next(ahead), batch) and ahead.state_dict() == state
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    again = Prefetcher(source())
    again.load_state_dict(states[4])
    assert [b["input_ids"].tolist() for b in again] == [b["input_ids"].tolist() for b, _ in wanted[4:]]
    with pytest.raises(InputError, match="taken already"):
        again.load_state_dict(states[4])


def test_batches_are_pinned_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor + 1

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    (batch,) = stream([3], 5)
    assert torch.equal(next(Prefetcher(stream([3], 5), pin_memory=True))["input_ids"], batch["input_ids"] + 1)
    assert len(threads) == len(batch) and {name.split("_")[0] for name in threads} == {"batches"}


def test_errors_of_the_thread_arrive() -> None:
    ahead = Prefetcher(stream([0], 5))
    with pytest.raises(InputError, match="nothing to learn"):
        next(ahead)


def test_a_warning_without_a_callback() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(PackedBatches(TokenDocuments([[1] * 9], splits=False), seq_len=5, batch_size=1, epochs=1))
    assert len(caught) == 2 and "truncated" in str(caught[0].message)
