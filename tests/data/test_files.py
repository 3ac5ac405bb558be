"""Files of every kind give the same records; what is of no known kind is an error, and never trained on as text."""

import bz2
import gzip
import json
import lzma
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ligermodels.data import json_files
from ligermodels.data.corpus import Corpus
from ligermodels.data.files import data_files
from ligermodels.data.json_files import parquet_lines
from ligermodels.data.record_fields import FORMATS, OTHER_QUESTIONS, Format
from ligermodels.data.records import read_record
from ligermodels.data.streaming import StreamedCorpus
from ligermodels.errors import InputError

RECORDS = [{"prompt": "Hi, you", "completion": 'é "1"\n2'}, {"prompt": "Do", "completion": "No 3"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
CSV = 'prompt,completion\r\n"Hi, you","é ""1""\n2"\r\n\r\nDo,No 3\r\n'
TEXT = "# Title\n\nprompt,completion\n"
ARRAY = json.dumps(RECORDS, indent=1, ensure_ascii=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def zst(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def parquet(records: list[dict[str, object]], path: Path) -> Path:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist(records), path)
    return path


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst,
}  # fmt: skip

FILES = {
    "lines.jsonl": (LINES, ["lines.jsonl:1", "lines.jsonl:2"]),
    "lines.json": (LINES, ["lines.json:1", "lines.json:2"]),
    "array.json": ("\ufeff \n" + ARRAY, ["array.json: item 1", "array.json: item 2"]),
    "array.jsonl": (json.dumps(RECORDS), ["array.jsonl: item 1", "array.jsonl: item 2"]),
    "wrapped.json": (json.dumps({"version": 1, "data": RECORDS}), ["wrapped.json: item 1", "wrapped.json: item 2"]),
    "indented.json": (json.dumps({"train": RECORDS}, indent=2), ["indented.json: item 1", "indented.json: item 2"]),
    "table.csv": (CSV, ["table.csv: row 2", "table.csv: row 4"]),
    "table.tsv": (CSV.replace("Hi, you", "Hi| you").replace(",", "\t").replace("|", ","),
                  ["table.tsv: row 2", "table.tsv: row 4"]),
}  # fmt: skip


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("name", FILES)
def test_kinds_of_files_hold_the_same_records(tmp_path: Path, name: str, compression: str) -> None:
    content, names = FILES[name]
    path = tmp_path / (name + compression)
    path.write_bytes(PACK[compression](content.encode()))
    corpus = Corpus([path])
    assert [tuple(read_record(corpus.read(i)[0])[0])[:2] for i in range(len(corpus))] == [
        tuple(record.values()) for record in RECORDS
    ]
    expected = [place.replace(name, name + compression) for place in names]
    assert [corpus.name(i).removeprefix(f"{tmp_path}/") for i in range(len(corpus))] == expected


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a"])
def test_texts_are_texts(tmp_path: Path, name: str, compression: str) -> None:
    (tmp_path / (name + compression)).write_bytes(PACK[compression](TEXT.encode()))
    corpus = Corpus([tmp_path / (name + compression)])
    assert corpus.read(0) == (TEXT.encode(), False, True, True) and len(corpus) == 1


@pytest.mark.parametrize("text", ["[1]\n", "{}", '{"a" b}', "{% if x %}", '"a": 1', "[link](x)", '["a"]'])
def test_texts_with_brackets_are_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert Corpus([tmp_path / "a.txt"]).read(0)[0] == text.encode()


def test_a_table_of_parquet(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}]},
        {"messages": None},  # as absent
    ]
    corpus = Corpus([parquet(chats, tmp_path / "a.parquet")])
    assert [json.loads(corpus.read(i)[0]) for i in range(2)] == [chats[0], {}]
    assert corpus.name(1) == f"{tmp_path}/a.parquet: row 2"
    odd = Corpus([parquet([{"text": b"Hi"}, {"text": b"\xff"}], tmp_path / "b.parquet")])
    assert read_record(odd.read(0)[0])[0] == ("", "Hi", True)
    with pytest.raises(ValueError, match='"text" must be a string'):
        read_record(odd.read(1)[0])
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"c.parquet: cannot be read as Parquet"):
        Corpus([tmp_path / "c.parquet"])


def test_columns_of_parquet_with_one_name_are_an_error(tmp_path: Path) -> None:
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    writer.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet: two columns are named 'text'; rename one"):
        Corpus([tmp_path / "a.parquet"])


def calling(name: str, **arguments: int) -> dict[str, object]:
    """A chat that calls a tool, which has the arguments as properties."""
    function = {"name": name, "arguments": arguments}
    user = {"role": "user", "content": "Hi"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    properties = {key: {"type": "integer"} for key in arguments}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    return {"messages": [user, call], "tools": [tool]}


def test_rows_of_parquet_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Arrow gives all objects of a column the same keys, with nulls for those that a row lacks."""
    chats = [calling("f", a=1), calling("g", b=2)]
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    table, plain = Corpus([parquet(chats, tmp_path / "chats.parquet")]), Corpus([lines])
    assert b"null" not in table.read(0)[0]
    assert [read_record(table.read(i)[0]) for i in range(2)] == [read_record(plain.read(i)[0]) for i in range(2)]


@pytest.mark.parametrize("within", ["json", "list", "large_list", "struct", "map", "list of structs"])
def test_json_texts_of_parquet_are_decoded(tmp_path: Path, within: str) -> None:
    """`datasets` stores objects that do not all have the same keys as JSON texts, and their nulls are the user's."""
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    objects = [{"enum": ["a", None], "default": None}, {"x": 'say "hi"\n'}, "text", 2**70]
    kinds: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
        "json": (lambda text: text, lambda items: items[0]),
        "list": (pa.list_, list),
        "large_list": (pa.large_list, list),
        "struct": (
            lambda text: pa.struct([("a", text), ("b", pa.string())]),
            lambda items: {"a": items[1], "b": items[0]},
        ),
        "map": (
            lambda text: pa.map_(pa.string(), text),
            lambda items: [(str(i), item) for i, item in enumerate(items)],
        ),
        "list of structs": (lambda text: pa.list_(pa.struct([("a", text)])), lambda items: [{"a": x} for x in items]),
    }
    kind, wrap = kinds[within]
    values = pa.array([wrap([json.dumps(item) for item in objects]), None], kind(pa.string()))
    table = pa.table({"id": ['"1"', "2"], "v": values.cast(kind(pa.json_()))})
    writer.write_table(table, tmp_path / "a.parquet")
    with open(tmp_path / "a.parquet", "rb") as content:
        first, second = map(json.loads, parquet_lines(content, "a.parquet"))
    wanted = {"a": objects[1], "b": json.dumps(objects[0])} if within == "struct" else wrap(objects)
    assert first == {"id": '"1"', "v": json.loads(json.dumps(wanted))} and second == {"id": "2"}


@pytest.mark.parametrize(("text", "problem"), [("{", "Expecting"), ('{"a": 1, "a": 2}', "has the field 'a' twice")])
def test_json_texts_of_parquet_that_cannot_be_read(tmp_path: Path, text: str, problem: str) -> None:
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pa.table({"v": pa.array(["1", text], pa.json_())}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=rf"a\.parquet: row 2: 'v' has invalid JSON: .*{problem}"):
        Corpus([tmp_path / "a.parquet"])


@pytest.mark.parametrize("names", [["a.jsonl", "a.jsonl"], [".", "a.jsonl"], ["*.jsonl", "b.txt", "link.jsonl"]])
def test_a_file_that_is_given_twice_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.txt").write_text(TEXT)
    if "link.jsonl" in names:
        (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    monkeypatch.chdir(tmp_path)
    for corpus in (Corpus, StreamedCorpus):
        with pytest.warns(UserWarning, match=r"a.jsonl: is given \d times: the same document may be in the training"):
            corpus(names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Corpus(["a.jsonl", "b.txt"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xlsx", b"PK", r"is a spreadsheet: save it as .csv.*Known kinds are .jsonl, .ndjson, .json, .csv.*\.zst"),
        ("a.zip", b"PK", "is an archive: unpack it"),
        ("a.arrow", b"ARROW1", "is an Arrow file: write it with `to_parquet`"),
        ("a.npy", b"1", r"has the suffix '.npy', which is of no known kind"),
        ("a.npy.gz", b"1", r"has the suffix '.npy', which is of no known kind"),
        ("a.txt", b'\n{"text": "a"}\n{"text": "b"}\n', "txt: starts with JSON, and is named as a text"),
        ("a.md", b'[\n {\n "text": "a"\n}]', "a.md: starts with JSON, and is named as a text"),
        ("a", b'[{"text": "a"}]', "a: starts with JSON, and is named as a text"),
        ("a.jsonl.gz", b'{"text": "a"}', "a.jsonl.gz: is damaged, or is not what its suffix says"),
        ("a.txt.gz", gzip.compress(b"aaaa" * 100, mtime=0)[:-9], "a.txt.gz: is damaged"),
        ("a.jsonl.gz", PACK[".gz"](LINES.encode() * 99999)[:-8] + bytes(8), "a.jsonl.gz: is damaged.*CRC"),
        ("a.csv", b"prompt;completion\na;b\n", "a.csv: cells seem to be separated by ';'; separate them by ','"),
        ("a.csv", b"text,text\na,b\n", "two columns are named 'text'"),
        ("a.csv", b"prompt,completion\na,b\nc\n", "a.csv: row 3: has 1 cells, and the header has 2"),
        ("a.csv", b'prompt\n"a" b\n', "a.csv: row 2: "),
        ("a.csv", b"text\n\xff\n", "a.csv: not UTF-8 text after row 0"),  # it is decoded in parts
        ("a.csv", "text\na\n".encode("utf-16"), "a.csv: not UTF-8 text after row 0"),
        ("a.csv", b'"te"xt\n', "a.csv: row 1: "),
        ("a.json", b'{"data": [{"text": "a", "text": "b"}]}', r"a.json: not JSON \(.*field 'text' twice"),
        ("a.json", b'[{"text": "a"},\n{"text": }]', r"a.json:2: item 2: not JSON"),
        ("a.json", b'[{"text": "a"}\n{"text": "b"}]', r"a.json:2: expected ',' of a JSON array, found '{'"),
        ("a.json", b'[{"text": "a"}', r"a.json:1: expected ',' of a JSON array, found the end of the file"),
        ("a.json", b'[{"text": "a"}]\n[]', r"a.json:2: has more than the array"),
        ("a.json", b'[{"text": "\xff"}]', r"a.json: not UTF-8 text after line 1"),
        ("a.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', r"several lists of records \(train, test\)"),
    ],
)  # fmt: skip
def test_files_that_are_not_understood_are_errors(
    tmp_path: Path, cache: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        Corpus([tmp_path / name])
    assert str(raised.value).count(str(tmp_path / name)) == 1
    assert not list(cache.glob("data/*")) and not list(cache.glob("data/.*.partial"))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("form", [*FORMATS, *OTHER_QUESTIONS], ids=lambda form: " and ".join(form.required))
def test_one_record_with_a_list_of_objects_is_a_record(tmp_path: Path, form: Format, indent: int | None) -> None:
    record = {**dict.fromkeys(form.required, "a"), "tests": [{"input": 1}]}
    (tmp_path / "a.json").write_text(json.dumps(record, indent=indent))
    corpus = Corpus([tmp_path / "a.json"])
    assert [json.loads(corpus.read(i)[0]) for i in range(len(corpus))] == [record]


def test_a_table_without_a_header_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("Hi,Hello!\nYou,I\n")
    corpus = Corpus([tmp_path / "a.csv"])
    with pytest.raises(ValueError, match='its fields are: "Hi", "Hello!"'):
        read_record(corpus.read(0)[0])


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_arrays_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_files, "PART", size)
    items = [12, -3.5e7, "a]\u2028", {"a": [1, {"b": "}"}]}, None, [[]], True]
    (tmp_path / "a.json").write_text(json.dumps(items, indent=2))
    corpus = Corpus([tmp_path / "a.json"])
    assert [json.loads(corpus.read(i)[0]) for i in range(len(corpus))] == items
    (tmp_path / "b.json").write_text(" [ ] ")
    assert len(Corpus([tmp_path / "b.json"])) == 0


def test_a_conversion_is_made_once_and_again_for_another_content(tmp_path: Path, cache: Path) -> None:
    path, said = tmp_path / "a.csv", list[str]()
    for text, count in (("a", 1), ("a", 1), ("bb", 2)):
        path.write_text(f"text\n{text}\n")
        os.utime(path, (1, 1))
        corpus = Corpus([path], say=said.append)
        assert read_record(corpus.read(0)[0])[0] == ("", text, True)
        assert len(list(cache.glob("data/*-a.csv"))) == len(said) == count
    assert said[0] == f"{path}: converting it once, to {cache / 'data'}"


def test_one_of_several_readers_converts(tmp_path: Path) -> None:
    """As the ranks of a run do, each in a process of its own."""
    said = list[str]()
    (tmp_path / "a.csv").write_text("text\n" + "a\n" * 50_000)
    with ThreadPoolExecutor(4) as readers:
        found = list(readers.map(lambda _: data_files([tmp_path / "a.csv"], said.append)[0], range(4)))
    assert len(said) == 1 and len({file.path for file in found}) == 1 and len(found[0].path.read_bytes()) > 500_000


def test_folders_and_patterns(tmp_path: Path) -> None:
    said = list[str]()
    files = {
        "b.jsonl": '{"text": "b"}', "a/z.csv": "text\nz\n", "c.txt": "c", "README.md": "# A", ".hidden/x.jsonl": "{",
        "dataset_info.json": "{}", "script.py": "1", "a/LICENSE.txt": "L", "no_suffix": "n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(content)
    with pytest.warns(UserWarning, match=r"d: not read as data: README.md, a/LICENSE.txt, dataset_info.json, no_"):
        corpus = Corpus([tmp_path / "d"], say=said.append)
    assert said[0] == f"{tmp_path}/d: read as data: a/z.csv, b.jsonl, c.txt"
    names = [corpus.name(i).removeprefix(f"{tmp_path}/d/") for i in range(len(corpus))]
    assert names == ["a/z.csv: row 2", "b.jsonl:1", "c.txt:1"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [Corpus([str(tmp_path / pattern)]).name(0) for pattern in ("d/*.jsonl", "**/z.*")] == [
            f"{tmp_path}/d/b.jsonl:1", f"{tmp_path}/d/a/z.csv: row 2",
        ]  # fmt: skip
        (tmp_path / "[a]*.txt").write_text("a")
        assert len(Corpus([tmp_path / "[a]*.txt", str(tmp_path / "d/b.jsonl")])) == 2
    with pytest.raises(InputError, match=r"d/\*\.parquet: no file matches the pattern"):
        Corpus([tmp_path / "d/*.parquet"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: has no file of a known kind, which are \.jsonl"):
        Corpus([tmp_path / "empty"])
    (tmp_path / "empty/dataset_dict.json").write_text('{"splits": ["train"]}')  # as `save_to_disk` writes it
    (tmp_path / "empty/train").mkdir()
    (tmp_path / "empty/train/data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    with pytest.raises(InputError, match=r"after it; train/data-00000-of-00001.arrow is an Arrow file: write it with"):
        Corpus([tmp_path / "empty"])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("d/a.jsonl", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"text": "a"}')
    for link in ("d/more", "d/again", "elsewhere/loop"):
        (tmp_path / link).symlink_to(tmp_path / ("d" if link.endswith("loop") else "elsewhere"))
    assert [file.name for file in data_files([tmp_path / "d"])] == [f"{tmp_path}/d/{name}" for name in LINKED]


LINKED = ("a.jsonl", "again/b.jsonl")


def test_a_folder_within_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d" / "closed").mkdir(parents=True)
    (tmp_path / "d" / "a.jsonl").write_text('{"text": "a"}')
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.warns(UserWarning, match=r"d/closed: not read as data: Permission denied"):
        assert len(data_files([tmp_path / "d"])) == 1


@pytest.mark.parametrize("kind", [str, Path])
def test_names_are_a_list(tmp_path: Path, kind: Any) -> None:
    """A text would be read letter by letter: "/" is a folder with all files."""
    with pytest.raises(InputError, match=r"data: must be a list of names of files, got .*; give \["):
        Corpus(kind(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(("name", "kind"), [("a.jsonl", Corpus), ("a.csv", Corpus), ("a.txt", StreamedCorpus)])
def test_a_file_without_documents_is_named(tmp_path: Path, name: str, kind: type[Corpus]) -> None:
    (tmp_path / name).write_text("text\n" if name == "a.csv" else "")
    (tmp_path / "b.txt").write_text("hi")
    with pytest.warns(UserWarning, match=rf"{name}: holds no document"):
        kind([tmp_path / name, tmp_path / "b.txt"])
