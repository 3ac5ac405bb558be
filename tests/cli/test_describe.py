"""`info` of a checkpoint: what it reads."""

import json
from pathlib import Path

import pytest
from zoo import CONFIGS, make_checkpoint

from ligermodels.cli.describe import checkpoint_facts
from ligermodels.convert.safetensors_reader import Checkpoint


@pytest.mark.parametrize("dtype", ["float32", None])
def test_the_files_are_opened_once(dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the dtype is not in config.json, but that of the tensors."""
    make_checkpoint(tmp_path, {"model_type": "qwen3", **CONFIGS["qwen3"]})
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config if dtype is None else {**config, "dtype": dtype}))
    opened, plain = [], Checkpoint.__init__
    monkeypatch.setattr(Checkpoint, "__init__", lambda self, *args: (opened.append(args), plain(self, *args))[1])
    facts = checkpoint_facts(tmp_path)
    assert facts["dtype"] == "float32" and facts["tensors"] > 5 and next(iter(facts)) == "model_type"
    assert len(opened) == 1
