"""Heads from the hub: an unmodified huggingface_hub, in a process of its own, against a server on this machine."""

from pathlib import Path

import pytest
import test_hub
from hub_server import Hub, serving
from named_exports import export_named
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm

CHILD = """
import json, sys, time
time.sleep = lambda seconds: None  # huggingface_hub pauses before it tries again.
from ligermodels.speculative.hub import heads_folder
for arguments in json.loads(sys.argv[1]):
    try:
        print(json.dumps(["folder", str(heads_folder(**arguments))]))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
OTHERS = {"README.md": b"never fetched", "medusa_lm_head.bin": b"never fetched", "pytorch_model.bin": b"never fetched"}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a base and of its heads in three formats, one of them in shards."""
    folder = tmp_path_factory.mktemp("heads")
    make_checkpoint(folder / "base", CONFIGS["llama-3.1"])
    medusa = lm.MedusaModel.from_base(lm.from_pretrained(folder / "base"), 2)
    for profile in ("vllm", "fasterdecoding", "full-hf"):
        export_named(medusa, folder / profile, profile, "some/base", max_shard_size="60KB")
    return folder


def test_heads_from_the_hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_hub, "CHILD", CHILD)

    def ask(server: Hub, *names: str) -> list[list[str]]:
        return test_hub.resolve(server, tmp_path, *({"name_or_path": name} for name in names))

    repos = {f"some/{path.name}": {**files(path), **OTHERS} for path in saved.iterdir() if path.name != "base"}
    repos |= {
        "some/nothing": {"config.json": b"{}", **OTHERS},
        "some/cut": {"config.json": b"{}", "medusa_lm_head.safetensors": b"0" * 999},
    }
    wanted = ["some/vllm", "some/fasterdecoding", "some/full-hf"]
    with serving(repos) as server:
        server.cut.add("medusa_lm_head.safetensors")
        found = ask(server, *wanted * 2, "some/nothing", "some/cut", "no/such", "./nowhere")
        for name, (kind, folder) in zip(wanted, found[:3], strict=True):
            assert kind == "folder" and files(Path(folder)) == files(saved / name.removeprefix("some/"))
        assert found[3:6] == found[:3]
        fetched = [path for path in server.served if not path.startswith("some/cut")]
        assert len(fetched) == len(set(fetched)) and not [path for path in fetched if path.split("/")[-1] in OTHERS]
        kinds, messages = zip(*found[6:], strict=True)
        assert kinds == ("HubError", "HubError", "HubError", "CheckpointError")
        assert "some/nothing: has no Medusa heads, in the repository or the cache" in messages[0]
        assert "some/cut: the heads cannot be fetched, run again to retry" in messages[1]
        assert "nor such a repository" in messages[2] and "./nowhere: no such folder" in messages[3]
    # Without a hub the cache will do.
    assert ask(Hub("http://127.0.0.1:9", {}), *wanted) == found[:3]
