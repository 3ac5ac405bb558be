"""Experts in float8 on two ranks: sharded by FSDP2, or divided by tensor parallelism, beside one process."""

from pathlib import Path

import pytest
import torch
from float8_models import FAMILIES, agreement, build, family, gradients
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.layers import MoE
from ligermodels.layers.modules import modules_of


def experts_of(model: lm.CausalLM, frozen: bool) -> lm.CausalLM:
    for layer in modules_of(model, MoE):
        layer.gate_up.requires_grad_(not frozen)
        layer.down.requires_grad_(not frozen)
    return lm.float8(model, experts=True)


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def work(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for frozen in (False, True):
        wanted = gradients(experts_of(family("mixtral"), frozen))
        for plan in (lm.ParallelPlan(), lm.ParallelPlan(activation_checkpointing="full")):
            model = lm.parallelize(experts_of(family("mixtral"), frozen), plan)
            found = whole(gradients(model))  # both ranks have the same batch
            assert found.keys() == wanted.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-5, atol=1e-7)
    for name in ("mixtral", "gpt_oss, with sinks"):
        plain = gradients(experts_of(family(name), name == "mixtral"))
        model = lm.parallelize(experts_of(family(name), name == "mixtral"), lm.ParallelPlan(tensor=2))
        found = whole(gradients(model))
        assert found.keys() == plain.keys()
        for key, gradient in found.items():  # casts of weights, and blocks of channels, have other scales
            cosine, ratio = agreement(gradient, plain[key])
            assert cosine > 0.97 and 0.9 < ratio < 1.1, (name, key, cosine, ratio)
    with pytest.raises(ConfigError, match=r"expert: decoder.blocks.0.mlp: experts .* in float8 .* cannot be spread"):
        lm.parallelize(experts_of(family("mixtral"), False), lm.ParallelPlan(expert=2))
    narrow = build({**FAMILIES["mixtral"][0], "intermediate_size": 48})
    with pytest.raises(
        ConfigError, match=r"decoder.blocks.0.mlp, of 2 ranks: float8: in_features 24 .* multiples of 16"
    ):
        lm.parallelize(experts_of(narrow, False), lm.ParallelPlan(tensor=2))


def test_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(work, tmp_path)
