"""The base of distributed draft heads, and what reads its head, may be called before the heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from test_parallel import batch, build
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks

import ligermodels as lm


def medusa() -> Any:
    return lm.MedusaModel.from_base(build("llama-3"), num_heads=2)


def dspark() -> Any:
    return lm.DSparkModel.from_base(build("llama-3"), block_size=3, num_layers=1, markov_rank=4)


def first_calls(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    ids = batch(0)["input_ids"]
    calls: list[tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = [
        (medusa, lambda heads: heads.base(ids).logits),
        (medusa, lambda heads: heads.base.generate(ids, 3)),
        (medusa, lambda heads: heads.base.logits(torch.ones(1, 2, heads.base.config.hidden_size))),
        (dspark, lambda heads: heads.base.log_probs(ids, ids).log_probs),
        (dspark, lambda heads: heads.generate(ids[:1, :4], max_new_tokens=4)),
    ]
    for make, call in calls:
        results = []
        for spread in (False, True):
            torch.manual_seed(1)
            heads = make()
            if spread:
                lm.parallelize(heads)
            first = call(heads).detach()
            torch.manual_seed(2)
            loss = heads(**batch(0)).loss
            loss.backward()
            results.append((first, loss.detach()))
        torch.testing.assert_close(results[1], results[0])


def test_first_calls(tmp_path: Path) -> None:
    in_two_ranks(first_calls, tmp_path)
