"""The programs of docs/engines.md on two processes: the same losses, steps and checkpoint as one process's."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.testing import assert_close
from two_processes import on_two_processes

import ligermodels as lm

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
DATA, DEEPSPEED, ACCELERATE, FABRIC, TRAINER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# On the CPU DeepSpeed would first compile a C++ extension, an all-reduce by shared memory, and wait for a lock on its
# folder: without end, if a process that held it was killed.
NO_BUILD = 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False'
ON_CPU = {
    "torch.bfloat16": "torch.float32",
    '"bf16": {"enabled": True}': '"bf16": {"enabled": False}',
    "deepspeed.init_distributed()": f'{NO_BUILD}\ndeepspeed.init_distributed("gloo")',
    "Accelerator(": "Accelerator(cpu=True, ",
    "devices=devices": 'accelerator="cpu", devices=devices',
}
# Otherwise ZeRO-3 would leave parameters as small as these whole.
ALL_PARTITIONED = '"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}'
UNGATHERED = """
try:
    model.save_pretrained("none/")
    raise SystemExit("no error")
except lm.errors.InputError as error:
    assert "decoder.embed.weight: is partitioned by DeepSpeed" in str(error), error
print("tokens", model.eval().generate(input_ids[:1, :9], max_new_tokens=8).tolist())

with deepspeed.zero"""
DDP = {", plan=plan": "", "strategy=as_loaded": 'strategy="ddp"', "strategy=strategy": 'strategy="ddp"'}
PROGRAMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "ZeRO-1": ("deepspeed", DEEPSPEED, {'"stage": 3': '"stage": 1'}),
    "ZeRO-2": ("deepspeed", DEEPSPEED, {'"stage": 3': '"stage": 2'}),
    "ZeRO-3": ("deepspeed", DEEPSPEED, {'"stage": 3}': ALL_PARTITIONED, "\nwith deepspeed.zero": UNGATHERED}),
    "accelerate FSDP2": ("accelerate", ACCELERATE, {}),
    "accelerate DDP": ("accelerate", ACCELERATE, {"fsdp_plugin=plugin": ""}),
    "Fabric FSDP2": ("lightning", FABRIC, {}),
    "Fabric DDP": ("lightning", FABRIC, {**DDP, "\nnative.": "\nif fabric.is_global_zero: native."}),
    "Trainer FSDP2": ("lightning", TRAINER, {}),
    "Trainer DDP": ("lightning", TRAINER, {**DDP, "\nmodule.model.": "\nif trainer.is_global_zero: module.model."}),
}
RECOMPUTED = ("ZeRO-3", "accelerate FSDP2")
"""Also with untied embeddings, and activation checkpointing of whole blocks."""
RECOMPUTE = {"\noptimizer =": "\nmodel.activation_checkpointing = 'full'\noptimizer ="}


def changed(program: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        program = program.replace(old, new)
    return program


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    names: dict[str, Any] = {}
    exec(DATA, names)
    return list(names["batches"](0, 1))


def on_one_process(folder: Path) -> tuple[list[float], lm.CausalLM]:
    model = lm.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    for input_ids, labels in batches():
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.eval()


@pytest.mark.parametrize("name, tied", [*((name, True) for name in PROGRAMS), *((name, False) for name in RECOMPUTED)])
def test_a_program_of_the_page(name: str, tied: bool, tmp_path: Path) -> None:
    package, program, changes = PROGRAMS[name]
    if not find_spec(package):
        pytest.skip(f"needs {package}")
    folder = tiny.save(tmp_path / "checkpoint", tie_word_embeddings=tied)
    changes = {"meta-llama/Llama-3.2-1B": str(folder), **changes, **ON_CPU, **({} if tied else RECOMPUTE)}
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "train.py").write_text(changed(program, changes))
    said = on_two_processes(tmp_path / "train.py", work=tmp_path)
    found = [[float(loss) for loss in re.findall(r"loss ([\d.]+)", each)] for each in said]
    losses, model = on_one_process(folder)
    assert_close(torch.tensor(found).mean(0), torch.tensor(losses), rtol=1e-6, atol=1e-6)
    before = lm.from_pretrained(folder, dtype=torch.float32).state_dict()
    again = lm.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for key, after in model.state_dict().items():
        step = after - before[key]
        assert (again.state_dict()[key] - after).norm() < 1e-2 * step.norm(), key
    for rank, text in enumerate(said):
        for tokens in re.findall(r"tokens (.*)", text):
            prompt = batches()[-1][0][2 * rank : 2 * rank + 1, :9]
            assert json.loads(tokens) == model.generate(prompt, max_new_tokens=8).tolist()
    assert ("tokens" in said[1]) == (name == "ZeRO-3")
    prompt = batches()[0][0][:2, :9]
    assert torch.equal(again.generate(prompt, max_new_tokens=8), model.generate(prompt, max_new_tokens=8))
