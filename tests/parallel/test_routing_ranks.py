"""Routing replay and counts of tokens per expert on several ranks, beside one process."""

from pathlib import Path
from typing import Any

import torch
from test_context_parallel import check_pass, inputs_of_all_kinds
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm

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


def test_replay_on_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(replay, tmp_path)
