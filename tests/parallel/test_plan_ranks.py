"""What `ligermodels plan` says of ranks, beside what ranks hold and send: on four processes with gloo."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parallel import batch, check_training
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from two_ranks import in_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.layers import expert_parallel
from ligermodels.layers.layer import declared
from ligermodels.parallel.cost import ModelSize, step_cost
from ligermodels.parallel.memory import GATHERED_UNITS, StepMemory, step_memory
from ligermodels.training import FusedAdamW

MIXTURE = {**CONFIGS["qwen3_moe"], "num_experts": 8, "num_hidden_layers": 2, "mlp_only_layers": []}
HYBRID = {**CONFIGS["qwen3_5_text"], "num_hidden_layers": 2, "full_attention_interval": 2}
PLANS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    (HYBRID, {"shard": 2, "replicate": 2}, 0),
    (HYBRID | {"intermediate_size": 96}, {"shard": 2, "tensor": 2}, 0),
    (CONFIGS["llama-3.2"] | {"intermediate_size": 96}, {"tensor": 2, "shard": 2}, 3),
    (CONFIGS["gpt_oss"] | {"intermediate_size": 96}, {"tensor": 2, "replicate": 2}, 0),
    (HYBRID, {"shard": 4, "param_dtype": "bfloat16"}, 0),
    (MIXTURE, {"shard": 4, "expert": 2}, 0),
    (MIXTURE, {"shard": 2, "replicate": 2, "expert": 2}, 0),
    (CONFIGS["gpt_oss"] | {"num_local_experts": 8}, {"shard": 2, "context": 2, "expert": 4}, 0),
]
"""With the rank of LoRA: rows that ranks do not divide, tied and untied; modules that stay float32; two dimensions;
computation in bfloat16; experts with biases."""


def held(tensors: Any) -> int:
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in tensors)


def build(config: dict[str, Any], lora: int, device: str) -> Any:
    model = lm.from_config(config, dtype=torch.float32, device=device)
    return lm.add_lora(model, lora) if lora else model


def hold(rank: int, folder: Path, mesh: DeviceMesh, planned: list[StepMemory]) -> None:
    for (config, degrees, lora), wanted in zip(PLANS, planned, strict=True):
        torch.manual_seed(0)
        model = lm.parallelize(build(config, lora, "cpu"), lm.ParallelPlan(**degrees))
        optimizer = FusedAdamW(model.parameters(), lr=1e-3)
        model(**batch(0)).loss.backward()
        optimizer.step()
        trained = wanted.optimizer_states // 2  # of two moments
        kept = (x for state in optimizer.state.values() for x in state.values())
        moments = [x for x in kept if isinstance(x, torch.Tensor) and x.ndim]
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        found = held(model.parameters()), held(gradients), held(moments)
        assert (trained == wanted.weights) == (not lora)
        if rank == 0:
            assert found == (wanted.weights, trained, wanted.optimizer_states), (degrees, found, wanted)
        else:  # with fewer rows, where they are not divided evenly
            assert found[0] <= wanted.weights and found[1] <= trained and found[2] <= wanted.optimizer_states


def reduce(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Bytes of the largest sum of gradients, and of a rank's part of it, in each dtype."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter, sizes = getattr(dist, name), list[tuple[int, int]]()

    def scattered(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append((input.nbytes, output.nbytes))
        return scatter(output, input, *args, **options)

    setattr(dist, name, scattered)
    config = {**CONFIGS["llama-3.2"], "vocab_size": 132, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    dtypes: tuple[Any, ...] = (None, "float32", "bfloat16")
    for param_dtype, reduce_dtype in itertools.product(dtypes, dtypes):
        torch.manual_seed(0)
        plan: dict[str, Any] = {"shard": 4, "param_dtype": param_dtype}
        model = lm.parallelize(build(config, 0, "cpu"), lm.ParallelPlan(**plan, reduce_dtype=reduce_dtype))
        sizes.clear()
        model(**batch(0)).loss.backward()
        whole, part = max(sizes)
        planned = build(config, 0, "meta")
        block = sum(p.numel() for p in planned.decoder.blocks[0].parameters())  # more than the embedding has
        gathered = GATHERED_UNITS * block * (2 if param_dtype == "bfloat16" else 4)
        sums = step_memory(planned, 1, 8, **plan, reduce_dtype=reduce_dtype).gathered - gathered
        is_cast = reduce_dtype == "bfloat16"  # to the parameters' float32
        assert sums == whole + is_cast * part, (param_dtype, reduce_dtype, sums, whole, part)


def send(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Bytes of hidden states that ranks send one another for their experts."""
    gather, exchange, sizes = expert_parallel.start_all_gather, expert_parallel.start_all_to_all, list[int]()

    def gathered(x: Any, ranks: int, group: str) -> Any:
        sizes.append(x.nbytes * (ranks - 1) if x.shape[1] == hidden else 0)
        return gather(x, ranks, group)

    def exchanged(x: Any, sent: Any, received: Any, group: str) -> Any:
        own = dist.get_rank(dist.distributed_c10d._resolve_process_group(group))
        sizes.append((sum(sent) - sent[own]) * hidden * x.itemsize if x.ndim == 2 and x.shape[1] == hidden else 0)
        return exchange(x, sent, received, group)

    expert_parallel.start_all_gather, expert_parallel.start_all_to_all = gathered, exchanged  # type: ignore[assignment]
    hidden = MIXTURE["hidden_size"]
    for degrees in ({"shard": 4, "expert": 2}, {"shard": 2, "context": 2, "expert": 4}):
        torch.manual_seed(0)
        plain = lm.from_config(MIXTURE, dtype=torch.float32)
        cost_of = ModelSize.of(plain)
        model = lm.parallelize(plain, lm.ParallelPlan(**degrees))
        inputs = {name: x.repeat(1, 4)[:, :48] for name, x in dict(batch(rank // 2)).items()}
        for mode in ("none", "selective", "full"):
            sizes.clear()
            model.activation_checkpointing = mode
            model(**inputs).loss.backward()
            every = torch.tensor(float(sum(sizes)))
            dist.all_reduce(every)
            cost = step_cost(cost_of, 2 * 48, 48, degrees, activation_checkpointing=mode)
            chance = 0 if degrees["expert"] <= MIXTURE["num_experts_per_tok"] else 0.15
            assert every.item() == pytest.approx(4 * cost.sent["expert"], rel=chance), mode


def groups(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Parameters divided over all ranks are not in FSDP2's groups, unless these cast them."""
    for degrees, others in (({"tensor": 2}, False), ({"expert": 2}, True)):
        config = MIXTURE | {"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 18}
        for dtype in (None, "bfloat16"):
            torch.manual_seed(0)
            model = lm.parallelize(build(config, 0, "cpu"), lm.ParallelPlan(**degrees, param_dtype=dtype))
            sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
            mixtures = [block.mlp for block in model.decoder.blocks if declared(block.mlp).expert_parallel]
            assert mixtures
            if dtype is None:
                torch.manual_seed(0)
                plain = build(config, 0, "cpu")
                check_training(model, plain, torch.optim.SGD, tensor=degrees.get("tensor", 1))
                assert bool(sharded) == others and not set(mixtures) & set(sharded)
                experts = mixtures[0].gate_up
                assert experts.device_mesh.mesh_dim_names[-1] == ("expert" if others else "tensor")
            else:
                assert {*model.decoder.blocks, *(mixtures if others else [])} <= set(sharded)
                model(**batch(0)).loss.backward()
                assert all(p.grad is not None for p in model.parameters())


def test_parameters_divided_over_all_ranks(tmp_path: Path) -> None:
    in_ranks(2, groups, tmp_path)


def test_ranks_hold_what_is_planned(tmp_path: Path) -> None:
    planned = [step_memory(build(config, lora, "meta"), 1, 8, **degrees) for config, degrees, lora in PLANS]
    in_ranks(4, hold, tmp_path, planned)


def test_sums_of_gradients_are_what_is_planned(tmp_path: Path) -> None:
    in_ranks(4, reduce, tmp_path)


def test_ranks_send_what_is_planned(tmp_path: Path) -> None:
    in_ranks(4, send, tmp_path)
