"""Uploading to the hub: an unmodified huggingface_hub, in a process of its own, against a server on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zoo
from hub_server import TOKEN, Hub, serving
from huggingface_hub import ModelCard

import ligermodels as lm

CHILD = """
import json, sys
import ligermodels as lm
name, scale, options = json.loads(sys.argv[1])
model = lm.from_pretrained(name)
with __import__("torch").no_grad():
    model.decoder.norm.weight.mul_(scale)
try:
    print(json.dumps(["url", model.push_to_hub(**options)]))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
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


def push(hub: Hub, cache: Path, name: str, token: str = TOKEN, scale: float = 2.0, **options: Any) -> tuple[str, str]:
    """(\"url\" or an error's class, URL or message) of loading `name`, changing a weight, and `push_to_hub`."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_TOKEN": token}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", CHILD, json.dumps([name, scale, options])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kind, said = json.loads(run.stdout.splitlines()[-1])
    return kind, said


def base(folder: Path) -> Mapping[str, bytes]:
    """The files of a checkpoint with its card and license."""
    lm.from_config(zoo.CONFIGS["llama-3"]).save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "README.md": CARD.encode(), "LICENSE.txt": b"the license", "USE_POLICY.md": b"the policy"}


def test_a_pushed_model_is_loaded_again_and_has_a_card_and_the_license_of_its_base(tmp_path: Path) -> None:
    with serving({"some/base": base(tmp_path / "base")}) as hub:
        kind, url = push(hub, tmp_path / "cache", "some/base", repo_id="me/mine", commit_message="first", private=True)
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

        # A card that is there stays, on a branch and in a pull request too.
        hub.repos["me/mine"]["README.md"] = b"mine"
        options = {"repo_id": "me/mine", "revision": "main", "create_pr": True}
        assert push(hub, tmp_path / "cache", "some/base", **options) == ("url", f"{hub.url}/me/mine/discussions/1")
        assert hub.commits[1:] == [("me/mine", "main", "Upload model", True)]
        assert hub.repos["me/mine"]["README.md"] == b"mine"


def test_the_license_of_a_local_base_is_copied_and_the_base_is_not_named(tmp_path: Path) -> None:
    for name, content in base(tmp_path / "base").items():
        (tmp_path / "base" / name).write_bytes(content)
    with serving({}) as hub:
        assert push(hub, tmp_path / "cache", str(tmp_path / "base"), repo_id="me/mine")[0] == "url"
        card = ModelCard(hub.repos["me/mine"]["README.md"].decode())
        assert card.data.base_model is None and card.data.license == "llama3.2"
        assert hub.repos["me/mine"]["LICENSE.txt"] == b"the license"


def test_what_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    lm.from_config(zoo.CONFIGS["llama-3"]).save_pretrained(tmp_path / "base")
    with serving({}) as hub:
        kind, message = push(hub, tmp_path / "cache", str(tmp_path / "base"), token="hf_refused", repo_id="me/mine")
        assert kind == "HubError" and message.startswith("me/mine: upload failed") and "401" in message
        assert not hub.commits and not hub.repos
