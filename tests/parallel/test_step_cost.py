"""Costs of training steps: the arithmetic by hand, and times beside recorded steps."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import BASE, CONFIGS

import ligermodels as lm
from benchmarks.cases.parallel import Case, degrees_of, plan_of
from benchmarks.cases.trees import config_of
from ligermodels.arguments import QuantizedFormat
from ligermodels.errors import InputError
from ligermodels.parallel.cost import Hardware, ModelSize, step_cost
from ligermodels.training.cuda_graph import FLOPS_PER_BLOCK

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def on_meta(config: dict[str, Any]) -> lm.CausalLM:
    return lm.from_config(config, dtype=torch.bfloat16, device="meta")


def measured() -> list[Any]:
    """The newest record of each case of ours on one and two H200s. Routers with random weights leave ranks idle, so of
    expert parallelism those with experts at random."""
    lines = (RESULTS / "parallel-h200.jsonl").read_text().splitlines()
    found = {
        (each["case"], each["gpus"]): each
        for each in map(json.loads, lines)
        if each["provider"] == "ligermodels"
        and each["gpus"] < 3
        and not each.get("medusa_heads")
        and (each.get("balanced") or "expert" not in each["plan"])
    }
    return [pytest.param(each, id=f"{case} on {gpus}") for (case, gpus), each in found.items()]


@pytest.mark.parametrize("record", measured())
def test_times_are_those_measured(record: dict[str, Any]) -> None:
    """Within 10 %."""
    case = Case(**{each.name: record[each.name] for each in fields(Case) if each.name in record})
    plan = plan_of(case, record["gpus"])
    size, tokens = ModelSize.of(on_meta(config_of(case.model, layers=case.layers))), case.batch * case.length
    recordable = {"tensor", "context", "expert"}.isdisjoint(record["plan"])
    if recordable and 6 * size.used * tokens / size.num_layers < FLOPS_PER_BLOCK:
        pytest.skip("`train` records this step in a CUDA graph, and the benchmark does not")
    found = step_cost(
        size,
        tokens,
        case.length,
        {**degrees_of(case, record["gpus"]), "expert": plan.expert},
        activation_checkpointing=plan.activation_checkpointing,
        reshard_after_forward=plan.reshard_after_forward,
        fsdp_unit=plan.fsdp_unit,
    )
    assert found.seconds * 1e3 == pytest.approx(record["step_ms"], rel=0.1)


def test_costs_by_hand() -> None:
    """Of a model of one layer's size: 100 parameters, 10 tokens of a sequence of 4."""
    size = ModelSize(weights=200, gradients=200, used=100, trained=100, attention=6, num_layers=2, hidden_size=5)
    hardware = Hardware(
        flops=1e3, memory_bandwidth=math.inf, host_bandwidth=100, network_bandwidth=10, gpus_per_host=4, contention=0,
        launch_s=0,
    )  # fmt: skip
    one = step_cost(size, 10, 4, {}, hardware=hardware)
    assert one.flops == 10 * (6 * 100 + 3.5 * 2 * 4 * 6)
    assert set(one.sent.values()) == {0}
    assert one.seconds == pytest.approx(one.flops / 1e3)
    full = step_cost(size, 10, 4, {}, passes=3, activation_checkpointing="full", hardware=hardware)
    assert full.flops == 3 * 10 * (8 * 100 + 4.5 * 2 * 4 * 6)
    slow = replace(hardware, host_memory_bandwidth=10)  # both ways, of 2 layers
    offloaded = step_cost(size, 10, 4, {"context": 2}, passes=3, activation_checkpointing="offload", hardware=slow)
    assert offloaded.flops == full.flops / 2 and offloaded.copied_s == 3 * 2 * (10 * 5 * 2 * 2) / 2 / 10
    assert offloaded.seconds == pytest.approx(max(offloaded.compute_s, 60.0))
    assert full.copied_s == 0
    several = step_cost(size, 10, 4, {"replicate": 4, "shard": 2, "tensor": 2}, hardware=hardware)
    assert several.flops == one.flops / 2
    assert several.sent == {
        "shard": 3 * 100 / 2,
        "replicate": 2 * 50 * 3 / 4,
        "context": 0,
        "tensor": 4 * 2 * (10 * 5 * 2 * 2) / 2,
        "expert": 0,
    }
    # four neighbours are within a host, all sixteen are not
    assert several.sent_s == {"shard": 1.5, "replicate": 7.5, "context": 0.0, "tensor": 8.0, "expert": 0.0}
    assert several.seconds == pytest.approx(max(several.compute_s, 9.0) + 8.0)
    divided = step_cost(replace(size, keys_values=8), 10, 4, {"shard": 2, "context": 2}, hardware=hardware)
    assert divided.flops == one.flops / 2
    exchanged = {"context": 2 * 10 * 8 * 2 / 2, "tensor": 0, "expert": 0}
    assert divided.sent == {"shard": 3 * 200 * 3 / 4, "replicate": 0, **exchanged}
    assert divided.seconds == pytest.approx(max(divided.compute_s, 4.5) + 1.6)
    gathered = step_cost(replace(size, gathered=30), 10, 4, {"tensor": 2}, hardware=hardware)
    assert gathered.sent["tensor"] == several.sent["tensor"] + 2 * 10 * 30 * 2 / 2
    # Of 200 bytes 80 of experts. In one layer a token goes to all 6 ranks, in the other to the rank of its one expert.
    mixture = replace(size, experts=80, expert_gradients=80, routed=(6, 1))
    spread = step_cost(mixture, 12, 4, {"shard": 12, "expert": 6, "replicate": 2}, hardware=hardware)
    assert spread.sent["shard"] == pytest.approx(3 * 120 * 11 / 12 + 3 * (80 / 6) / 2)
    assert spread.sent["replicate"] == pytest.approx(2 * (120 / 12 + 80 / 12) / 2)
    assert spread.sent["expert"] == pytest.approx(4 * (12 * 5 * 2) * (5 + 5 / 6))
    # 3 of 5 are in the host of 4; the ring of 12 crosses by 4 adapters, that of every sixth by one.
    assert spread.sent_s["expert"] == pytest.approx(max(2800 * 3 / 5 / 100, 2800 * 2 / 5 / 10))
    assert spread.sent_s["shard"] == pytest.approx(330 / 40 + 20 / 10)
    again = step_cost(mixture, 12, 4, {"shard": 6, "expert": 6}, activation_checkpointing="full", hardware=hardware)
    assert again.sent["expert"] == pytest.approx(spread.sent["expert"] * 5 / 4)
    assert step_cost(mixture, 10, 4, {"shard": 2}).sent == step_cost(size, 10, 4, {"shard": 2}).sent
    with pytest.raises(InputError, match=r"expert: 2 does not divide the 1 ranks"):
        step_cost(mixture, 10, 4, {"expert": 2})
    with pytest.raises(InputError, match="pipeline: the cost"):
        step_cost(size, 10, 4, {"pipeline": 2})
    with pytest.raises(InputError, match="tokens"):
        step_cost(size, 0, 4, {})


def test_what_slows_a_step_by_hand() -> None:
    """Each term alone, beside the same step without it."""
    size = ModelSize(
        weights=200, gradients=400, used=100, trained=100, attention=6, num_layers=2, hidden_size=5, experts=80,
        expert_gradients=160, routed=(2, 2), expert_channels=2 * 2 * (5 + 3), updated=200,
    )  # fmt: skip
    fast = Hardware(flops=1e3, memory_bandwidth=math.inf, host_bandwidth=100, contention=0, launch_s=0)
    copies = replace(fast, memory_bandwidth=10)

    def cost(degrees: dict[str, int], hardware: Hardware, **options: Any) -> Any:
        return step_cost(size, 10, 4, degrees, hardware=hardware, **options)

    def slower(degrees: dict[str, int], hardware: Hardware, **options: Any) -> float:
        return cost(degrees, hardware, **options).seconds - cost(degrees, fast, **options).seconds  # type: ignore[no-any-return]

    rows = 10 * 32 * 2 * 16 / 10
    assert slower({}, copies) == pytest.approx(rows + 7 * 200 / 10)  # the optimizer reads 4 tensors and writes 3
    both = 2 * (2 * 200 + 400) / 10
    assert slower({"shard": 4}, copies) == pytest.approx(rows + both + 7 * 50 / 10)
    once = 2 * (200 + 400) / 10
    assert slower({"shard": 4}, copies, reshard_after_forward=False) == pytest.approx(rows + once + 7 * 50 / 10)
    assert slower({"replicate": 2}, copies) == pytest.approx(rows + both + 7 * 200 / 10)
    assert slower({"tensor": 2}, copies) == pytest.approx(rows / 2 + 7 * 100 / 10)  # FSDP2 has nothing to do
    others = 2 * (2 * 120 + 240) / 10
    assert slower({"shard": 2, "expert": 2}, copies) == pytest.approx(rows + others + 7 * 100 / 10)
    shared = replace(fast, contention=0.5)
    assert slower({"shard": 2}, shared) == pytest.approx(0.5 * (2 * 200 + 400) / 2 / 100)
    waits = cost({"shard": 2}, replace(fast, flops=1e9))
    assert waits.exposed_s == pytest.approx(4.0 - waits.compute_s) and waits.seconds == pytest.approx(4.0)
    launches = replace(fast, launch_s=100.0)  # two blocks, FSDP2 for each, two mixtures, two exchanges of 2.2
    found = [cost(degrees, launches).seconds for degrees in ({"tensor": 2}, {"shard": 2, "expert": 2})]
    assert found == [400.0, 1040.0]
    assert all(cost(degrees, launches) == cost(degrees, fast) for degrees in ({}, {"shard": 2}, {"replicate": 2}))
    both = {"shard": 2, "tensor": 2}
    assert cost(both, launches, passes=3).seconds == 3 * 600
    assert cost(both, launches, fsdp_unit="model").seconds == 550  # 0.75 of FSDP2's work
    at_once = cost({"shard": 2}, shared, fsdp_unit="model")
    assert (at_once.sent["shard"], at_once.overlapped_s, at_once.exposed_s) == ((200 + 400) / 2, 0, 3.0)
    assert at_once.seconds == at_once.compute_s + 3.0


def test_a_model_is_multiplied_by_its_matrices_and_by_the_experts_that_are_chosen() -> None:
    model = on_meta({**BASE, "model_type": "llama", "tie_word_embeddings": False})
    assert ModelSize.of(model).used == sum(p.numel() for p in model.parameters()) - model.decoder.embed.weight.numel()
    tied = on_meta({**BASE, "model_type": "llama", "tie_word_embeddings": True})
    assert ModelSize.of(tied).used == sum(p.numel() for p in tied.parameters())
    assert ModelSize.of(on_meta(CONFIGS["qwen3_5_text"])).gathered == 3 * 136 and ModelSize.of(tied).gathered == 0
    assert ModelSize.of(tied).updated == 2 * sum(p.numel() for p in tied.parameters())
    mixture = on_meta({**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2})
    experts = sum(p.numel() for p in mixture.parameters() if p.ndim == 3)
    others = sum(p.numel() for p in mixture.parameters() if p.ndim < 3) - mixture.decoder.embed.weight.numel()
    assert ModelSize.of(mixture).used == others + experts / 2
    inner = BASE["hidden_size"] + BASE["intermediate_size"]
    assert ModelSize.of(mixture).expert_channels == 2 * BASE["num_hidden_layers"] * inner
    lm.add_lora(model, 3)
    size = ModelSize.of(model)
    assert size.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) < size.used / 2


@pytest.mark.parametrize("kind", ["float8", "int4", "nf4", "mxfp4"])
def test_a_quantised_model_is_multiplied_by_as_many_numbers(kind: QuantizedFormat) -> None:
    sizes = {**BASE, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    for each in ({"model_type": "llama"}, {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}):
        model = on_meta({**sizes, **each})
        before = ModelSize.of(model)
        lm.quantize(model, kind)
        after = ModelSize.of(model)
        assert after.used == before.used and after.weights < before.weights
