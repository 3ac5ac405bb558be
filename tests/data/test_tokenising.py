"""Tokens from several processes and from the cache: the same rows and messages, whatever else happens."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import save_template, template_of, tokenizer_of
from children import forks

from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.encoding import Encoded
from ligermodels.data.packing import PackedBatches
from ligermodels.data.source import EncodedSource, cache_key
from ligermodels.data.token_cache import RECORD, TokenCache
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.data.workers import default_count
from ligermodels.errors import CheckpointError, InputError

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "é", "漢", "😀", "runs"]
COUNT = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template, and data of all forms: chats, texts, completions, unusable lines, a text file."""
    folder, draw = tmp_path_factory.mktemp("tokenising"), random.Random(0)
    tokenizer_of("qwen2.5", folder)
    save_template("qwen2.5", folder)
    (folder / "config.json").write_text("{}")

    def say(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    def record(i: int) -> Any:
        if i % 25 == 7:
            return ["no record"]
        if i % 25 == 9:
            return {"text": ""}
        chat = [{"role": role, "content": say(30)} for role in ("user", "assistant") * draw.randint(1, 3)]
        tool = {"type": "function", "function": {"name": "look", "description": say(4), "parameters": {}}}
        return [
            {"messages": chat},
            {"messages": chat, "tools": [tool], "id": i},
            {"text": say(40)},
            {"prompt": say(5), "completion": say(20), "source": "mine"},
        ][i % 4]

    lines = [json.dumps(record(i)) for i in range(COUNT)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / "book.txt").write_text("\n".join(say(30) for _ in range(60)))
    return folder


def documents_in(folder: Path, said: list[str] | None = None) -> Documents:
    return Documents.of_checkpoint(
        folder,
        [folder / "data.jsonl", folder / "book.txt"],
        date="2024-07-26",
        piece=2048,
        max_bad_lines=100,
        on_bad_line=(said if said is not None else []).append,
    )


def packed(documents: Documents, **options: Any) -> PackedBatches:
    return PackedBatches(documents, **{"seq_len": 96, "batch_size": 2, "seed": 3, "epochs": 2, **options})


def digest(batches: PackedBatches) -> list[str]:
    return [
        hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in sorted(batch))).hexdigest()
        for batch in batches
    ]


def cache_of(documents: Documents, said: list[str] | None = None) -> TokenCache:
    key = cache_key(documents.corpus, documents.encoder)
    return TokenCache(key, len(documents), (said if said is not None else []).append)


@cache
def expected(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Rows, messages and unusable lines of one process without a cache."""
    documents = documents_in(folder, said := [])
    rows = digest(packed(documents))
    return rows, said, sorted(documents.bad)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def test_rows_and_messages_depend_on_neither_processes_nor_cache(folder: Path) -> None:
    rows, messages, bad = expected(folder)
    assert len(rows) > 50 and len(bad) == 4 and any("not used: id" in message for message in messages)
    for workers, with_cache, found in ((2, False, 0), (0, True, 0), (1, True, None), (2, True, None)):
        documents = documents_in(folder, said := [])
        cache = cache_of(documents) if with_cache else None
        if cache is not None:
            assert cache.num_documents == (len(documents) if found is None else 0)
        source = EncodedSource(documents.content, documents.encoder, num_workers=workers, cache=cache)
        with closing(source):
            documents.source = source
            assert digest(packed(documents)) == rows
        assert (said, sorted(documents.bad)) == (messages, bad)


def test_a_stream_resumes_with_other_processes_and_another_seed_finds_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ligermodels.data.packing.AT_ONCE", 8)
    rows = digest(packed(documents_in(folder)))
    documents = documents_in(folder)
    cache = cache_of(documents)
    with closing(EncodedSource(documents.content, documents.encoder, num_workers=2, cache=cache)) as documents.source:
        batches = packed(documents)
        for expected_row in rows[:11]:
            assert digest([next(batches)]) == [expected_row]  # type: ignore[arg-type]
        state = json.loads(json.dumps(batches.state_dict()))
    again = documents_in(folder)
    assert 0 < cache_of(again).num_documents < len(again)  # only what was needed, and some documents ahead of it
    resumed = packed(again)
    resumed.load_state_dict(state)
    assert digest(resumed) == rows[11:]
    with closing(EncodedSource(again.content, again.encoder, num_workers=1, cache=cache_of(again))) as again.source:
        assert digest(packed(again, seed=5)) == digest(packed(documents_in(folder), seed=5))
    cache = cache_of(again)
    assert cache.num_documents == len(again)


@pytest.fixture(scope="module")
def whole_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LIGERMODELS_CACHE of a run that has read everything."""
    cache_folder = tmp_path_factory.mktemp("whole") / "cache"
    documents = documents_in(folder)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LIGERMODELS_CACHE", str(cache_folder))
        cache = cache_of(documents)
        with closing(EncodedSource(documents.content, documents.encoder, cache=cache)) as documents.source:
            assert digest(packed(documents)) == expected(folder)[0]
    return cache_folder


@pytest.mark.parametrize("harm", ["short tokens", "short index", "other bytes", "no tokens", "other document"])
def test_a_damaged_cache_is_not_believed(folder: Path, whole_cache: Path, cache_folder: Path, harm: str) -> None:
    rows, *_ = expected(folder)
    shutil.copytree(whole_cache, cache_folder.parent)
    cache = cache_of(documents_in(folder))
    assert cache.num_documents == len(documents_in(folder))
    (tokens,), (index,) = cache.folder.glob("*.tokens"), cache.folder.glob("*.index")
    content, records = tokens.read_bytes(), np.fromfile(index, RECORD)
    if harm == "short tokens":
        tokens.write_bytes(content[: len(content) // 2])
    elif harm == "short index":
        index.write_bytes(index.read_bytes()[: len(records) * RECORD.itemsize // 3 + 5])
    elif harm == "other bytes":
        tokens.write_bytes(bytes(len(content)))
    elif harm == "no tokens":
        tokens.unlink()
    else:
        records["document"][5] = 10**9
        index.write_bytes(records.tobytes())
    documents = documents_in(folder)
    cache, workers = cache_of(documents), int(harm == "short index")  # documents are lacking, or found to be others
    source = EncodedSource(documents.content, documents.encoder, num_workers=workers, cache=cache)
    with closing(source) as documents.source:
        assert digest(packed(documents)) == rows


def test_the_key_has_all_that_tokens_depend_on(folder: Path, tmp_path: Path) -> None:
    def key(tokenizer: Tokenizer, template: Any, end: int | None = None, text: str = "some text") -> dict[str, Any]:
        path = tmp_path / "a.txt"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        documents = Documents(Corpus([path]), tokenizer, lambda: template, eos_token_id=end)
        return cache_key(documents.corpus, documents.encoder)

    tokenizer, template = Tokenizer(folder), template_of("qwen2.5")
    same = key(tokenizer, template)
    assert same == key(Tokenizer(folder), template_of("qwen2.5")) and json.dumps(same)  # the time is not written
    dated = [template_of("qwen2.5") for _ in range(2)]
    for each in dated:
        each.source += "{{ strftime_now('%Y') }}"
    assert key(tokenizer, dated[0]) != key(tokenizer, dated[1])
    others = [
        key(tokenizer, template_of("llama-3.1")),
        key(tokenizer, template, 5),
        key(tokenizer, template, text="other"),
    ]
    tokenizer.backend.add_special_tokens(["<|new|>"])
    others.append(key(tokenizer, template))
    assert same not in others and len({json.dumps(each) for each in others}) == len(others)


def tokenise(folder: Path, cache_folder: Path, ready: Any, stops: bool) -> None:
    """What a child process does: send "ready" after its first row, and a digest of all rows unless it stops there."""
    os.environ |= {"LIGERMODELS_CACHE": str(cache_folder.parent), "LOCAL_WORLD_SIZE": "2"}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    documents = documents_in(folder)
    documents.source = EncodedSource(documents.content, documents.encoder, num_workers=1, cache=cache_of(documents))
    batches = packed(documents)
    first = digest([next(batches)])  # type: ignore[arg-type]
    ready.send("ready")
    if stops:
        signal.pause()  # until it is killed
    ready.send(result_of(first + digest(batches)))
    documents.close()


def start(folder: Path, cache_folder: Path, stops: bool = False) -> tuple[Any, Any]:
    """A child process, and the end of a pipe from it."""
    receive, send = forks().Pipe(duplex=False)
    process = forks().Process(target=tokenise, args=(folder, cache_folder, send, stops))
    process.start()
    send.close()
    return process, receive


def result_of(rows: list[str]) -> str:
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def test_processes_share_the_work(folder: Path, cache_folder: Path) -> None:
    rows, *_ = expected(folder)
    children = [start(folder, cache_folder) for _ in range(2)]
    for process, receive in children:
        assert [receive.recv(), receive.recv()] == ["ready", result_of(rows)]
        process.join()
    counts = np.concatenate([np.fromfile(path, RECORD)["document"] for path in cache_folder.glob("*/*.index")])
    assert sorted(counts) == list(range(len(documents_in(folder))))  # each document once
    assert not [path for path in cache_folder.glob("*/.*")]  # no lock is left


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_leaves_a_good_cache_and_no_process(folder: Path, cache_folder: Path, number: int) -> None:
    rows, *_ = expected(folder)
    process, receive = start(folder, cache_folder, stops=True)
    assert receive.recv() == "ready"
    workers = _descendants(process.pid)
    assert workers
    os.kill(process.pid, number)
    process.join(20)
    deadline = time.monotonic() + 20
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_alive, workers))
    documents = documents_in(folder)
    assert cache_of(documents).num_documents > 0
    with closing(EncodedSource(documents.content, documents.encoder, cache=cache_of(documents))) as documents.source:
        assert digest(packed(documents)) == rows


def test_a_killed_worker_is_replaced(folder: Path) -> None:
    rows, *_ = expected(folder)
    documents = documents_in(folder)
    with closing(EncodedSource(documents.content, documents.encoder, num_workers=2)) as documents.source:
        batches = packed(documents)
        first = digest([next(batches)])  # type: ignore[arg-type]
        for pid in _descendants(os.getpid()):
            if "ligermodels.data.workers" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        assert first + digest(batches) == rows


def test_errors_come_from_the_workers(folder: Path, tmp_path: Path) -> None:
    for template, error in ((None, CheckpointError), (template_of("qwen2.5"), InputError)):
        documents = Documents(
            Corpus([folder / "data.jsonl"]), Tokenizer(folder), template and (lambda t=template: t), on_bad_line=str
        )
        source = EncodedSource(documents.content, documents.encoder, num_workers=1)
        with closing(source) as documents.source, pytest.raises(error) as first:
            list(packed(documents))
        documents.source = EncodedSource(documents.content, documents.encoder)
        documents.bad.clear()
        with pytest.raises(error) as second:
            list(packed(documents))
        assert str(first.value) == str(second.value)


def test_a_full_disk_ends_the_cache_and_not_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = documents_in(folder)
    cache = cache_of(documents, said := [])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ligermodels.data.token_cache.os.write", full)
    with closing(EncodedSource(documents.content, documents.encoder, cache=cache)) as documents.source:
        assert digest(packed(documents)) == expected(folder)[0]
    assert ["No space left" in message for message in said] == [True, False]


@pytest.mark.parametrize("ids", [[], [1, 2, 65535], [65536, 0]])
@pytest.mark.parametrize("masked", [False, True])
def test_the_cache_keeps_every_field(cache_folder: Path, ids: list[int], masked: bool) -> None:
    mask = np.arange(len(ids)) % 2 == 0 if masked else None
    document = Encoded(np.asarray(ids, np.int32), mask, "text", "why", True, ("a", "b"), ("c",))
    with closing(TokenCache({}, 3, print)) as cache:
        cache.add([2], [document])
        assert cache.get(0) is None and (found := cache.get(2)) is not None
    assert found.ids.tolist() == ids and found.ids.dtype == np.int32 and found[2:] == document[2:]
    assert (found.trained is None) == (mask is None) and (mask is None or found.trained.tolist() == mask.tolist())  # type: ignore[union-attr]


def test_workers_import_neither_torch_nor_the_main_module() -> None:
    program = "import sys, ligermodels.data.workers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_the_default_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(40)), raising=False)
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: "max 100000\n")
    counts = []
    for ranks, quota in ((1, "max"), (8, "max"), (64, "max"), (1, "350000")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr("pathlib.Path.read_text", lambda _, quota=quota: f"{quota} 100000\n")
        counts.append(default_count())
    assert counts == [16, 5, 1, 3]


def _descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == pid]
    return [each for own in children for each in (own, *_descendants(own))]


def _parent(path: Path) -> int:
    try:
        return int(path.read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
