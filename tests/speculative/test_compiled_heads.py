"""torch.compile of a whole model with a draft head that proposes blocks, in training."""

from typing import Any

import pytest
import torch
from zoo import CONFIGS

import ligermodels as lm

IDS = torch.tensor([[5, 9, 17, 3, 8, 21, 30], [11, 40, 7, 66, 2, 9, 50]])


@pytest.mark.parametrize(
    ("kind", "options"), [("DFlashModel", {}), ("DSparkModel", {"markov_rank": 4})], ids=["dflash", "dspark"]
)
def test_a_compiled_model_trains(kind: str, options: dict[str, Any]) -> None:
    base = lm.from_config({**CONFIGS["llama-3"], "num_hidden_layers": 1, "initializer_range": 0.3})
    model = getattr(lm, kind).from_base(base, 3, num_layers=1, **options)
    losses, gradients = list[torch.Tensor](), list[list[torch.Tensor]]()
    for called in (model, torch.compile(model, backend="eager")):
        loss = called(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.head_parameters()])
        model.zero_grad()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
