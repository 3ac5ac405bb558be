"""The plan of a run, without its weights: data, steps, memory, backends, first batch. Nothing is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ligermodels.arguments import check_flag
from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch
from ligermodels.data.encoding import Tokens
from ligermodels.data.survey import Epoch, Span, count_epoch, spans, trained_tokens
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.layers import IGNORE_INDEX
from ligermodels.models.attention_summary import attention_summary
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.memory import StepMemory
from ligermodels.parallel.ranks import data_share, planned_ranks, rank_device_type
from ligermodels.training import dspark, eagle, fine_tuning, medusa, mtp
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console
from ligermodels.training.counting import parameter_counts
from ligermodels.training.cuda_graph import pays, plan_refusal, refusal
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.folder import CHECKPOINTS, require_usable
from ligermodels.training.inputs import epoch_of
from ligermodels.training.job import Job, prepare_model
from ligermodels.training.objectives import check_objective
from ligermodels.training.planned_memory import planned_memory
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.rewards import check_reward_fields
from ligermodels.training.run import JobKind, named_callbacks, on_cpu_by_default
from ligermodels.training.run_plan import RunPlan, plan_run
from ligermodels.training.run_state import optimizer_of
from ligermodels.training.sampling_memory import SamplingMemory, sampling_memory
from ligermodels.training.step import EagerStep

_KINDS: tuple[JobKind[Any], ...] = (
    fine_tuning.KIND, medusa.KIND, mtp.KIND, eagle.KIND, dspark.DFLASH_KIND, dspark.DSPARK_KIND,
)  # fmt: skip
JOBS = {kind.recipe.kind: kind for kind in _KINDS}
"""`kind` of a recipe -> how it is trained."""


@dataclass(frozen=True)
class DryRun:
    """The plan of a run, from `dry_run`.

    plan: recipe, documents, steps, and the checkpoint to resume from.
    gpus: number of ranks.
    parameters, trained: number of parameters, and of those that are trained: see `parameter_counts`.
    epoch: counts of an epoch.
    left_out: reason -> documents that are not used in full, and their tokens that are left out.
    micro_batches: sequences per forward pass, and forward passes per step, of each rank.
    sequences: sequences per step, of all ranks.
    memory: memory of each GPU; or why it is not counted.
    sampling: memory of each GPU while completions are sampled; or why it is not counted; None if none are.
    attention: attention backends.
    cuda_graph: why the steps run without a CUDA graph; empty if they are recorded.
    sources: files and lines of the first micro-batch of rank 0, from the checkpoint on if the run resumes.
    first_batch: the documents of this micro-batch.
    """

    plan: RunPlan
    gpus: int
    parameters: int
    trained: int
    epoch: Epoch
    left_out: dict[str, tuple[int, int]]
    micro_batches: tuple[int, int]
    sequences: int
    memory: StepMemory | str
    sampling: SamplingMemory | str | None
    attention: str
    cuda_graph: str
    sources: str
    first_batch: list[list[Span]]


@on_cpu_by_default()
def dry_run(
    recipe: TrainingRecipe,
    out: str | os.PathLike[str] | None = None,
    *,
    device: str | None = None,
    attention: str = "auto",
    gpus: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> DryRun:
    """Read and check the inputs of a run, and describe the run. Nothing is trained, and no weights are fetched.
    Only caches of the tokenizer and the tokens are written.

    Args:
        recipe: the settings: such as a `FineTuningRecipe` or an `EagleRecipe`.
        out: folder that the run would write to; None if it is not known yet.
        device: device of the model, such as "cpu" or "cuda"; None: the GPU if there is one, else the CPU.
        attention: attention backend, or "auto".
        gpus: number of ranks.
        resume: whether the run would resume from the newest checkpoint in `out`: see `RunOptions`.
        overwrite: whether the run may replace the content of `out`.
        console: where messages and progress go; None: nowhere.

    Raises:
        ConfigError, InputError, CheckpointError: see `run_job`.

    Examples:
        >>> run = dry_run(FineTuningRecipe(base="Qwen/Qwen2.5-0.5B-Instruct", data="chats.jsonl"))
        >>> run.plan.steps, run.epoch.targets, run.memory.total
    """
    for flag, value in (("resume", resume), ("overwrite", overwrite)):
        check_flag(flag, value)
    folder, console = Path(out or os.devnull), console or Console()
    device = rank_device_type() if device is None else device
    if out is not None:
        require_usable(folder, resume=resume, overwrite=overwrite)
    with planned_ranks(gpus), ExitStack() as stack:
        check_names(recipe, folder if resume else None)
        checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.keep_checkpoints)
        plan = plan_run(recipe, folder, checkpoints, resume=resume, ranks=Ranks(), console=console, on_meta=True)
        stack.callback(plan.documents.close)
        recipe, micro_batches = plan.recipe, plan.micro_batches
        check_reward_fields(plan)
        model, job = _on_meta(plan, attention)
        optimizer = optimizer_of(recipe, job)
        epoch = plan.counts.get("training")
        if epoch is None:
            with console.progress("counting tokens") as update:
                epoch = count_epoch(epoch_of(recipe, plan.documents, plan.training), update)
        batches = plan.training_batches()
        if plan.resumes:
            batches.load_state_dict(plan.checkpoint["data"])
        parts = list(islice(batches, micro_batches[1]))
        batches.close()
        parameters, trained = parameter_counts(job.model)
        memory = planned_memory(plan, job, model, gpus)
        return DryRun(
            plan=plan,
            gpus=gpus,
            parameters=parameters,
            trained=trained,
            epoch=epoch,
            left_out=plan.documents.notes.totals(),
            micro_batches=micro_batches,
            sequences=math.prod(micro_batches) * data_share(recipe.parallel)[1],
            memory=memory,
            sampling=sampling_memory(plan, model, memory, gpus),
            attention=attention_summary(model.config, torch.device(device), model.dtype, recipe.seq_len),
            cuda_graph=_eager_reason(recipe, job, optimizer, parts, device, gpus),
            sources=parts[0].where() if parts[0].where else "",
            first_batch=list(_documents(parts[0], plan.documents.tokenizer)),
        )


def check_names(recipe: TrainingRecipe, resumed: Path | None = None) -> None:
    """Check the names of callbacks, trackers, tasks of lm-eval, and losses in a recipe.

    Args:
        recipe: the settings.
        resumed: folder of the run to resume: see `check_objective`. Default: a new run.

    Raises:
        ConfigError, InputError, BackendError: see `run_job` and `check_objective`.
    """
    named_callbacks(recipe)
    if isinstance(recipe, FineTuningRecipe):
        check_objective(recipe, resumed)


def _on_meta(plan: RunPlan, attention: str) -> tuple[CausalLM, Job]:
    """The base model and the job on the meta device."""
    kind = JOBS[plan.recipe.kind]
    prepare = partial(prepare_model, plan.recipe, kind.prepare_base)
    model = plan.base.load(plan.recipe, device="meta", attention=attention, prepare=prepare)
    model.activation_checkpointing = plan.recipe.activation_checkpointing
    place = {"reference": "device"} if "reference" in plan.recipe.defaults() else {}  # no copy to the CPU
    job = kind.make(plan.recipe.model_copy(update=place), model, resuming=True)
    job.trainable.train()
    return model, job


def _documents(batch: Batch, tokenizer: Tokenizer) -> Iterator[list[Span]]:
    labels = torch.where(trained_tokens(batch), batch["labels"][0], IGNORE_INDEX).tolist()
    ids = batch["input_ids"][0].tolist()
    for start, end in pairwise(batch["cu_seqlens"].tolist()):
        yield spans(Tokens(ids[start:end], labels[start:end]), tokenizer)


def _eager_reason(
    recipe: TrainingRecipe, job: Job, optimizer: Optimizer, parts: list[Batch], device: str, gpus: int
) -> str:
    """Why the steps run without a CUDA graph; empty if they are recorded."""
    if recipe.cuda_graph == "off":
        return "cuda_graph is off"
    if torch.device(device).type != "cuda":
        return f"the model is on {device}"
    step = EagerStep(job.trainable, optimizer)
    if recipe.cuda_graph == "auto" and not pays(step, parts, is_sharded=gpus > 1):
        return "the GPU takes longer for a block than the CPU takes to launch it"
    if gpus > 1 and (reason := plan_refusal(recipe.parallel)):
        return reason
    return refusal(step, parts)
