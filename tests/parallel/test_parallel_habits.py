"""What users do with a model on several ranks beside training steps: evaluation between them, prompts and seeds of
each rank's own, folders and data that only one rank sees."""

import os
from pathlib import Path

import pytest
import torch
from test_parallel import batch, build, check_equal
from test_parallel_runs import EXACT, run, tuning
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from two_ranks import in_ranks

import ligermodels as lm
from ligermodels.errors import CheckpointError, InputError
from ligermodels.parallel import DataRanks
from ligermodels.training import FusedAdamW, train
from ligermodels.training.checkpoints import Checkpoints


def habits(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    # Forward passes without gradients wherever a user may put one: before the optimizer is made, between the backward
    # pass and the step, and after it. A model of untied and of tied embeddings, and one with heads beside its own.
    for name, heads in (("llama-3", False), ("llama-3.2", False), ("llama-3", True)):
        plain, model = build(name), build(name)
        if heads:
            plain, model = (lm.MedusaModel.from_base(each, num_heads=2) for each in (plain, model))
            for each in (plain, model):
                each.requires_grad_(True)
        lm.parallelize(model)
        found: list[list[torch.Tensor]] = []
        for each in (plain, model):
            losses = []

            def look(each: torch.nn.Module = each, losses: list[torch.Tensor] = losses) -> None:
                with torch.no_grad():
                    losses.append(each(**batch(9)).loss)

            look()
            optimizer = FusedAdamW(each.parameters(), lr=1e-2)
            for i in range(2):
                each(**batch(i)).loss.backward()  # the same on all ranks
                look()
                optimizer.step()
                optimizer.zero_grad()
                look()
            found.append(losses)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        check_equal(model, plain, lambda p: p.detach(), rtol=1e-3, atol=1e-4)

    # Prompts of each rank's own, of other lengths.
    model, plain = lm.parallelize(build("llama-3")), build("llama-3")
    prompt = batch(rank)["input_ids"][:1, : 5 + 3 * rank]
    assert torch.equal(model.generate(prompt, max_new_tokens=4), plain.generate(prompt, max_new_tokens=4))
    for options in ({"max_new_tokens": 3 + rank}, {"max_length": 12}):
        with pytest.raises(InputError, match=r"max_new_tokens: is .* to .* on the ranks of a sharded model"):
            model.generate(prompt, **options)

    # Ranks that share their data are one of its ranks.
    same = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    assert DataRanks(same).size == 1 and DataRanks(mesh).size == 2


def replicas(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(rank)
    model = lm.parallelize(lm.from_config(build("llama-3").export_spec.hf_config), lm.ParallelPlan(replicate=2))
    for parameter in model.parameters():
        every = [torch.empty_like(parameter.to_local()) for _ in range(2)]
        torch.distributed.all_gather(every, parameter.detach().to_local())
        assert torch.equal(*every)


def of_their_own(rank: int, folder: Path, mesh: DeviceMesh, base: Path, data: Path) -> None:
    """Relative paths in a folder of each rank's own."""
    own = folder / f"host-{rank}"
    own.mkdir()
    os.chdir(own)
    lines = data.read_text().splitlines(keepends=True)
    Path("data.jsonl").write_text("".join(lines[: 30 + rank]))
    with pytest.raises(InputError, match="data: has other content on rank 1 than on rank 0"):
        run(tuning(base, Path("data.jsonl"), **EXACT), Path("out"))
    assert not Path("out").exists()
    model = build("llama-3")
    checkpoints = Checkpoints("checkpoints")
    lm.parallelize(model)
    if rank:  # a host where the folder of the first rank is not
        Path.is_dir = lambda self, is_dir=Path.is_dir: "host-0" not in self.parts and is_dir(self)  # type: ignore
    checkpoints.save(1, model, FusedAdamW(model.parameters(), lr=1e-2), {})
    with pytest.raises(CheckpointError, match="rank 1 does not see the files of rank 0"):
        checkpoints.wait()
    assert checkpoints.steps() == []


def with_other_batches(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Other tokens gave a loss of parts of both batches, other labels or shapes a collective call without an end."""
    for plan in (lm.ParallelPlan(tensor=2), lm.ParallelPlan(context=2)):
        config = {**build("llama-3").hf_config, "intermediate_size": 96}
        model, same = lm.parallelize(lm.from_config(config), plan), batch(0)
        optimizer, labels = FusedAdamW(model.parameters(), lr=1e-2), same["labels"].clone()
        labels[:, : 3 + rank] = -100
        for own in (batch(rank), {**same, "labels": labels}, {name: x[:, : 8 + 2 * rank] for name, x in same.items()}):
            with pytest.raises(InputError, match=r"batches: rank 1 has other batches than rank 0.*DataRanks"):
                train(model, [own], steps=1, optimizer=optimizer)
        assert train(model, [same], steps=1, optimizer=optimizer) == 1


def test_ranks_that_share_a_model_need_the_same_batches(tmp_path: Path) -> None:
    in_ranks(2, with_other_batches, tmp_path)


def test_forward_passes_without_gradients_generate_and_ranks_of_data(tmp_path: Path) -> None:
    in_ranks(2, habits, tmp_path)


def test_replicas_start_from_the_same_values(tmp_path: Path) -> None:
    in_ranks(2, replicas, tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_data_and_folders_that_one_rank_sees(base: Path, data: Path, tmp_path: Path) -> None:
    in_ranks(2, of_their_own, tmp_path, base, data)
