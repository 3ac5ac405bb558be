"""Muon and 8-bit states on parameters that FSDP2 shards: the updates and states of one process, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from two_ranks import in_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.training import FusedAdamW, Muon, hidden_matrices
from ligermodels.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "rounding": "stochastic", "seed": 3}
KINDS = ("adamw8bit", "muon", "muon8bit")


def optimizer_of(kind: str, model: nn.Module) -> FusedAdamW:
    bits = 8 if kind.endswith("8bit") else None
    if kind == "adamw8bit":
        return FusedAdamW(model.parameters(), state_bits=bits, **OPTIONS)
    return Muon(model.parameters(), matrices=hidden_matrices(model), state_bits=bits, **OPTIONS)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: nn.Module, optimizer: FusedAdamW, seed: int) -> None:
    """A step on gradients that are the same with any sharding."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
    optimizer.step()


def check_same(spread: nn.Module, plain: nn.Module, optimizers: tuple[FusedAdamW, FusedAdamW]) -> None:
    for (name, p), q in zip(spread.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(whole(p), q[1]), name
        states = optimizers[0].state[p], optimizers[1].state[q[1]]
        assert states[0].keys() == states[1].keys()
        for key, state in states[0].items():
            assert torch.equal(whole(state), states[1][key]), (name, key)


def build() -> lm.CausalLM:
    torch.manual_seed(0)
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 2, "mlp_only_layers": []}
    return lm.from_config(config, dtype=torch.bfloat16)


def models() -> tuple[lm.CausalLM, lm.CausalLM]:
    return lm.parallelize(build(), lm.ParallelPlan()), build()


def steps_of_one_process(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    groups = set[int]()
    for kind in KINDS:
        spread, plain = models()
        optimizers = optimizer_of(kind, spread), optimizer_of(kind, plain)
        for seed in range(2):
            step(spread, optimizers[0], seed)
            step(plain, optimizers[1], seed)
        check_same(spread, plain, optimizers)
        # A checkpoint of the shards is resumed by shards, and (in the test) by one process.
        checkpoints, others = Checkpoints(folder / kind), Checkpoints(folder / f"{kind} again")
        for each in (checkpoints, others) if kind == KINDS[0] else (checkpoints,):  # while the first is written
            each.save(2, spread, optimizers[0], {})
        checkpoints.wait()
        others.wait()
        assert others.steps() == ([2] if kind == KINDS[0] else [])
        groups.add(len(dist.distributed_c10d._world.pg_map))
        again, _ = models()
        resumed = optimizer_of(kind, again)
        checkpoints.load(2, again, resumed)
        step(again, resumed, 2)
        step(plain, optimizers[1], 2)
        check_same(again, plain, (resumed, optimizers[1]))
    assert len(groups) == 1, "each Checkpoints made process groups of its own"
    with pytest.raises(InputError, match="Muon gathers sharded parameters"):
        optimizer_of("muon", spread).step_in_backward()


def shards_of_columns(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """As tensor parallelism shards them: whole blocks, or an error."""
    from torch.distributed.tensor import Shard

    weight = torch.randn(6, 1024).to(torch.bfloat16)
    spread, plain = nn.Module(), nn.Module()
    plain.weight = nn.Parameter(weight.clone())
    spread.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))
    for bits in (None, 8):
        for rows in ({}, {"rows": (torch.arange(6)[::2], torch.arange(6)[1::2])}):
            optimizers = [
                Muon(m.parameters(), matrices={m.weight: rows["rows"]} if rows else {}, state_bits=bits, **OPTIONS)
                for m in (spread, plain)
            ]
            for module, optimizer in zip((spread, plain), optimizers, strict=True):
                step(module, optimizer, 0)
            check_same(spread, plain, (optimizers[0], optimizers[1]))
    spread.weight = nn.Parameter(distribute_tensor(weight[:, :600], mesh, [Shard(1)]))
    with pytest.raises(ConfigError, match="8-bit states have blocks of 256 columns, and a rank holds 300 of 600"):
        step(spread, FusedAdamW(spread.parameters(), state_bits=8), 0)


def test_fsdp2_is_one_process(tmp_path: Path) -> None:
    """Of a mixture: matrices, stacks of them, and vectors."""
    in_ranks(2, steps_of_one_process, tmp_path)
    for kind in KINDS:
        model, twin = build(), build()
        optimizers = optimizer_of(kind, model), optimizer_of(kind, twin)
        Checkpoints(tmp_path / kind).load(2, model, optimizers[0])
        step(model, optimizers[0], 2)
        for seed in range(3):
            step(twin, optimizers[1], seed)
        check_same(model, twin, optimizers)


def test_shards_of_columns(tmp_path: Path) -> None:
    in_ranks(2, shards_of_columns, tmp_path)
