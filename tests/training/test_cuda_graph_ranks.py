"""Steps of a sharded model as CUDA graphs: FSDP2's steps without a graph, and all ranks take a step in the same way."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from two_ranks import in_ranks
from zoo import LLAMA

import ligermodels as lm
from ligermodels.errors import GraphWarning
from ligermodels.training import FusedAdamW, Muon, cuda_graph, graph_state, hidden_matrices
from ligermodels.training.cuda_graph import GraphStep
from ligermodels.training.step import EagerStep, StepResult

CONFIG = {**LLAMA, "model_type": "llama", "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
CONFIG["num_hidden_layers"] = 2
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "model": {"plan": {"fsdp_unit": "model"}},
    "lora": {"lora": True, "plan": {"activation_checkpointing": "full"}},
    "backward": {"in_backward": True, "plan": {"replicate": 2, "shard": 1}},
    "mixture": {"experts": True},
    "muon": {"muon": True, "plan": {"reshard_after_forward": False}, "parts": 2},
}
GPUS = pytest.mark.gpu, pytest.mark.kernels
DEVICES = [
    pytest.param(("cpu", 2), id="cpu"),  # the recorded function runs itself
    pytest.param(("cuda", 1), id="cuda-1", marks=GPUS),
    pytest.param(
        ("cuda", 2), id="cuda-2", marks=(*GPUS, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"))
    ),
]


def step_of(kind: dict[str, Any], device: str) -> tuple[EagerStep, lm.CausalLM, FusedAdamW]:
    torch.manual_seed(3)
    plan = dict(kind.get("plan", {}))
    if dist.get_world_size() == 1:
        plan = {name: value for name, value in plan.items() if name != "replicate"}
    prepare = (lambda model: lm.add_lora(model, r=4)) if kind.get("lora") else None
    config: dict[str, Any] = {**CONFIG, **(MIXTURE if kind.get("experts") else {})}
    spread = lm.ParallelPlan(**{"shard": -1, **plan})
    model: Any = lm.from_config(config, dtype=torch.bfloat16, device=device, plan=spread, prepare=prepare)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": 3e-3, "rounding": "stochastic", "seed": 5}
    optimizer = FusedAdamW(parameters, **options)
    if kind.get("muon"):
        optimizer = Muon(parameters, matrices=hidden_matrices(model), **options)
    if kind.get("in_backward"):
        optimizer.step_in_backward()
    return EagerStep(model, optimizer, None if kind.get("in_backward") else 0.5), model, optimizer


def take_steps(kind: dict[str, Any], device: str, graphed: bool) -> tuple[list[StepResult], list[Any], Any]:
    """The results of three steps, evaluation losses between them, and the parameters of this rank at the end."""
    eager, model, _ = step_of(kind, device)
    step: Any = GraphStep(eager) if graphed else lambda parts, **options: eager(parts, options)
    results, losses = [], []
    # In the second step a rank with new shapes is beside one that has its graph; in the third both have theirs. The
    # last token alone has no target, and is computed as in a graph (SKIP_BELOW).
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for index, length in enumerate((48, 64 if is_last else 48, 48)):
        generator = torch.Generator().manual_seed(10 * index + dist.get_rank())
        ids = torch.randint(160, (kind.get("parts", 1), 2, length), generator=generator).to(device)
        parts = [{"input_ids": each, "labels": each} for each in ids]
        results.append(step(parts, num_items_in_batch=2 * (length - 1) * len(ids)))
        if index < 2:
            with torch.no_grad():
                losses.append(float(model.eval()(ids[0], labels=ids[0]).loss))
            model.train()
    if graphed:
        assert len(step._graphs) == 1 + is_last, step._graphs.keys()
    return results, losses, [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[operator]


def same_steps(rank: int, folder: Path, mesh: Any, device: str) -> None:
    for name, kind in KINDS.items():
        print("kind:", name, flush=True)
        check_same(kind, device)


def check_same(kind: dict[str, Any], device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        wanted, found = (take_steps(kind, device, graphed) for graphed in (False, True))
    for a, b in zip(wanted[0], found[0], strict=True):
        assert torch.equal(torch.stack(a.losses), torch.stack(b.losses)), (a.losses, b.losses)
        tolerance = 1e-2 if kind.get("in_backward") and device == "cuda" else 0.0
        torch.testing.assert_close(a.grad_norm, b.grad_norm, rtol=tolerance, atol=0)
    assert wanted[1] == found[1]
    for a, b in zip(wanted[2], found[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", DEVICES)
def test_sharded_steps_are_bit_for_bit_those_without_a_graph(ranks: tuple[str, int], tmp_path: Path) -> None:
    """Losses, norms, parameters, and evaluations between the steps, where FSDP2 gathers the weights by itself."""
    device, world = ranks
    in_ranks(world, same_steps, tmp_path, device, device=device)


def refused(rank: int, folder: Path, mesh: Any) -> None:
    for plan in ({"tensor": 2}, {"context": 2}):
        names_the_plan(plan)
    eager, _, _ = step_of({}, "cpu")
    reads_shards_without_autograd(eager)
    step = GraphStep(eager)
    ids = torch.arange(32).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    if rank == 1:
        batch["attention_mask"] = torch.ones_like(ids)
    with pytest.warns(GraphWarning, match="attention_mask" if rank == 1 else "another rank cannot record it"):
        step([batch])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step([batch])


def reads_shards_without_autograd(eager: EagerStep) -> None:
    """For each parameter and each tensor of its state, in every step: autograd would take longer than a replay."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph_state, "local_tensor", lambda x: x.to_local() if not torch.is_grad_enabled() else 1 / 0)
        graph_state.graph_state(eager)


def test_a_step_that_one_rank_cannot_record_has_no_graph_on_any(tmp_path: Path) -> None:
    in_ranks(2, refused, tmp_path)


def waits(rank: int, folder: Path, mesh: Any, device: str) -> None:
    """Rank 0 waits for its GPU in a hook; on a CPU it is said to."""
    (plain, _, _), (eager, model, _) = step_of({}, device), step_of({}, device)
    if device == "cuda" and rank == 0:
        model.decoder.blocks[0].register_forward_hook(lambda module, args, out: out.hidden.sum().item() and None)
    step, seen = GraphStep(eager), contextlib.nullcontext(["hooks.py:3"] if rank == 0 else [])
    ids = torch.arange(64, device=device).view(2, 32)
    batch = {"input_ids": ids, "labels": ids}
    place = r"test_cuda_graph_ranks.py:\d+" if device == "cuda" else "hooks.py:3"
    with pytest.MonkeyPatch.context() as patched:
        if device == "cpu":
            patched.setattr(cuda_graph, "waits_for", lambda device: seen)
        with pytest.warns(GraphWarning, match=f"{place} waits" if rank == 0 else "another rank waits for its GPU"):
            found = [step([batch]).losses[0]]
    found += [step([batch]).losses[0] for _ in range(2)]
    assert torch.equal(torch.stack(found), torch.stack([plain([batch], {}).losses[0] for _ in range(3)]))
    assert found[2] < found[0]


@pytest.mark.parametrize("ranks", DEVICES)
def test_steps_of_ranks_that_wait_for_a_gpu_run_without_a_graph(ranks: tuple[str, int], tmp_path: Path) -> None:
    device, world = ranks
    in_ranks(world, waits, tmp_path, device, device=device)


def decides(rank: int, folder: Path, mesh: Any) -> None:
    eager, model, _ = step_of({}, "cpu")
    eager.device = torch.device("cuda")
    labels = torch.zeros(1, 64 if rank == 0 else 128, dtype=torch.int64)
    threshold = 6 * sum(parameter.numel() for parameter in model.parameters()) * 96 / 2
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_graph, "GraphStep", lambda step: "graph")
        for factor, wanted in ((2, True), (1, True), (0.5, False)):  # of both ranks, of rank 0, of none
            patched.setattr(cuda_graph, "FSDP_FLOPS_PER_BLOCK", factor * threshold)
            assert (cuda_graph.make_step(eager, "auto", [{"labels": labels}]) == "graph") is wanted
        patched.setattr(cuda_graph, "refusal", lambda *args: "it has a hook" if rank == 0 else "")
        patched.setattr(cuda_graph, "FSDP_FLOPS_PER_BLOCK", threshold)
        with pytest.warns(GraphWarning, match="it has a hook" if rank == 0 else "another rank cannot record it"):
            assert cuda_graph.make_step(eager, "auto", [{"labels": labels}]) != "graph"


def test_auto_decides_the_same_on_all_ranks(tmp_path: Path) -> None:
    """By the batches of all ranks: FSDP2's gathers in a graph of one rank would wait for those of another forever."""
    in_ranks(2, decides, tmp_path)


def names_the_plan(plan: dict[str, int]) -> None:
    eager, _, _ = step_of({"plan": {**plan, "shard": 1}}, "cpu")
    ids = torch.arange(32).view(2, 16)
    with pytest.warns(GraphWarning, match=f"the plan has {next(iter(plan))} parallelism"):
        GraphStep(eager)([{"input_ids": ids, "labels": ids}])
