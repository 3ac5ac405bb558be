"""Routers in float32 in a bfloat16 model on two ranks: every plan computes and trains as one process does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import by_first_rank, in_two_ranks, own_parts
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.layers import Router
from ligermodels.layers.modules import modules_of
from ligermodels.models.hidden_matrices import hidden_matrices
from ligermodels.training import FusedAdamW, Muon

PLANS: list[dict[str, Any]] = [
    {},
    {"fsdp_unit": "model"},
    {"replicate": 2},
    {"context": 2},
    {"tensor": 2},
    {"expert": 2},
    {"expert": 2, "fsdp_unit": "model"},
    {"expert": 2, "param_dtype": "bfloat16"},  # FSDP2 then gathers the experts of each rank
]
MODES: tuple[Any, ...] = ("none", "selective", "full")
NAMES = {"glm4_moe": PLANS, "mimo_v2_flash": PLANS[-1:]}
"""With and without a shared expert, which FSDP2 gathers beside spread experts."""


def build(name: str) -> lm.CausalLM:
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 8, "moe_intermediate_size": 48, "intermediate_size": 96, "num_key_value_heads": 2}
    model = lm.from_config({**CONFIGS[name], **sizes}, dtype=torch.bfloat16)
    for router in modules_of(model, Router):  # a few clear choices, which the rounding of tokens does not change
        torch.nn.init.normal_(router.weight, std=0.5)
    return model


def train(rank: int, folder: Path, mesh: DeviceMesh, name: str) -> None:
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = build(name)
    wanted = by_first_rank(plain, lambda plain: plain(ids, labels=ids).loss)
    for number, plan in enumerate(NAMES[name]):
        model = lm.parallelize(build(name), lm.ParallelPlan(**plan, activation_checkpointing=MODES[number % 3]))
        kind = partial(Muon, matrices=hidden_matrices(model)) if number % 2 else FusedAdamW
        optimizer = kind(model.parameters(), lr=1e-5)
        loss = model(ids, labels=ids).loss
        torch.testing.assert_close(loss.detach(), wanted, rtol=2e-2, atol=2e-2)
        loss.backward()
        check_gradients(model, plain, plan)
        optimizer.step()
        for router, before in zip(modules_of(model, Router), modules_of(plain, Router), strict=True):
            found, own = own_parts(router.weight.detach(), before.weight.detach())
            moved = (found - own).abs()[own_parts(router.weight.grad, before.weight.grad)[0] != 0]
            assert found.dtype == torch.float32 and moved.numel(), plan
            assert ((moved > 5e-6) & (moved < 2e-5)).all(), plan  # bfloat16 would round such steps to nothing


def check_gradients(model: lm.CausalLM, plain: lm.CausalLM, plan: dict[str, Any]) -> None:
    for (key, p), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (wanted.grad is None), (plan, key)
        if wanted.grad is not None:
            assert p.grad.dtype == p.dtype == wanted.dtype, (plan, key)
            found, own = own_parts(p.grad, wanted.grad)
            error = (found.float() - own.float()).abs().max() / wanted.grad.abs().max()
            assert error < 5e-2, (plan, key, error)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    in_two_ranks(train, tmp_path, name)
