"""Benchmarks of steps: training, decoding and prefill beside their peers, and the command line of each."""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benching import SIZES, without_a_device
from zoo import GEMMA4

import ligermodels as lm
from benchmarks.__main__ import MODULES
from benchmarks.cases import all as whole
from benchmarks.cases import (
    batch_invariant,
    cpu_decoding,
    float8_loss,
    grpo,
    mixtures,
    parallel,
    peers,
    training,
    trees,
)
from benchmarks.cases import draft as draft_benchmark
from benchmarks.cases import medusa as medusa_benchmark
from benchmarks.cases import needed_tokens as needed_tokens_benchmark
from benchmarks.cases.models import CONFIGS


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)


def test_decoding_on_a_cpu_is_measured_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are compared: a run of other weights fails."""
    monkeypatch.setitem(cpu_decoding.NEW_TOKENS, "tiny", 6)
    monkeypatch.setitem(cpu_decoding.ROUNDS, "tiny", 2)
    for case in ("tiny greedy batch 4", "tiny sampled batch 1"):
        ours, theirs = cpu_decoding.run(case)
        assert ours["ratio"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
        assert theirs["provider"] == "transformers" and min(ours["halves"]) > 0
    theirs, other = cpu_decoding.models("tiny")
    other.decoder.norm.weight.data.neg_()
    monkeypatch.setattr(cpu_decoding, "models", lambda size: (theirs, other))
    with pytest.raises(RuntimeError, match="tokens are not those of transformers"):
        cpu_decoding.run("tiny greedy batch 1")


def test_steps_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device; a peer trains all parameters alone."""
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    case = parallel.Case("llama-3-8b", 2, 24, {"tensor": 2, "activation_checkpointing": "full"})
    record = parallel.run(case, parallel.OURS, 2)
    assert record["tokens_per_s_per_gpu"] == pytest.approx(2 * 24 / record["step_ms"] * 1e3)
    assert record["degrees"] == {"replicate": 1, "shard": 1, "context": 1, "tensor": 1}
    assert parallel.degrees_of(case, 4) == {"replicate": 1, "shard": 2, "context": 1, "tensor": 2}
    assert parallel.planned_gib(case, 4) < parallel.planned_gib(case, 1)
    assert not parallel.has_peer(case) and parallel.has_peer(parallel.CASES[0])
    experts = dataclasses.replace(case, plan={"expert": 2})
    assert parallel.planned_gib(experts, 1) == parallel.planned_gib(dataclasses.replace(case, plan={}), 1)
    with pytest.raises(ValueError, match="the model has no experts"):
        parallel.run(case, parallel.OURS, 1, balanced=True)


def test_balanced_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "qwen3-30b-a3b", trees.config_of("qwen3-30b-a3b", tiny=True))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    case = parallel.Case("qwen3-30b-a3b", 1, 300)
    found = [parallel.run(case, parallel.OURS, 2, balanced=balanced)["balanced"] for balanced in (False, True)]
    assert found == [False, True]
    model = lm.from_config(CONFIGS["qwen3-30b-a3b"])
    experts = parallel.random_experts(model, torch.zeros(2, 300, dtype=torch.long))
    assert experts.shape == (2, 300, 2, 2) and (experts[..., 0] != experts[..., 1]).all()
    counts = experts.flatten().bincount(minlength=8)
    assert counts.min() > 0.8 * counts.max()


def test_steps_of_grpo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ours; TRL's are in an environment of their own."""
    monkeypatch.setitem(CONFIGS, "qwen3-0.6b", CONFIGS["qwen3-0.6b"] | SIZES | {"vocab_size": 8192})
    case = grpo.Case(prompts=1, generations=2, tokens=128, steps=2)
    grpo.files(case, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    record = grpo.run(case, "ligermodels", tmp_path)
    assert record["tokens_per_s"] == pytest.approx(2 * 128 / record["step_s"])


def test_bits_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "qwen3-8b", CONFIGS["qwen3-8b"] | SIZES | {"vocab_size": 8192})
    monkeypatch.setattr(batch_invariant, "LENGTH", 64)
    monkeypatch.setattr(batch_invariant, "BATCHES", (1,))
    monkeypatch.setattr(batch_invariant, "STEPS", 4)
    monkeypatch.setattr(batch_invariant, "NEW", 5)
    monkeypatch.setattr(batch_invariant, "LENGTHS", (7, 40, 23))
    record = batch_invariant.run("qwen3-8b", True)
    assert record["equal_in_a_batch"] == record["equal_in_training"] == record["prompts"] == 3
    assert min(record["forward_ms"], record["step_ms"]) > 0
    assert "decoding_1_ms" in record  # a difference of two times, which a busy machine makes negative


@pytest.mark.parametrize("case", [mixtures.CASES[0], mixtures.CASES[-1]], ids=lambda case: case.model)
def test_steps_of_mixtures(case: mixtures.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss, the same operations, with LoRA and checkpointing too."""
    sizes = SIZES | {"moe_intermediate_size": 32, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
    config = CONFIGS[case.model]
    monkeypatch.setitem(CONFIGS, case.model, config | {k: v for k, v in sizes.items() if k in config})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    case = dataclasses.replace(case, batch=1, length=24, layers=None, attention="eager")
    assert mixtures.agreement(case) < 0.01
    records = [mixtures.run(case, provider, 2) for provider in mixtures.PROVIDERS]
    assert records[0]["tflops"] * records[0]["step_ms"] == pytest.approx(records[1]["tflops"] * records[1]["step_ms"])


def test_training_steps_of_ours_and_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    case = training.Case("llama-3-8b", 2, 24, ignored=0.5, activation_checkpointing="selective", in_backward=True)
    verifier = training.Verifier(tmp_path)
    for provider in ("ligermodels", "transformers"):
        record = training.record_of(case, provider, verifier, {"floor_ms": 1.0}, profiled=False)
        assert "failed" not in record, record["failed"]
        assert record["of_floor"] == pytest.approx(1 / record["step_ms"])
    wrong = peers.PROVIDERS["ligermodels"](CONFIGS["llama-3-8b"], None)
    monkeypatch.setitem(training.PROVIDERS, "transformers + liger", lambda config, folder: wrong)
    record = training.record_of(case, "transformers + liger", verifier, {}, profiled=False)
    assert "wrong by" in record["failed"]


def test_the_peer_in_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's, on the large linear layers of compiled blocks, alone; beside LoRA too."""
    pytest.importorskip("torchao.float8")
    sizes = SIZES | {"hidden_size": 1040, "intermediate_size": 1056, "num_attention_heads": 65, "head_dim": 16}
    sizes |= {"num_key_value_heads": 5}
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | sizes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    left_out: dict[str, bool] = {}
    monkeypatch.setattr(peers, "_with_liger", lambda model, **kernels: (model, left_out.update(kernels))[0])
    model = peers.PROVIDERS[peers.TORCHAO](CONFIGS["llama-3-8b"], None)
    kinds = {name.rpartition(".")[2]: type(m).__name__ for name, m in model.named_modules() if hasattr(m, "weight")}
    projections = {name for name, kind in kinds.items() if kind == "Float8Linear"}
    assert projections == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} and kinds["lm_head"] == "Linear"
    assert left_out == dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), False)
    assert all(block._compiled_call_impl is not None for block in cast(Any, model).model.layers)
    case, verifier = training.Case("llama-3-8b", 2, 24), training.Verifier(tmp_path)
    ranks = (None, 4) if importlib.util.find_spec("peft") else (None,)
    for rank in ranks:
        record = training.record_of(dataclasses.replace(case, lora_rank=rank), peers.TORCHAO, verifier, {}, False)
        assert "failed" not in record, record["failed"]
        assert 0.02 < record["error"] < 0.3  # of float8, not of bf16


def test_a_peer_that_is_missing_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "llama-3-8b", CONFIGS["llama-3-8b"] | SIZES)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    case, verifier = training.Case("llama-3-8b", 2, 24), training.Verifier(tmp_path)
    record = training.record_of(case, peers.TORCHAO, verifier, {}, False)
    assert record["failed"].startswith("ModuleNotFoundError") and "step_ms" not in record
    with pytest.raises(ModuleNotFoundError, match="torchao"):
        medusa_benchmark.make("liger + torchao float8", CONFIGS["llama-3-8b"], 2)


def test_a_case_is_chosen_by_its_name_or_by_parts() -> None:
    def names(*parts: str) -> list[str]:
        return [case.name for case in training.chosen(parts)]

    assert names("llama-3-8b 4x4096") == ["llama-3-8b 4x4096"]  # not that with LoRA
    assert names("1b", "LoRA") == [
        *("llama-3.2-1b 4x4096", "llama-3.2-1b 4x4096 50% ignored", "llama-3-8b 4x4096 LoRA 16"),
        *("llama-3-8b 2x4096 LoRA 16", "qwen3-0.6b 8x2048 LoRA 16"),
    ]
    assert len(names()) == len(training.CASES) and names("gpt-5") == []


def test_every_command_of_the_whole_is_one_that_its_benchmark_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, parsed = argparse.ArgumentParser.parse_args, []

    def stop(self: argparse.ArgumentParser) -> None:
        parsed.append(parse(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    lines = [line for of_one in whole.COMMANDS.values() for line in of_one]
    for line in lines:
        name, *arguments = shlex.split(line.format(folder="folder"))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(MODULES[name]).main()
    assert len(parsed) == len(lines)
    known = {
        *peers.PROVIDERS,
        *medusa_benchmark.PEERS,
        *float8_loss.PROVIDERS,
        *draft_benchmark.PROVIDERS,
        "ligermodels shared",
        "ligermodels stage 2",
        "ligermodels float8",
    }
    assert all(set(getattr(found, "providers", None) or ()) <= known for found in parsed)


@pytest.mark.parametrize(
    ("name", "in_training", "in_prefill"), [("gemma-4-e2b", 0.519, 0.692), ("gemma-4-e4b", 0.313, 0.418)]
)
def test_needed_tokens_save_the_rest_of_the_layers_past_the_last_keys(
    name: str, in_training: float, in_prefill: float
) -> None:
    """By the sizes of the linear layers that get fewer tokens; and the shares that the documentation gives."""
    model = lm.from_config(CONFIGS[name], device="meta")
    blocks = list(model.decoder.blocks)
    last = len(blocks) - CONFIGS[name]["num_kv_shared_layers"] - 1
    spared = blocks[last + 1 :]
    weights = sum(m.weight.numel() for part in spared for m in part.modules() if isinstance(m, torch.nn.Linear))
    length = 4096
    for needed, share in ((length // 4, in_training), (1, in_prefill)):
        fewer, every = needed_tokens_benchmark.linear_flops(CONFIGS[name], length, needed)
        assert every - fewer == 2 * (length - needed) * weights
        assert 1 - fewer / every == pytest.approx(share, abs=5e-4)


def test_needed_tokens_with_and_without_compute_the_same() -> None:
    torch.manual_seed(0)
    model = lm.from_config(GEMMA4["gemma4_text-per-layer-inputs"])
    ids = torch.randint(3, 131, (1, 29))
    labels = ids.masked_fill(torch.arange(29) < 21, -100)
    prefill, training_step = needed_tokens_benchmark.prefill_ways, needed_tokens_benchmark.training_ways
    for ways in (prefill(model, ids), training_step(model, ids, labels)):
        found, wanted = (way() for way in ways)
        torch.testing.assert_close(found, wanted)
