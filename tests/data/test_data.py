"""Data from disk: every document found and named, every token once, and a stream that goes on from any place."""

import io
import json
import math
import re
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from chat_templates import add_bos, template_of, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.data import corpus
from ligermodels.data.chat import ChatTemplate, encode_chat
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.orders import permutation
from ligermodels.data.packing import PackedBatches
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError

CHAT = [{"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Hello, you?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Qwen2.5's manner, with a BOS that texts start with."""
    found = tokenizer_of("qwen2.5", tmp_path_factory.mktemp("data"))
    add_bos(found, "<|endoftext|>")
    return found


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# -- files -------------------------------------------------------------------------------------------------------------


def test_lines_are_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "\xc3\xa9"}\r\n   \nnot json\n\n[3]')
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes("é\nthe whole".encode())
    (tmp_path / "d.jsonl").write_bytes(b"last\n")
    found = Corpus(tmp_path / f"{name}" for name in ("a.jsonl", "b.jsonl", "c.txt", "d.jsonl"))
    assert [found.read(i)[0].strip().decode() for i in range(len(found))] == [
        '{"text": "é"}', "not json", "[3]", "é\nthe whole", "last",
    ]  # fmt: skip
    names = [found.name(i).removeprefix(f"{tmp_path}/") for i in range(len(found))]
    assert names == ["a.jsonl:2", "a.jsonl:4", "a.jsonl:6", "c.txt:1", "d.jsonl:1"]
    assert [found.read(i)[1:] for i in (0, 3)] == [(True, True, True), (False, True, True)]


def test_names_in_any_order_do_not_read_the_file_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in a random order, and each is named."""
    monkeypatch.setattr(corpus, "COUNTED_AGAIN", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' * 1000)
    found, num_bytes = Corpus([tmp_path / "a.jsonl"]), 0

    class Counting(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal num_bytes
            num_bytes += len(content := super().read(size) or b"")
            return content

    monkeypatch.setattr(corpus, "open_file", lambda path, _: Counting(path))
    order = permutation(len(found), 0, "names").tolist()
    assert [found.name(i) for i in order] == [f"{tmp_path}/a.jsonl:{1 + 2 * i}" for i in order]
    assert num_bytes < 20 * (tmp_path / "a.jsonl").stat().st_size


@given(text=st.text(st.sampled_from("a\né漢😀"), max_size=60), size=st.integers(4, 20))
def test_texts_come_in_whole_pieces(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "text"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus, "PIECE", size)
        found = Corpus([path])
    pieces = [found.read(i) for i in range(len(found))]
    contents = [content.decode() for content, *_ in pieces]
    assert "".join(contents) == text and all(contents)
    assert all(len(content) <= 2 * size + 3 for content, *_ in pieces)
    assert [starts for _, _, starts, _ in pieces] == [i == 0 for i in range(len(pieces))]
    assert [ends for *_, ends in pieces] == [i == len(pieces) - 1 for i in range(len(pieces))]
    whole, cut = text.encode(), 0
    for content, *_ in pieces[:-1]:
        cut += len(content)
        chunk = whole[(cut - 1) // size * size :][:size]
        assert content.endswith(b"\n") or b"\n" not in chunk


@pytest.mark.parametrize("piece", [32, 1 << 15])
def test_texts_of_windows_are_as_others(tmp_path: Path, tokenizer: Tokenizer, piece: int) -> None:
    """A byte order mark is no part of a text, and all line ends are \\n, as in text files that Python opens."""
    text = "one\ntwo three\n\n\ufefffour five\n" * 9
    wanted = list[int]()
    for name, end in (("plain", "\n"), ("windows", "\r\n"), ("old", "\r"), ("mixed", None)):
        written = text.replace("\n\n", "\r\r\n").replace("two", "\rtwo") if end is None else text.replace("\n", end)
        (tmp_path / name).write_bytes(written.encode("utf-8-sig"))
        documents = Documents(Corpus([tmp_path / name], piece=piece), tokenizer)
        content = "".join(str(documents.content(i).record()[0].completion) for i in range(len(documents)))
        assert content == (text.replace("two", "\ntwo") if end is None else text)
        ids = [token for tokens in documents.read(range(len(documents))) if tokens for token in tokens.ids]
        if name in ("plain", "windows"):  # pieces end at the same lines
            assert ids and (not wanted or ids == wanted)
            wanted = ids


@pytest.mark.parametrize("before", range(24, 40))
def test_a_line_end_of_two_characters_is_in_one_piece(tmp_path: Path, tokenizer: Tokenizer, before: int) -> None:
    (tmp_path / "text").write_bytes(b"a" * before + b"\r\n" + b"b" * 70)
    documents = Documents(Corpus([tmp_path / "text"], piece=32), tokenizer)
    texts = [str(documents.content(i).record()[0].completion) for i in range(len(documents))]
    assert "".join(texts) == "a" * before + "\n" + "b" * 70 and len(texts) > 1


@pytest.mark.parametrize("before", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xe6\xbc"])
def test_what_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, bad: bytes) -> None:
    monkeypatch.setattr(corpus, "PIECE", 8)
    for after in (b"", b"aaaaaaaa\n"):
        (tmp_path / "text").write_bytes(b"a" * before + bad + after)
        with pytest.raises(InputError, match=f"text: not UTF-8 text at byte {before}$"):
            Corpus([tmp_path / "text"])
    for name in ("absent.txt", "absent.jsonl"):
        with pytest.raises(InputError, match=rf"{name}: no such file"):
            Corpus([tmp_path / name])


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.json", "a.ndjson"])
def test_json_lines_have_many_names(tmp_path: Path, name: str) -> None:
    found = Corpus([jsonl(tmp_path / name, {"text": "a"}, {"text": "b"})])
    assert len(found) == 2 and found.read(1)[1:] == (True, True, True)


def test_the_validation_split_is_fixed_and_by_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 8)
    paths = [jsonl(tmp_path / "lines.jsonl", *({"text": str(i)} for i in range(30)))]
    for i in range(20):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text("some text in lines\n" * 3 * (i % 3))  # Some are empty.
    found = Corpus(paths)
    kept, held = found.split(0.3, seed=5)
    assert sorted([*kept, *held]) == list(range(len(found))) and list(kept) == sorted(kept)
    sides = [{found.name(i).split(":")[0] for i in side if i >= 30} for side in (kept, held)]
    assert not sides[0] & sides[1] and all(sides) and len(sides[1]) + sum(held < 30) == round(0.3 * (30 + 13))
    assert np.array_equal(held, found.split(0.3, seed=5)[1]) and not np.array_equal(held, found.split(0.3, seed=6)[1])
    assert [len(side) for side in found.split(0, seed=5)] == [len(found), 0]
    for fraction in (10, 1.0, -0.1, math.nan):  # ten of the documents, and not all but one
        with pytest.raises(InputError, match="fraction: must be"):
            found.split(fraction, seed=5)
    for index in (-1, len(found)):
        with pytest.raises(InputError, match=f"index: there is no document {index}; indices are from 0 to"):
            found.read(index)
    two = Corpus([paths[3], paths[5]])
    for fraction in (0.01, 0.99):
        assert all(len({two.name(i).split(":")[0] for i in side}) == 1 for side in two.split(fraction, 0))
    with pytest.raises(InputError, match=r"1 document.*--validation-fraction 0"):
        Corpus([jsonl(tmp_path / "one.jsonl", {"text": "some text"})]).split(0.1, 0)


@pytest.mark.parametrize("piece", [8, 1 << 15])
@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("one\ntwo\nthree\nfour\n", "four\n"),
        ("one\ntwo 3 4", "two 3 4"),
        ("ab\u20ac\u20ac\u20ac", "\u20ac"),
        ("\n" * 10, "\n" * 2),
    ],
)
def test_the_tail_of_a_single_text_is_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, tail: str, piece: int
) -> None:
    monkeypatch.setattr(corpus, "PIECE", piece)
    path = tmp_path / "text.txt"
    path.write_text(text)
    for _ in range(2):
        found = Corpus([path])
        for _ in range(2):
            sides = found.split(0.3, seed=0)
        parts = [b"".join(found.read(i)[0] for i in side).decode() for side in sides]
        assert parts[0] + parts[1] == text and parts[1] == tail
        assert [found.read(i)[2] for i in range(len(found))] == [True] + [False] * (len(found) - 1)
    path.write_text("x")
    with pytest.raises(InputError, match=r"1 document.*too few to split"):
        Corpus([path]).split(0.3, 0)


def test_the_order_of_a_seed_never_changes() -> None:
    # What a checkpoint of last year counts on.
    assert permutation(10, 0, 1).tolist() == [4, 3, 7, 6, 1, 8, 2, 9, 5, 0]
    assert sorted(permutation(1000, -3, "x")) == list(range(1000))


# -- documents ---------------------------------------------------------------------------------------------------------


def test_unusable_lines_are_counted_once_and_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "data.jsonl"
    refused = json.dumps({"messages": [*CHAT, CHAT[1]]})
    lines = ["", '{"text": "Hi"}', '{"text": "x', json.dumps({"messages": CHAT}), refused, '{"text": "\xff"}', "{}"]
    path.write_bytes("\n".join(lines).encode("latin-1"))
    found, seen = Corpus([path]), list[str]()

    def documents(limit: int) -> Documents:
        template = lambda: template_of("gemma-2")  # noqa: E731
        return Documents(found, tokenizer, template, max_bad_lines=limit, on_bad_line=seen.append)

    four = documents(4)
    for _ in range(2):
        assert [document is not None for document in four.read(range(len(found)))] == [True, False, True, *[False] * 3]
    assert [re.sub(r".*data.jsonl:", "", message)[:12] for message in seen] == [
        "3: not JSON ", "5: gemma-2: ", "6: not JSON ", "7: not an ob",
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"data.jsonl:7: .*4 unusable lines, 3 allowed: .*:3, .*:5, .*:6, .*:7$"):
        documents(3).read(range(len(found)))
    with pytest.raises(InputError, match=r"data.jsonl:3: not JSON[^;]*$"):
        documents(0).read(range(len(found)))
    with pytest.raises(CheckpointError, match="no chat template"):
        Documents(found, tokenizer, max_bad_lines=9).read([2])


def test_lines_with_nothing_to_learn_are_counted_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    asked = {"messages": CHAT[:1]}
    found, said = Corpus([jsonl(tmp_path / "a.jsonl", asked, {"messages": CHAT}, {"text": ""}, asked)]), list[str]()
    silent = ChatTemplate("{% generation %}{% endgeneration %}{{ messages[0].content }}")
    for template, empty in ((template_of("qwen2.5"), {0, 2, 3}), (silent, {0, 1, 2, 3})):
        said.clear()
        documents = Documents(found, tokenizer, lambda t=template: t, max_bad_lines=0, on_bad_line=said.append)
        assert sum(found is not None for found in documents.read(range(4))) == 4 - len(empty)
        documents.notes.say_totals()
        assert documents.empty == empty and not documents.bad
        assert len(said) == 2 and said[1].startswith(f"{len(empty)} documents in all have nothing to learn")
        assert said[0].startswith(f"{tmp_path}/a.jsonl:1: nothing to learn: the assistant does not say a word")
    with pytest.raises(InputError, match="nothing to learn in any of the 4 documents"):
        next(PackedBatches(documents, np.arange(4), seq_len=5, batch_size=1))
    assert documents.records([0, 2]) == [None, None]


def test_one_bos(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama-3.1", tmp_path)
    begin = tokenizer.backend.token_to_id("<|begin_of_text|>")
    texts = ["Hi", "<|begin_of_text|>Hi", "<|begin_of_text|>", "", "Hi<|begin_of_text|>"]
    path = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts), {"messages": CHAT})
    for adds in (False, True):
        if adds:
            add_bos(tokenizer, "<|begin_of_text|>")
        found = Documents(Corpus([path]), tokenizer, lambda: template_of("llama-3.1"), on_bad_line=str).read(range(6))
        hi = tokenizer.backend.token_to_id("Hi")
        bos = [begin] if adds else []
        assert [each and each.ids for each in found[:5]] == [[*bos, hi], [begin, hi], [begin], None, [*bos, hi, begin]]
        assert found[5].ids.count(begin) == 1 and tokenizer.encode(texts[1]) == [begin, hi]


def test_documents_as_tokens(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 12)
    (tmp_path / "long.txt").write_text("Hi there!\nHello, you?\nI am")
    path = jsonl(tmp_path / "a.jsonl", {"text": "I am"}, {"messages": CHAT}, {"text": "Hi<|im_end|>"}, {"text": ""})
    begin, end = (tokenizer.backend.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    plain = lambda text: tokenizer.backend.encode(text, add_special_tokens=False).ids  # noqa: E731
    ids, mask = encode_chat(CHAT, template_of("qwen2.5"), tokenizer)
    documents = Documents(
        Corpus([path, tmp_path / "long.txt"]),
        tokenizer,
        lambda: template_of("qwen2.5"),
        eos_token_id=end,
        on_bad_line=str,
    )
    found = documents.read(range(7))
    texts = [found[i] for i in (0, 2, 4, 5, 6)]
    assert [document.ids for document in texts] == [
        [begin, *plain("I am"), end],
        [begin, *plain("Hi"), end],
        [begin, *plain("Hi there!\n")],
        plain("Hello, you?\n"),
        [*plain("I am"), end],
    ]
    assert all(document.labels == document.ids for document in texts) and found[3] is None
    assert found[1].ids == ids and found[1].labels == [i if own else -100 for i, own in zip(ids, mask, strict=True)]
    assert 0 < sum(mask) < len(mask)


# -- the stream: see also test_packing --------------------------------------------------------------------------------


def test_unusable_lines_stay_counted_when_a_run_goes_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = Corpus([jsonl(tmp_path / "a.jsonl", {"text": "Hi"}, 5, {"text": "am"}, 6)])

    def stream(limit: int, indices: list[int]) -> PackedBatches:
        documents = Documents(found, tokenizer, max_bad_lines=limit, on_bad_line=str)
        return PackedBatches(documents, np.array(indices), seq_len=2, batch_size=1)

    first = stream(1, [0, 1])
    next(first)
    assert first.state_dict()["unusable"] == [1]
    state = {**first.state_dict(), "place": 0, "pool": []}
    for limit, indices in ((2, [2, 3]), (1, [0, 1])):
        second = stream(limit, indices)
        second.load_state_dict(state)
        assert next(second) is not None
    third = stream(1, [2, 3])
    third.load_state_dict(state)
    with pytest.raises(InputError, match=r"a.jsonl:4: .*2 unusable lines, 1 allowed"):
        next(third)


def test_the_data_stays_on_disk(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "big.jsonl"
    line = json.dumps({"text": "Hello there " * 500}) + "\n"
    path.write_text(line * 4000)  # 24 MB
    (tmp_path / "big.txt").write_text("Hello there, you\n" * 600_000)  # 10 MB
    tracemalloc.start()
    found = Corpus([path, tmp_path / "big.txt"])
    source = PackedBatches(Documents(found, tokenizer), found.split(0.1, 0)[0], seq_len=512, batch_size=2, seed=0)
    for _ in islice(source, 3):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) >= 4000 + math.floor(10e6 / corpus.PIECE) and peak < 12e6, peak


def test_a_tokenizer_by_the_name_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id as well as a folder, and never the weights."""
    tokenizer_of("qwen2.5", tmp_path)
    asked = []
    monkeypatch.setattr(
        "ligermodels.data.tokenizer.resolve", lambda name, **options: asked.append((name, options)) or tmp_path
    )
    found = Tokenizer.from_pretrained("owner/name", revision="v1", local_files_only=True)
    assert found.encode("the whole") == Tokenizer(tmp_path).encode("the whole") != []
    assert asked == [("owner/name", {"weights": False, "revision": "v1", "local_files_only": True})]
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_pretrained(tmp_path.parent)
    with pytest.raises(CheckpointError, match="nothing-there"):
        Tokenizer.from_pretrained(tmp_path / "nothing-there")
