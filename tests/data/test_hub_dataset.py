"""Datasets of the hub, read by the package datasets from a folder in the place of the hub."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError

from ligermodels.data import converted
from ligermodels.data.corpus import Corpus
from ligermodels.data.hub_dataset import HubDataset
from ligermodels.data.records import read_record
from ligermodels.errors import HubError, InputError


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:owner/name", ("owner/name", None, "train", None)),
        ("hf:owner/na.me:test", ("owner/na.me", None, "test", None)),
        ("hf:owner/name/con-fig:train[:10]", ("owner/name", "con-fig", "train", 10)),
    ],
)
def test_names(name: str, parts: tuple[object, ...]) -> None:
    assert HubDataset.named(name) == parts


@pytest.mark.parametrize("name", ["hf:", "hf:name", "hf:a/b/c/d", "hf:a/b:train[10%:]", "hf:a/b:", "hf:a b/c"])
def test_other_names_are_errors(name: str) -> None:
    with pytest.raises(InputError, match=r"is no name of a dataset; it must be hf:owner/name\[/config\]\[:split\]"):
        Corpus([name])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """owner/name, in a folder that the package reads in place of the repository; the value is its commit."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    commits = {"owner/name": "c1"}

    def dataset_info(self: HfApi, repo: str, **_: Any) -> SimpleNamespace:
        if repo not in commits:
            raise ConnectionError("no route")
        return SimpleNamespace(sha=commits[repo])

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    import datasets

    load = datasets.load_dataset

    def load_dataset(repo: str, *args: Any, revision: str, **options: Any) -> Any:
        return load(f"hub/{repo}", *args, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    write(["a", "b", "c"])
    return commits


def write(texts: list[str]) -> None:
    Path("hub/owner/name").mkdir(parents=True, exist_ok=True)
    Path("hub/owner/name/train.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    Path("hub/owner/name/test.jsonl").write_text(json.dumps({"text": "t", "n": 1}))


def texts(name: str) -> list[str]:
    corpus = Corpus([name])
    return [json.loads(corpus.read(i)[0])["text"] for i in range(len(corpus))]


def test_rows_are_records(hub: dict[str, str]) -> None:
    assert texts("hf:owner/name") == ["a", "b", "c"] and texts("hf:owner/name:test") == ["t"]
    assert texts("hf:owner/name:train[:2]") == ["a", "b"]
    assert Corpus(["hf:owner/name"]).name(2) == "hf:owner/name: row 3"


def test_rows_are_fetched_once_for_a_commit(hub: dict[str, str]) -> None:
    assert texts("hf:owner/name") == ["a", "b", "c"]
    write(["d"])
    assert texts("hf:owner/name") == ["a", "b", "c"]
    hub["owner/name"] = "c2"
    assert texts("hf:owner/name") == ["d"]
    hub.clear()  # the hub cannot be reached
    assert texts("hf:owner/name") == ["d"]
    with pytest.raises(HubError, match=r"owner/name: download failed.*no route"):
        texts("hf:owner/name:test")


def test_the_address_of_a_gated_dataset_is_named(hub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise GatedRepoError("gated", response=cast(Any, SimpleNamespace(headers={}, request=None)))

    monkeypatch.setattr(HfApi, "dataset_info", refuse)
    with pytest.raises(HubError, match=r"^datasets/owner/name: is gated: accept its terms at .*/datasets/owner/name"):
        texts("hf:owner/name")


def test_a_folder_of_the_same_name_is_not_read_in_its_place(hub: dict[str, str]) -> None:
    Path("owner/name").mkdir(parents=True)
    Path("owner/name/train.jsonl").write_text('{"text": "local"}')
    with pytest.raises(InputError, match=r"hf:owner/name: .*would read the folder owner/name.*give ./owner"):
        texts("hf:owner/name")
    assert texts("./owner/name") == ["local"]


def test_datasets_with_similar_names_are_apart_in_the_cache(hub: dict[str, str]) -> None:
    """A configuration and a split of the same name."""
    assert texts("hf:owner/name:test") == ["t"]
    hub.clear()  # the hub cannot be reached
    with pytest.raises(HubError, match="no route"):
        texts("hf:owner/name/test")


def test_rows_of_another_version_are_not_used(hub: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(converted, "VERSION", converted.VERSION - 1)
        assert texts("hf:owner/name") == ["a", "b", "c"]
    hub.clear()  # the hub cannot be reached
    with pytest.raises(HubError, match=r"owner/name: download failed.*no route"):
        texts("hf:owner/name")


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.csv", "text,n\na,1\nb,2\n"), ("train.txt", "a\nb\n"), ("train.json", '[{"text": "a"}, {"text": "b"}]')],
)
def test_repositories_with_files_of_other_kinds(hub: dict[str, str], name: str, content: str) -> None:
    """The package datasets does not know the columns of these before it reads them."""
    Path("hub/owner/other").mkdir()
    Path("hub/owner/other", name).write_text(content)
    hub["owner/other"] = "c1"
    assert texts("hf:owner/other") == ["a", "b"] and texts("hf:owner/other:train[:1]") == ["a"]


@pytest.mark.parametrize(
    ("ending", "contents"),
    [
        ("csv", ["text,n\na,\nb,1\n", "text,n\nc,x\n"]),
        ("json", ['[{"text": "a", "n": null}, {"text": "b", "n": null}]', '[{"text": "c", "n": {"x": 1}}]']),
    ],
)
def test_files_whose_columns_have_other_types(hub: dict[str, str], ending: str, contents: list[str]) -> None:
    Path("hub/owner/parts").mkdir()
    for number, content in enumerate(contents):
        Path(f"hub/owner/parts/train-{number}.{ending}").write_text(content)
    hub["owner/parts"] = "c1"
    assert texts("hf:owner/parts") == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_turns_that_do_not_all_have_the_same_keys(hub: dict[str, str], name: str) -> None:
    """The package datasets stores them as JSON texts."""
    function = {"name": "f", "arguments": {"unit": None, "x": 1}}
    answer = {"role": "assistant", "content": 'say "hi"\n', "reasoning_content": "r"}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    chat = {"messages": [{"role": "user", "content": "a"}, call, answer], "tools": [{"name": "f"}, {"x": None}]}
    other = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, answer], "tools": []}
    lines = [json.dumps(row) for row in (chat, other)]
    Path("hub/owner/chats").mkdir()
    text = "\n".join(lines) if name.endswith("l") else f"[{', '.join(lines)}]"
    Path("hub/owner/chats", name).write_text(text)
    hub["owner/chats"] = "c1"
    corpus = Corpus(["hf:owner/chats"])
    assert [read_record(corpus.read(i)[0]) for i in range(2)] == [read_record(line.encode()) for line in lines]


def test_what_the_dataset_does_not_have_is_named(hub: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"hf:owner/name:valid: .*Available splits: \['train', 'test'\]"):
        texts("hf:owner/name:valid")
    with pytest.raises(InputError, match=r"hf:owner/name/other: .*'other' not found. Available: \['default'\]"):
        texts("hf:owner/name/other")
    assert not list((tmp_path / "cache/datasets").glob("*name*"))


@pytest.mark.parametrize(
    ("package", "data"), [("datasets", "hf:owner/name"), ("pyarrow", "a.parquet"), ("pyarrow", "a.jsonl.zst")]
)
def test_packages_are_optional(hub: dict[str, str], monkeypatch: pytest.MonkeyPatch, package: str, data: str) -> None:
    Path("a.parquet").write_bytes(b"PAR1")
    Path("a.jsonl.zst").write_bytes(b"1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"^{data}: .* needs the package {package}: pip install 'ligermodels\[data"):
        Corpus([data])
