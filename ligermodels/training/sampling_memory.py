"""Memory while completions are sampled, found on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ligermodels.arguments import QuantizedFormat
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.memory import StepMemory
from ligermodels.parallel.trace import held_bytes
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.prepare_base import prepare_sampling
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.sampling_model import empty_copy


@dataclass(frozen=True)
class SamplingMemory:
    """Bytes on each GPU while completions are sampled, between two steps.

    Args:
        weights, optimizer_states, reference: as in `StepMemory`.
        copy: the copy of the weights that samples: whole on each of several GPUs, or quantised; 0 if there is none.
        cache: keys, values and states of all completions that a GPU samples at once, if the longest prompt leaves just
            room for its completions within `seq_len`.
    """

    weights: int
    optimizer_states: int
    reference: int
    copy: int
    cache: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(vars(self).values())


def sampling_memory(plan: RunPlan, model: CausalLM, step: StepMemory | str, gpus: int) -> SamplingMemory | str | None:
    """Memory while a run samples completions, at its peak; None for a run that does not, or why it is not counted.

    Not counted are the activations of the prefill and of a decoding step.

    Args:
        plan: the plan of the run.
        model: the model that is trained, on the meta device.
        step: memory of its step, or why it is not counted.
        gpus: number of ranks.
    """
    recipe = plan.recipe
    if not isinstance(recipe, FineTuningRecipe) or not recipe.data_form.samples or isinstance(step, str):
        return step if isinstance(step, str) and recipe.data_form.samples else None
    rows, passes = plan.micro_batches
    phases = [_copy_and_cache(recipe, recipe.sampling_quantize, model, rows * passes, gpus)]
    if plan.has_validation:  # samples from the weights that are trained, a micro-batch at once
        phases.append(_copy_and_cache(recipe, None, model, rows, gpus))
    return SamplingMemory(step.weights, step.optimizer_states, step.reference, *max(phases, key=sum))


def _copy_and_cache(
    recipe: FineTuningRecipe, kind: QuantizedFormat | None, model: CausalLM, prompts: int, gpus: int
) -> tuple[int, int]:
    """Bytes of the copy that samples, and of the cache for completions of this number of prompts."""
    sampler, copied = model, 0
    if kind is not None or gpus > 1:
        sampler = empty_copy(model, partial(prepare_sampling, recipe, kind), recipe.parallel.param_dtype)
        storages = {x.untyped_storage()._cdata: x.nbytes for x in (*sampler.parameters(), *sampler.buffers())}
        copied = sum(storages.values())
    sequences = prompts * recipe.data_form.row_sequences
    return copied, held_bytes(lambda: sampler.new_state(sequences, recipe.seq_len - 1))
