"""`ligermodels plan`: memory against peaks measured on a GPU, the arithmetic of costs, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner
from zoo import BASE, CONFIGS

import ligermodels as lm
from benchmarks.models import CONFIGS as MODELS
from ligermodels.cli import app
from ligermodels.cli.plan import memory_size
from ligermodels.errors import ConfigError, InputError
from ligermodels.parallel.advice import candidates
from ligermodels.parallel.cost import Hardware, ModelSize, step_cost
from ligermodels.parallel.memory import step_memory

GIB = 2**30
RESULTS = Path(__file__).parent.parent / "benchmarks/results/training-h200.jsonl"


def on_meta(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> lm.CausalLM:
    return lm.from_config(config, dtype=dtype, device="meta")


def measured() -> list[Any]:
    """The newest record of each case of ours, all labels in use."""
    records = map(json.loads, RESULTS.read_text().splitlines())
    found = {
        each["case"]: each
        for each in records
        if each["provider"] == "ligermodels" and "peak_gib" in each and not each.get("in_backward") and "model" in each
    }
    return [pytest.param(each, id=name) for name, each in found.items() if not each["ignored"]]


@pytest.mark.parametrize("record", measured())
def test_memory_is_that_measured_on_an_h200(record: dict[str, Any]) -> None:
    """Within 5 % of `torch.cuda.max_memory_allocated`."""
    model = on_meta(MODELS[record["model"]])
    if rank := record.get("lora_rank"):
        lm.add_lora(model, rank)
    # Records of before say nothing of it: the cases with a lot of tokens took it.
    old = "selective" if record["model"] == "llama-3-8b" and record["batch"] > 1 else "none"
    model.activation_checkpointing = record.get("activation_checkpointing") or old
    found = step_memory(model, record["batch"], record["length"]).total
    peak = (record["peak_gib"] - record.get("held_before_gib", 0.0)) * GIB
    assert abs(found / peak - 1) < 0.05, (found / GIB, record["peak_gib"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_can_be_asked(name: str) -> None:
    model = on_meta(CONFIGS[name])
    found = {}
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode
        found[mode] = step_memory(model, 2, 40)
    assert found["full"].activations < found["none"].activations
    assert found["none"].weights == sum(p.nbytes for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_shards_divide_what_lasts_and_gather_what_computes() -> None:
    model = on_meta(MODELS["llama-3.2-1b"])
    whole, sharded = (step_memory(model, 1, 256, shard=n) for n in (1, 8))
    assert sharded.weights == whole.weights // 8
    assert sharded.optimizer_states == whole.optimizer_states // 8
    assert sharded.activations == whole.activations
    divided = step_memory(model, 1, 256, shard=2, context=4)
    assert divided.weights == sharded.weights and divided.optimizer_states == sharded.optimizer_states
    # Of the tokens a quarter, but for the keys and values, which are of all.
    more, less = (step_memory(model, 1, 512, **each).activations for each in ({}, {"shard": 2, "context": 4}))
    of_tokens, kept = more - whole.activations, less - divided.activations
    mixers = [block.mixer.info() for block in model.config.blocks]
    keys_values = 256 * sum(2 * each["kv_heads"] * each["head_dim"] * 2 for each in mixers)
    assert of_tokens / 4 < kept < of_tokens / 4 + 1.5 * keys_values < of_tokens / 2
    assert whole.gathered == 0 < sharded.gathered < whole.weights + whole.optimizer_states
    adafactor = step_memory(model, 1, 256, optimizer="adafactor")
    assert adafactor.optimizer_states < whole.optimizer_states / 100
    lm.add_lora(model, 4)
    assert step_memory(model, 1, 256).optimizer_states < whole.optimizer_states / 100


def test_costs_by_hand() -> None:
    """Of a model of one layer's size: 100 parameters, 10 tokens of a sequence of 4."""
    size = ModelSize(weights=200, gradients=200, used=100, trained=100, attention=6, num_layers=2, hidden_size=5)
    hardware = Hardware(flops=1e3, host_bandwidth=100, network_bandwidth=10, gpus_per_host=4)
    one = step_cost(size, 10, 4, {}, hardware=hardware)
    assert one.flops == 10 * (6 * 100 + 3.5 * 2 * 4 * 6)
    assert set(one.sent.values()) == {0}
    assert one.seconds == pytest.approx(one.flops / 1e3)
    full = step_cost(size, 10, 4, {}, passes=3, activation_checkpointing="full", hardware=hardware)
    assert full.flops == 3 * 10 * (8 * 100 + 4.5 * 2 * 4 * 6)
    several = step_cost(size, 10, 4, {"replicate": 4, "shard": 2, "tensor": 2}, hardware=hardware)
    assert several.flops == one.flops / 2
    assert several.sent == {
        "shard": 3 * 100 / 2,
        "replicate": 2 * 50 * 3 / 4,
        "context": 0,
        "tensor": 4 * 2 * (10 * 5 * 2 * 2) / 2,
    }
    # four neighbours are within a host, all sixteen are not
    assert several.sent_s == {"shard": 1.5, "replicate": 7.5, "context": 0.0, "tensor": 8.0}
    assert several.seconds == pytest.approx(max(several.compute_s, 9.0) + 8.0)
    divided = step_cost(replace(size, keys_values=8), 10, 4, {"shard": 2, "context": 2}, hardware=hardware)
    assert divided.flops == one.flops / 2
    assert divided.sent == {"shard": 3 * 200 * 3 / 4, "replicate": 0, "context": 2 * 10 * 8 * 2 / 2, "tensor": 0}
    assert divided.seconds == pytest.approx(max(divided.compute_s, 4.5) + 1.6)
    with pytest.raises(InputError, match="expert: the cost"):
        step_cost(size, 10, 4, {"expert": 2})
    with pytest.raises(InputError, match="tokens"):
        step_cost(size, 0, 4, {})


def test_a_model_is_multiplied_by_its_matrices_and_by_the_experts_that_are_chosen() -> None:
    model = on_meta({**BASE, "model_type": "llama", "tie_word_embeddings": False})
    assert ModelSize.of(model).used == sum(p.numel() for p in model.parameters()) - model.decoder.embed.weight.numel()
    tied = on_meta({**BASE, "model_type": "llama", "tie_word_embeddings": True})
    assert ModelSize.of(tied).used == sum(p.numel() for p in tied.parameters())
    mixture = on_meta({**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2})
    experts = sum(p.numel() for p in mixture.parameters() if p.ndim == 3)
    others = sum(p.numel() for p in mixture.parameters() if p.ndim < 3) - mixture.decoder.embed.weight.numel()
    assert ModelSize.of(mixture).used == others + experts / 2
    lm.add_lora(model, 3)
    size = ModelSize.of(model)
    assert size.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) < size.used / 2


def test_the_plans_that_fit() -> None:
    model = on_meta(MODELS["llama-3.2-1b"])
    found = candidates(model, 4, int(24e9), 4 * 8 * 2048, 2048)
    assert all(each.memory.total < 24e9 for each in found)
    assert {each.replicate * each.shard for each in found} == {4}
    assert [each.cost.seconds for each in found] == sorted(each.cost.seconds for each in found)
    assert found[0].activation_checkpointing == "none"
    assert model.activation_checkpointing == "none"
    long = 32 * 2048  # fewer sequences than GPUs
    divided = candidates(model, 4, int(80e9), 2 * long, long)
    assert {(each.replicate * each.shard, each.context) for each in divided} == {(2, 2)}
    alone = candidates(model, 1, int(17e9), 8192, 8192)
    assert {each.activation_checkpointing for each in alone} == {"full", "selective"}
    with pytest.raises(ConfigError, match=r"no plan fits: one sequence of 2048 tokens.*more GPUs.*LoRA"):
        candidates(model, 1, int(4e9), 2048, 2048)
    with pytest.raises(InputError, match=r"tokens: 10240 must be a multiple of seq_len x gpus"):
        candidates(model, 4, int(4e9), 5 * 2048, 2048)
    with pytest.raises(InputError, match="meta device"):
        step_memory(lm.from_config({**BASE, "model_type": "llama"}), 1, 8)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.2-1b"]))
    command = ["plan", str(tmp_path), "--gpus", "2", "--memory", "24GB", "--tokens", "16384"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"torchrun --nproc-per-node 2 -m ligermodels train {tmp_path} " in result.output
    assert "--shard 2" in result.output
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert rows[0]["memory_bytes"] < 24e9
    assert rows[0]["tokens_per_s"] == pytest.approx(16384 / rows[0]["step_s"])
    refused = CliRunner().invoke(app, [*command[:5], "1GB", *command[6:]])
    assert refused.exit_code == 1
    assert "no plan fits" in refused.output


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80e9), ("79.5 GiB", 79.5 * GIB), ("141g", 141e9), ("1000", 1000), ("1.5T", 1.5e12)]
)
def test_sizes_of_memory(text: str, size: float) -> None:
    assert memory_size(text) == int(size)


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "0GB", "-3GB", "nan"])
def test_other_sizes_of_memory(text: str) -> None:

    with pytest.raises(typer.BadParameter, match="must be a size such as 80GB"):
        memory_size(text)
