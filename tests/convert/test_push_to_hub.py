"""Uploading to the hub: an unmodified huggingface_hub, in a process of its own, against a server on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hub_server import TOKEN, Hub, serving
from huggingface_hub import ModelCard

import ligermodels as lm

CHILD = """
import json, os, sys
import ligermodels as lm
for line in sys.stdin:
    name, os.environ["HF_TOKEN"], options = json.loads(line)
    model = lm.from_pretrained(name)
    with __import__("torch").no_grad():
        model.decoder.norm.weight.mul_(2)
    try:
        print(json.dumps(["url", model.push_to_hub(**options)]), flush=True)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""
CARD = """---
license: llama3.2
license_name: a license
language: [en, de]
tags: [tiny]
unknown: field
---
# The base

Its text.
"""


Push = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Push]]:
    """A hub, and `push(name, token, **options)`: ("url" or an error's class, URL or message) of loading `name`,
    changing a weight, and `push_to_hub`. One process, which knows the hub's address from its start, does all."""
    with serving({}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("cache"))}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", CHILD], env=environment, **pipes) as child:

            def push(name: str, token: str = TOKEN, **options: Any) -> tuple[str, str]:
                child.stdin.write(json.dumps([name, token, options]) + "\n")
                child.stdin.flush()
                kind, said = json.loads(child.stdout.readline())
                return kind, said

            yield hub, push
            child.stdin.close()


@pytest.fixture
def hub(process: tuple[Hub, Push]) -> Hub:
    """Without repositories and commits of other tests."""
    process[0].repos.clear(), process[0].commits.clear(), process[0].branches.discard("trial")
    return process[0]


@pytest.fixture
def push(process: tuple[Hub, Push]) -> Push:
    return process[1]


def base(folder: Path) -> Mapping[str, bytes]:
    """The files of a checkpoint with its card and license."""
    lm.from_config(zoo.CONFIGS["llama-3"]).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "README.md": CARD.encode(), "LICENSE.txt": b"the license", "USE_POLICY.md": b"the policy"}


def test_a_pushed_model_is_loaded_again_and_has_a_card_and_the_license_of_its_base(
    hub: Hub, push: Push, tmp_path: Path
) -> None:
    hub.repos["some/base"] = dict(base(tmp_path / "base"))
    kind, url = push("some/base", repo_id="me/mine", commit_message="first", private=True)
    assert (kind, url) == ("url", f"{hub.url}/me/mine/commit/0123456789abcdef0123456789abcdef01234567")
    assert hub.commits == [("me/mine", "main", "first", False)]
    files = hub.repos["me/mine"]
    assert files["LICENSE.txt"] == b"the license" and files["USE_POLICY.md"] == b"the policy"
    card = ModelCard(files["README.md"].decode())
    assert card.data.base_model == "some/base" and card.data.license == "llama3.2"
    assert card.data.license_name == "a license" and card.data.language == ["en", "de"]
    assert card.data.tags == ["tiny", "ligermodels"]
    assert 'from_pretrained("me/mine")' in card.text and card.text.endswith("# The base\n\nIts text.\n")

    for name in ("config.json", "model.safetensors"):
        (tmp_path / "again").mkdir(exist_ok=True)
        (tmp_path / "again" / name).write_bytes(files[name])
    again, before = lm.from_pretrained(tmp_path / "again"), lm.from_pretrained(tmp_path / "base")
    assert torch.equal(again.decoder.norm.weight, 2 * before.decoder.norm.weight)

    # A card that is there stays, in a pull request and on a new branch too.
    hub.repos["me/mine"]["README.md"] = b"mine"
    options = {"repo_id": "me/mine", "revision": "main", "create_pr": True}
    assert push("some/base", **options) == ("url", f"{hub.url}/me/mine/discussions/1")
    assert push("some/base", repo_id="me/mine", revision="trial")[0] == "url"
    assert hub.commits[1:] == [("me/mine", "main", "Upload model", True), ("me/mine", "trial", "Upload model", False)]
    assert hub.repos["me/mine"]["README.md"] == b"mine"


def test_the_license_of_a_local_base_is_copied_and_the_base_is_not_named(hub: Hub, push: Push, tmp_path: Path) -> None:
    for name, content in base(tmp_path / "base").items():
        (tmp_path / "base" / name).write_bytes(content)
    assert push(str(tmp_path / "base"), repo_id="me/mine")[0] == "url"
    card = ModelCard(hub.repos["me/mine"]["README.md"].decode())
    assert card.data.base_model is None and card.data.license == "llama3.2"
    assert hub.repos["me/mine"]["LICENSE.txt"] == b"the license"


def test_weights_of_an_earlier_checkpoint_are_removed(hub: Hub, push: Push, tmp_path: Path) -> None:
    """A single file would be read in place of new shards, and an adapter by itself in place of the model."""
    lm.from_config(zoo.CONFIGS["llama-3"]).save_pretrained(tmp_path / "base")
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    hub.repos["me/mine"] = {"tokenizer.json": b"{}", **adapter}
    for size in ("5GB", "60KB", "5GB"):
        assert push(str(tmp_path / "base"), repo_id="me/mine", max_shard_size=size)[0] == "url"
        files = hub.repos["me/mine"]
        weights = {name for name in files if "safetensors" in name}
        assert ("model.safetensors" in weights) == (len(weights) == 1) == (size == "5GB")
        assert files["tokenizer.json"] == b"{}" and not adapter.keys() & files.keys()
    hub.repos["me/mine"] |= adapter  # beside a model it stays
    assert push(str(tmp_path / "base"), repo_id="me/mine")[0] == "url"
    assert adapter.items() <= hub.repos["me/mine"].items()


def test_what_cannot_be_written_is_an_error_that_names_it(hub: Hub, push: Push, tmp_path: Path) -> None:
    lm.from_config(zoo.CONFIGS["llama-3"]).save_pretrained(tmp_path / "base")
    kind, message = push(str(tmp_path / "base"), token="hf_refused", repo_id="me/mine")
    assert kind == "HubError" and message.startswith("me/mine: upload failed") and "401" in message
    assert not hub.commits and not hub.repos
