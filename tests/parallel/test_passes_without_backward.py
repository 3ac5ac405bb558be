"""Passes with gradients that no backward pass follows: FSDP2 keeps what it gathered for them, and an optimizer's step
changes the shards alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_parallel import batch, build
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.training import train
from ligermodels.training.optimizer import adamw

PLANS = (lm.ParallelPlan(), lm.ParallelPlan(fsdp_unit="model"), lm.ParallelPlan(reshard_after_forward=False))


def between_backward_and_step(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """The next pass has the weights of the step."""
    ids = batch(0)["input_ids"]
    passes: list[Callable[[lm.CausalLM], Any]] = [
        lambda model: model(ids),
        lambda model: model.log_probs(ids, ids),
        lambda model: model.logits(torch.ones(1, 2, model.config.hidden_size)),
    ]
    next_passes: list[Callable[[lm.CausalLM, dict[str, Any]], torch.Tensor]] = [
        lambda model, inputs: model(**inputs).loss,
        lambda model, inputs: model.log_probs(**inputs).log_probs.mean(),
    ]
    for plan in PLANS:
        for call in passes:
            losses: list[list[torch.Tensor]] = []
            for model in (build("llama-3"), lm.parallelize(build("llama-3"), plan)):
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                losses.append([])
                for i in range(3):
                    losses[-1].append(next_passes[i % 2](model, batch(i)))
                    losses[-1][-1].backward()
                    call(model)
                    optimizer.step()
                    optimizer.zero_grad()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def before_the_optimizer(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """An optimizer that got gathered copies of parameters would not train these."""
    for plan in PLANS:
        model = lm.parallelize(build("llama-3"), plan)
        model(batch(0)["input_ids"])
        optimizer = adamw(model.parameters(), 1e-2)
        model(**batch(0)).loss.backward()
        with pytest.raises(InputError, match="optimizer: was made after a forward pass without a backward pass"):
            optimizer.step()
        model(batch(0)["input_ids"])
        of_torch = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with pytest.raises(InputError, match="optimizer: was made after a forward pass without a backward pass"):
            train(model, [batch(0)], steps=1, optimizer=of_torch)


def cast_after_a_pass(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Before the first pass a model may be cast, and after it cast back."""
    for plan in PLANS:
        for first in (lambda model: model(**batch(0)).loss.backward(), lambda model: model.generate([[1, 2]])):
            model = lm.parallelize(build("llama-3"), plan).to(torch.bfloat16)
            first(model)
            model.float()
            for call in (lambda model: model(**batch(0)), lambda model: model.log_probs(**batch(0))):
                with pytest.raises(
                    InputError, match=r"to: the model was cast from torch\.bfloat16 to torch\.float32 aft"
                ):
                    call(model)
            model.bfloat16()
            assert model(**batch(0)).loss.isfinite()


def test_between_the_backward_pass_and_the_step(tmp_path: Path) -> None:
    in_two_ranks(between_backward_and_step, tmp_path)


def test_before_the_optimizer_is_made(tmp_path: Path) -> None:
    in_two_ranks(before_the_optimizer, tmp_path)


def test_a_model_that_was_cast_after_a_pass(tmp_path: Path) -> None:
    in_two_ranks(cast_after_a_pass, tmp_path)
