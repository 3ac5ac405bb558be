"""Fetching from the hub: an unmodified huggingface_hub, in a process of its own, against a server on this machine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, TOKEN, Hub, serving
from huggingface_hub.utils import get_session

from ligermodels.convert import hub as hub_module
from ligermodels.convert.patience import patient
from ligermodels.errors import CheckpointError, HubError

CHILD = """
import json, os, sys, time
time.sleep = lambda seconds: None  # huggingface_hub pauses before it tries again.
from ligermodels.convert import hub
for arguments in json.loads(sys.argv[1]):
    os.environ.update(arguments.pop("environment", {}))  # variables that are read at each call
    try:
        print(json.dumps(["folder", str(getattr(hub, arguments.pop("by", "resolve"))(**arguments))]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
assert "torch" not in sys.modules  # Looking for a checkpoint should not take seconds.
"""

SHARDS = {f"model-{i:05d}-of-00003.safetensors": bytes([i]) * 60_000 for i in range(1, 4)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("abc", SHARDS, strict=True))}).encode()}
SMALL = {
    name: f"{name} of the test".encode()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    )
}
SINGLE = {"model.safetensors": b"s" * 70_000}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a" * 5_000}
NEVER = {
    name: b"never fetched"
    for name in (
        "README.md",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "model.fp16.safetensors",
        "model-00001-of-00002.safetensors",
        "original/consolidated.00.pth",
        "original/config.json",
        "onnx/model.onnx",
        "onnx/config.json",
        "model-q4.gguf",
        "modeling_custom.py",
    )
}
CODE = {
    "config.json": b'{"auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "owner/name--modeling_custom.X"}}',
    "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["tokenization_x.X", null]}}',
    "tiktoken.model": b"IQ== 0",
    "configuration_x.py": b"from .parts_x import X",
    "parts_x.py": b"from .more_x import X",
    "more_x.py": b"from .configuration_x import X",
    "tokenization_x.py": b"from .missing_x import X",
}
"""Files of a model and a tokenizer with code, which their checkpoint keeps; it is never imported."""
REPOS: dict[str, dict[str, bytes]] = {
    "some/code": {**CODE, **SINGLE, **NEVER},
    "some/single": {**SMALL, **SINGLE, **NEVER},
    "some/sharded": {**SMALL, **INDEX, **SHARDS, **NEVER},
    "some/both": {**SMALL, **SINGLE, **INDEX, **SHARDS, **ADAPTER},
    "some/gated": {**SMALL, **SINGLE},
    "some/pickles": {**SMALL, **NEVER},
    "some/bare": dict(SINGLE),
    "some/adapter": {**ADAPTER, **NEVER, "tokenizer.json": b"never fetched", "adapter_model.bin": b"never fetched"},
    "some/torn": {**SMALL, **INDEX, **dict(list(SHARDS.items())[:2])},
    "some/evil": {**SMALL, "model.safetensors.index.json": b'{"weight_map": {"a": "../../a.safetensors"}}'},
    "some/greedy": {**SMALL, **NEVER, "model.safetensors.index.json": b'{"weight_map": {"a": "*.safetensors"}}'},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(REPOS) as server:
        server.gated.add("some/gated")
        yield server


def resolve(hub: Hub, home: Path, *calls: dict[str, Any], **environment: str) -> list[list[str]]:
    """What each call of `resolve` gives: "folder" and its path, or the name of an exception and its message."""
    outside = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "XDG_CACHE")
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(outside)}
    clean |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    process = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(calls)],
        env={**clean, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def contents(folder: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if not p.is_dir()}


def test_only_what_is_needed_is_fetched_and_then_found_offline(hub: Hub, tmp_path: Path) -> None:
    wanted = {
        "some/single": {**SMALL, **SINGLE},
        "some/sharded": {**SMALL, **INDEX, **SHARDS},
        # As transformers does; and the config of an adapter, for a warning.
        "some/both": {**SMALL, **INDEX, **SINGLE, "adapter_config.json": b"{}"},
        "some/code": {**CODE, **SINGLE},
    }
    calls = [{"name_or_path": repo} for repo in wanted]
    first = resolve(hub, tmp_path, *calls)
    for (outcome, folder), files in zip(first, wanted.values(), strict=True):
        assert outcome == "folder" and Path(folder).name == COMMIT and tmp_path in Path(folder).parents
        assert contents(folder) == files
    assert sorted(hub.served) == sorted(f"{repo}/{file}" for repo, files in wanted.items() for file in files)

    hub.served.clear()
    variants: list[dict[str, Any]] = [{}, {"revision": COMMIT}, {"local_files_only": True}]
    assert resolve(hub, tmp_path, *({**call, **more} for more in variants for call in calls)) == first * 3
    assert not hub.served
    (Path(first[0][1]) / "chat_template.jinja").unlink()  # A snapshot that another program made may lack such files.
    assert resolve(hub, tmp_path, *calls, HF_HUB_OFFLINE="1") == first
    assert resolve(Hub("http://127.0.0.1:9", {}), tmp_path, *calls) == first


def test_config_and_tokenizer_alone(hub: Hub, tmp_path: Path) -> None:
    small = {"name_or_path": "some/sharded", "weights": False, "cache_dir": str(tmp_path / "cache")}
    [(_, folder)] = resolve(hub, tmp_path, small)
    assert contents(folder) == SMALL and (tmp_path / "cache") in Path(folder).parents
    found = resolve(hub, tmp_path, small, {**small, "weights": True}, HF_HUB_OFFLINE="1")
    assert found[0] == ["folder", folder]
    assert found[1][0] == "HubError" and "some/sharded: neither a local folder nor in the cache" in found[1][1]


def test_an_adapter(hub: Hub, tmp_path: Path) -> None:
    call = {"name_or_path": "some/adapter", "by": "resolve_adapter"}
    [first, missing] = resolve(hub, tmp_path, call, {**call, "name_or_path": "some/single"})
    assert first[0] == "folder" and contents(first[1]) == ADAPTER
    assert missing[0] == "HubError" and "some/single: the repository has no adapter_config.json" in missing[1]
    assert resolve(hub, tmp_path, call, HF_HUB_OFFLINE="1") == [first]


def test_gated_repository_with_a_token(hub: Hub, tmp_path: Path) -> None:
    call = {"name_or_path": "some/gated"}
    answers = resolve(hub, tmp_path, call, {**call, "token": "hf_other"}, {**call, "token": TOKEN})
    for outcome, message in answers[:2]:
        assert outcome == "HubError"
        assert message.startswith(f"some/gated: is gated: accept its terms at {hub.url}/some/gated, then pass a token")
    assert contents(answers[2][1]) == {**SMALL, **SINGLE}


def test_each_failure_has_its_error(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"name_or_path": "no/such"}, "HubError", "no/such: no such local folder, nor such a repository on the hub"),
        ({"name_or_path": "some/single", "revision": "v9"}, "HubError", "some/single: has no revision 'v9'"),
        ({"name_or_path": "some/bare"}, "HubError", "some/bare: the repository has no config.json"),
        ({"name_or_path": "some/adapter"}, "HubError", "some/adapter: holds an adapter: open its base model, then"),
        ({"name_or_path": "some/pickles"}, "HubError", "some/pickles: the repository has no model.safetensors and no"),
        (
            {"name_or_path": "some/torn"},
            "HubError",
            "some/torn: the repository has no model-00003-of-00003.safetensors",
        ),
        ({"name_or_path": "some/evil"}, "CheckpointError", "index.json: is not JSON whose 'weight_map'"),
        ({"name_or_path": "some/greedy"}, "HubError", "some/greedy: the repository has no *.safetensors"),
        ({"name_or_path": "a/b/c"}, "HubError", "a/b/c: neither a local folder nor a repo id"),
        ({"name_or_path": "not a repo!"}, "HubError", "not a repo!: neither a local folder nor a repo id"),
        ({"name_or_path": "./no/such"}, "CheckpointError", "./no/such: no such folder"),
        ({"name_or_path": "/no/such"}, "CheckpointError", "/no/such: no such folder"),
        ({"name_or_path": "~/no/such"}, "CheckpointError", "~/no/such: no such folder"),
        ({"name_or_path": ""}, "CheckpointError", "name of the checkpoint is empty"),
        ({"name_or_path": "file"}, "CheckpointError", "file: is not a folder"),
    ]
    answers = resolve(hub, tmp_path, *(arguments for arguments, _, _ in cases))
    for (arguments, kind, message), answer in zip(cases, answers, strict=True):
        assert answer[0] == kind and message in answer[1] and "\n" not in answer[1], (arguments, answer)
    assert not {path.split("/", 2)[2] for path in hub.served} & {*NEVER, *SINGLE}


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ({"local_files_only": True}, {}, r"in the cache, and the hub is not used (local_files_only"),
        ({}, {"HF_HUB_OFFLINE": "1"}, "in the cache, and the hub is not used"),
        ({}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "in the cache, and http://127.0.0.1:9 cannot be reached: "),
    ],
)
def test_empty_cache_without_a_hub(
    hub: Hub, tmp_path: Path, arguments: dict[str, Any], environment: dict[str, str], reason: str
) -> None:
    """As for a mistyped folder, of a model or of an adapter: the hub is not asked again and again."""
    before = time.monotonic()
    calls = [{"name_or_path": "some/single", "by": by, **arguments} for by in ("resolve", "resolve_adapter")]
    answers = resolve(hub, tmp_path, *calls, **environment)
    assert time.monotonic() - before < 20
    assert len(answers) == 2
    for kind, message in answers:
        assert kind == "HubError" and f"some/single: neither a local folder nor {reason}" in message
    assert not hub.served


@pytest.mark.parametrize(("repo", "file"), [("some/single", "model.safetensors"), ("some/sharded", list(SHARDS)[1])])
def test_connection_cut_in_the_middle_of_a_file(hub: Hub, tmp_path: Path, repo: str, file: str) -> None:
    hub.cut.add(file)
    [(kind, message)] = resolve(hub, tmp_path, {"name_or_path": repo})
    assert kind == "HubError" and message.startswith(f"{repo}: download failed, run again to retry: ")
    assert f"{repo}/{file}" in hub.served
    for path in filter(Path.is_file, tmp_path.rglob("snapshots/*/**/*")):
        name = "/".join(path.parts[path.parts.index("snapshots") + 2 :])
        assert name != file and path.read_bytes() == REPOS[repo][name]

    hub.cut.clear()
    [(kind, folder)] = resolve(hub, tmp_path, {"name_or_path": repo})
    assert kind == "folder" and contents(folder)[file] == REPOS[repo][file]


def test_local_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "single").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("some/single", "./some/single", tmp_path / "some" / "single", "~/some/single"):
        assert hub_module.resolve(name, local_files_only=True).resolve() == tmp_path / "some" / "single"
    with pytest.raises(CheckpointError, match="some/other: no such folder"):
        hub_module.resolve(Path("some/other"))
    with pytest.raises(HubError, match="some/other: neither a local folder nor in the cache"):
        hub_module.resolve("some/other", local_files_only=True, cache_dir=tmp_path)


def test_a_hub_that_does_not_go_on(tmp_path: Path) -> None:
    """Soon after the time that the environment sets there is an error. The cases wait side by side."""
    limits = {"LIGERMODELS_HUB_TIMEOUT": "1.5", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1"}

    def answer(how: str, file: str) -> list[str]:
        home = tmp_path / how / file.replace("/", "-")
        home.mkdir(parents=True)
        before = time.monotonic()
        with serving(REPOS) as hub:
            getattr(hub, how).add(file)
            (found,) = resolve(hub, home, {"name_or_path": "some/single"}, **limits)
        assert time.monotonic() - before < 30  # the default limit is a minute
        return found

    cases = list(product(("dripped", "stalled"), ("config.json", "model.safetensors", "revision/main")))
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(answer, *zip(*cases, strict=True)))
    for (how, file), (kind, message) in zip(cases, answers, strict=True):
        assert kind == "HubError" and "some/single" in message, (how, file, message)
        assert how == "stalled" or "LIGERMODELS_HUB_TIMEOUT" in message, (file, message)


def test_a_time_limit_that_is_none(hub: Hub, tmp_path: Path) -> None:
    limits = ("soon", "-1", "nan")
    calls = [{"name_or_path": "some/single", "environment": {"LIGERMODELS_HUB_TIMEOUT": limit}} for limit in limits]
    for limit, (kind, message) in zip(limits, resolve(hub, tmp_path, *calls), strict=True):
        assert (
            kind == "HubError"
            and f"LIGERMODELS_HUB_TIMEOUT: must be a number of seconds above 0, got '{limit}'" in message
        )


def test_two_downloads_at_a_time_leave_no_hooks() -> None:
    """Of huggingface_hub's client, which all threads share; what is left would end requests that are none of ours."""

    def hooks() -> dict[str, list[object]]:
        return {event: list(found) for event, found in get_session().event_hooks.items()}

    before, first, second = hooks(), patient("some/first"), patient("some/second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert hooks() != before
    second.__exit__(None, None, None)
    assert hooks() == before
