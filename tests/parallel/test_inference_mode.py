"""Sharded models under torch.inference_mode, before and between steps of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def calls_beside_forward(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """The first calls of a model, which gather its parameters for themselves."""
    ids, states = batch(0)["input_ids"], torch.ones(1, 3, 60)
    calls: list[Callable[[Any], Any]] = [
        lambda model: model.log_probs(ids, ids).log_probs,
        lambda model: model.logits(states),
        lambda heads: heads.generate(ids, max_new_tokens=3),
    ]
    for i, call in enumerate(calls):
        both: list[Any] = []
        for _ in range(2):
            torch.manual_seed(1)
            both.append(build("llama-3") if i < 2 else lm.MedusaModel.from_base(build("llama-3"), num_heads=2))
        lm.parallelize(both[0])
        with torch.inference_mode():
            torch.testing.assert_close(*map(call, both))
        check_training(both[0].train(), both[1].train(), torch.optim.SGD)


@pytest.mark.parametrize(("name", "unit"), [("llama-3", "block"), ("llama-3", "model"), ("qwen3_5_text", "block")])
def test_two_ranks(tmp_path: Path, name: str, unit: str) -> None:
    in_two_ranks(infer_and_train, tmp_path, name, unit)


def test_calls_beside_forward(tmp_path: Path) -> None:
    in_two_ranks(calls_beside_forward, tmp_path)
