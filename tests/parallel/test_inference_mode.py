"""Sharded models under torch.inference_mode, before and between steps of training."""

from pathlib import Path

import pytest
import torch
from test_parallel import batch, build, check_training
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks

import ligermodels as lm


def infer_and_train(rank: int, folder: Path, mesh: DeviceMesh, name: str, unit: str) -> None:
    plain, model = build(name).eval(), lm.parallelize(build(name), lm.ParallelPlan(fsdp_unit=unit)).eval()
    ids = batch(0)["input_ids"]
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(model(ids).logits, plain(ids).logits)
        assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    check_training(model.train(), build(name), torch.optim.SGD)
    with torch.inference_mode():
        assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize(("name", "unit"), [("llama-3", "block"), ("llama-3", "model"), ("qwen3_5_text", "block")])
def test_two_ranks(tmp_path: Path, name: str, unit: str) -> None:
    in_two_ranks(infer_and_train, tmp_path, name, unit)
