"""Models that compute natively on two processes, by accelerate and the Trainer: the same losses and checkpoints."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from two_processes import on_two_processes

import ligermodels as lm

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "trainers.md").read_text()
LAUNCHED: dict[str, dict[str, str]] = {  # what `accelerate launch` sets for the page's options
    "ddp": {},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    },
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    },
}
ON_CPU = {"zero3": "from two_processes import deepspeed_on_cpu\ndeepspeed_on_cpu()\n"}
HOW = ("ddp", "fsdp2", "zero3", "trainer fsdp2", "sft fsdp2")


@pytest.mark.parametrize("how", LAUNCHED)
def test_the_program_of_the_page(how: str, folder: Path, tmp_path: Path) -> None:
    """As the launcher starts it; the model is sharded as asked, and computes natively."""
    if how.startswith("zero") and not find_spec("deepspeed"):
        pytest.skip("needs DeepSpeed")
    (program,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "accelerator.prepare(" in code
    )
    program = program.replace("meta-llama/Llama-3.2-1B", str(folder))
    counting = "from ligermodels.integrations.decoder import HFDecoder as D\nrun, passes = D.forward, []\n"
    counting += "D.forward = lambda *args, **inputs: passes.append(1) or run(*args, **inputs)\n"
    first = f"import os\nos.environ.update({LAUNCHED[how]})\n" + ON_CPU.get(how, "") + counting
    last = "print('RAN', len(passes), accelerator.distributed_type.value)\n"
    (tmp_path / "train.py").write_text(first + program + last)
    said, _ = on_two_processes(tmp_path / "train.py", work=tmp_path)
    kinds = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
    assert f"RAN 8 {kinds[how]}" in said
    before, after = (lm.from_pretrained(name).state_dict() for name in (folder, tmp_path / "out"))
    assert before.keys() == after.keys() and not torch.equal(
        before["decoder.embed.weight"], after["decoder.embed.weight"]
    )


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
