"""Models that compute natively on two processes, by accelerate and the Trainer: the same losses and checkpoints."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from two_processes import on_two_processes

import ligermodels as lm

HERE = Path(__file__).parent
HOW = ("ddp", "fsdp2", "zero3", "trainer fsdp2", "sft fsdp2")


@pytest.mark.parametrize("how", HOW)
def test_training_on_two_processes(how: str, folder: Path, tmp_path: Path) -> None:
    if how.startswith("zero") and not find_spec("deepspeed"):
        pytest.skip("needs DeepSpeed")
    said, _ = on_two_processes(HERE / "ranks.py", str(folder), str(tmp_path), how, work=tmp_path)
    results = [line.split()[1:] for line in said.splitlines() if line.startswith("RESULT")]
    losses = {kind: torch.tensor([float(loss) for loss in found]) for kind, _, *found in results}
    passes = {kind: int(count) for kind, count, *_ in results}
    wanted, weights = losses.pop("theirs"), lm.from_pretrained(tmp_path / "theirs").state_dict()
    assert passes.pop("theirs") == 0 and len(wanted) == 4 and losses.keys() == {"nativize", "wrap"}
    before = lm.from_pretrained(folder).state_dict()
    assert not torch.equal(weights["decoder.norm.weight"], before["decoder.norm.weight"])
    for kind, found in losses.items():
        assert passes[kind] >= 4
        assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert_close(lm.from_pretrained(tmp_path / kind).state_dict(), weights, rtol=1e-3, atol=1e-5)
