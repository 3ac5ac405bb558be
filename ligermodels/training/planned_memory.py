"""Memory of a step of a run, traced on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.memory import StepMemory, StepTrace
from ligermodels.training.job import Job
from ligermodels.training.policy import PolicyModel
from ligermodels.training.preference import PreferenceModel
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.settings import DataForm


def planned_memory(plan: RunPlan, job: Job, model: CausalLM, gpus: int) -> StepMemory | str:
    """Memory of a step on each GPU, as `ligermodels plan` counts it; or why it is not counted.

    Args:
        plan: the plan of the run.
        job: its job, on the meta device.
        model: the base model of the job.
        gpus: number of ranks.
    """
    recipe = plan.recipe
    degrees = {**recipe.parallel.degrees(gpus), "expert": recipe.parallel.expert}
    if recipe.trains_heads and gpus > 1:
        return "not counted for heads on several GPUs"
    has_own_loss = job.trainable is model
    if not has_own_loss and degrees["tensor"] * degrees["context"] > 1:
        return "with tensor or context parallelism counted for the model's own loss only"
    traced: Any = model if has_own_loss else _Trainable(job.trainable, model, recipe.data_form)
    replicate, shard = degrees.pop("replicate"), degrees.pop("shard")
    try:
        step = StepTrace(
            traced,
            plan.micro_batches[0],
            recipe.row_tokens,
            **degrees,
            param_dtype=recipe.parallel.param_dtype,
            reference=job.reference,
        )
        memory = step.memory(
            replicate=replicate,
            shard=shard,
            reshard_after_forward=recipe.parallel.reshard_after_forward,
            fsdp_unit=recipe.parallel.fsdp_unit,
            reduce_dtype=recipe.parallel.reduce_dtype,
            optimizer=recipe.optimizer,
            optimizer_in_bwd=recipe.optimizer_in_bwd,
            passes=plan.micro_batches[1],
        )
    except (InputError, NotImplementedError, RuntimeError) as error:  # a layer, loss or optimizer of the user's own
        return f"not counted: {error}"
    return replace(memory, reference=_reference_bytes(recipe, job))


def _reference_bytes(recipe: TrainingRecipe, job: Job) -> int:
    """Bytes of the reference's parameters that each GPU holds: all, or with cpu_offload one block at a time."""
    if job.reference is None:
        return 0
    whole = sum(parameter.nbytes for parameter in job.reference.parameters())
    if recipe.settings().get("reference") != "cpu_offload":
        return whole
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in job.reference.decoder.blocks]
    return whole - sum(blocks) + max(blocks)


class _Trainable(nn.Module):
    """The trainable of a job on records of this `form`, and its base model, with the attributes of a `CausalLM` that
    `StepTrace` reads."""

    def __init__(self, trainable: Any, base: CausalLM, form: DataForm) -> None:
        super().__init__()
        self.form, self.sequences = form, form.row_sequences
        self.trainable, self.decoder, self.head = trainable, base.decoder, base.head
        self.config, self.dtype = base.config, base.dtype

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        if isinstance(self.trainable, PreferenceModel):
            return self.trainable(**_examples(input_ids, self.form))
        if isinstance(self.trainable, PolicyModel):
            return self.trainable(**_samples(input_ids, self.form, self.trainable))
        return self.trainable(input_ids, labels=labels)


def _examples(input_ids: Tensor, form: DataForm) -> dict[str, Tensor]:
    """A batch of `ExampleBatches` on the meta device: an item in each row, of sequences of equal lengths that are all
    trained on."""
    (items, tokens), sequences = input_ids.shape, form.row_sequences
    count, length, row = items * sequences, tokens // sequences, input_ids.view(1, -1)
    batch = {
        "input_ids": row,
        "labels": row,
        "cu_seqlens": _empty(count + 1, dtype=torch.int32),
        "targets": _empty(count, length),
        "ref_log_probs": _empty(count, dtype=torch.float64),
    }
    if form.mismatched:
        batch |= {f"kl_{name}": tensor for name, tensor in batch.items()}
    if form.name == "unpaired":
        batch["desirable"] = _empty(count, dtype=torch.bool)
    batch["completion_mask"] = _empty(count, length, dtype=torch.bool)
    return batch | {"examples": _empty(items, 2)}


def _samples(input_ids: Tensor, form: DataForm, policy: PolicyModel) -> dict[str, Tensor]:
    """A batch of `Rollouts` on the meta device: the completions of a prompt in each row."""
    batch = _examples(input_ids, form)
    count, length = batch["targets"].shape
    packed = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
    of_tokens = {name: _empty(count, length, dtype=torch.float64) for name in ("old_log_probs", "ref_log_probs")}
    advantages = _empty(count, dtype=torch.float64)
    return packed | of_tokens | {"advantages": advantages, "sampled": _empty(len(policy.metric_names), 2)}


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
