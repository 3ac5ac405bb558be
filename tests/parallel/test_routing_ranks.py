"""Routing replay and counts of tokens per expert on several ranks, beside one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_context_parallel import check_pass, inputs_of_all_kinds
from test_parallel import batch
from test_router_bias import biases, mixture, recipe_for
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.layers import Router
from ligermodels.parallel.ranks import DataRanks
from ligermodels.training import FineTuningRecipe, fine_tune, update_router_bias

QWEN = {**CONFIGS["qwen3_moe"], "output_router_logits": True, "router_aux_loss_coef": 0.1}
EVEN = {**QWEN, "intermediate_size": 96, "moe_intermediate_size": 30}
CASES: list[tuple[dict[str, Any], lm.ParallelPlan]] = [
    (QWEN, lm.ParallelPlan(context=2)),
    (CONFIGS["deepseek_v3"], lm.ParallelPlan(context=2, activation_checkpointing="full")),
    (QWEN, lm.ParallelPlan(expert=2, activation_checkpointing="selective")),
    (EVEN, lm.ParallelPlan(tensor=2)),
    (EVEN, lm.ParallelPlan(tensor=2, activation_checkpointing="full")),
]


def build(config: dict[str, Any]) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(config, dtype=torch.float32)


def random_routing(model: lm.CausalLM, inputs: dict[str, Tensor]) -> Tensor:
    router = next(iter(model.decoder.expert_routers.values()))
    sizes = *inputs["input_ids"].shape, len(model.decoder.expert_routers), router.num_experts
    return torch.rand(sizes).topk(router.top_k).indices.to(torch.int16)


def replay(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for config, plan in CASES:
        plain, model = build(config), lm.parallelize(build(config), plan)
        if plan.context > 1:
            plain.router_z_loss_coef = model.router_z_loss_coef = 0.01
        torch.manual_seed(rank if plan.expert > 1 else 0)  # data-parallel ranks have batches of their own
        kinds = inputs_of_all_kinds()
        for kind in ("rows", "packed", "padded"):
            inputs = dict(kinds[kind])
            ids = inputs["input_ids"]
            given = random_routing(plain, inputs)
            with torch.no_grad():
                out, wanted = (m.log_probs(**inputs, routing=given, return_routing=True) for m in (model, plain))
            torch.testing.assert_close(out.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-5)
            assert torch.equal(out.routing, wanted.routing) and out.routing.shape == given.shape, (kind, plan)
            real = inputs.get("attention_mask", torch.ones_like(ids)) == 1
            assert torch.equal(out.routing[real], given[real]) and (out.routing[~real] == -1).all()
            assert torch.equal(out.tokens_per_expert, wanted.tokens_per_expert)
            assert int(wanted.tokens_per_expert.sum()) == int(real.sum()) * given[0, 0].numel()
            if plan.expert == 1:
                check_pass(model, plain, {**inputs, "routing": given})


def balance(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """The load is that of all ranks; of ranks that share sequences it is counted once."""
    for plan in (lm.ParallelPlan(shard=2), lm.ParallelPlan(context=2), lm.ParallelPlan(replicate=2)):
        plain, model = build(CONFIGS["deepseek_v3"]), lm.parallelize(build(CONFIGS["deepseek_v3"]), plan)
        batches = [dict(batch(seed)) for seed in range(2)]
        shared = plan.context == 2
        wanted = sum(plain(**inputs).tokens_per_expert for inputs in batches)
        found = [model(**inputs).tokens_per_expert for inputs in (batches if shared else batches[rank : rank + 1])]
        assert torch.equal(DataRanks.of(model).sum(torch.stack(found).sum(0)), wanted)
        for each, counts in ((plain, wanted), (model, torch.stack(found).sum(0))):
            update_router_bias(each, counts, rate=0.1)
        routers = [[m for m in each.modules() if isinstance(m, Router)] for each in (plain, model)]
        for one, two in zip(*routers, strict=True):
            assert torch.equal(one.selection_bias, two.selection_bias) and one.selection_bias.any()


def test_balance_on_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(balance, tmp_path)


def test_a_run_on_two_ranks(base: Path, data: Path, tmp_path: Path) -> None:
    """Metrics of the load and biases of a run are those of one process."""
    folder = mixture(tmp_path / "base", base, "glm4_moe")
    changes = {"router_bias_update_rate": 0.05, "router_z_loss_coef": 0.01, "checkpoint_every": 2, "steps": 4}
    recipe = recipe_for(folder, data, **changes, micro_batch_tokens=16)
    fine_tune(recipe, tmp_path / "one")
    in_two_ranks(train_run, tmp_path / "ranks", recipe)
    lines = [
        [json.loads(line) for line in (tmp_path / each / "metrics.jsonl").read_text().splitlines()]
        for each in ("one", "ranks/out")
    ]
    for one, two in zip(*([line for line in each if "loss" in line] for each in lines), strict=True):
        assert two == pytest.approx(one, rel=1e-3) and "router_max_violation" in one
    found, wanted = (lm.from_pretrained(tmp_path / each) for each in ("ranks/out", "one"))
    assert torch.equal(biases(found), biases(wanted)) and biases(found).any()


def train_run(rank: int, folder: Path, mesh: DeviceMesh, recipe: FineTuningRecipe) -> None:
    fine_tune(recipe, folder / "out")


def test_replay_on_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(replay, tmp_path)
