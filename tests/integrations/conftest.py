"""Tests with the real packages around transformers: `make test-integrations` installs them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("accelerate", "datasets", "lm_eval", "peft", "trl")

collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    import tiny

    return tiny.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each native pass."""
    import torch

    from ligermodels.integrations.decoder import HFDecoder

    found: list[int] = []
    through = HFDecoder.forward
    count = torch._dynamo.disable(lambda: found.append(1))  # when a compiled pass runs, not when it is traced
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: count() or through(self, *a, **k))
    return found
