"""The state of a run: the model and all else that training changes and checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch
from ligermodels.data.built_in_templates import TOKENS
from ligermodels.data.documents import Documents
from ligermodels.data.ends import with_end_of_turn
from ligermodels.errors import InputError
from ligermodels.models.attention_summary import attention_summary
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.apply import parallelize
from ligermodels.parallel.ranks import DATA, data_share, is_sharded
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console
from ligermodels.training.counting import trained_parameters
from ligermodels.training.extension import continue_schedule
from ligermodels.training.interruption import until
from ligermodels.training.job import BatchSource, BeforeTraining, Evaluation, Job, JobFactory, Prepare, prepare_model
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.optimizer_settings import schedule_options
from ligermodels.training.parameter_groups import parameter_groups
from ligermodels.training.recipe import TrainingRecipe
from ligermodels.training.run_plan import RunPlan
from ligermodels.training.schedule import lr_schedule


@dataclass(frozen=True)
class RunState:
    """A run with a loaded model.

    plan: recipe, inputs and number of steps.
    job: the model, its parameters to train, and functions to evaluate and export it.
    optimizer, schedule: optimizer and learning-rate schedule of these parameters.
    batches: micro-batches of this rank.
    checkpoints: the checkpoints in the folder of the run.
    ranks: the processes of the run.
    console: where messages and progress go.
    """

    plan: RunPlan
    job: Job
    optimizer: Optimizer
    schedule: LambdaLR
    batches: BatchSource
    checkpoints: Checkpoints
    ranks: Ranks
    console: Console

    def save(self, step: int, targets: int, values: Mapping[str, Any]) -> None:
        """Start to write a checkpoint.

        Args:
            step: number of the step.
            targets: number of targets since step 1.
            values: further values for run.json, of JSON types.
        """
        run = {
            "steps": self.plan.steps,
            "warmup_steps": self.plan.warmup_steps,
            "targets": targets,
            "recipe": self.plan.recipe.absolute_settings(),
            "content": self.plan.content,
            "schedule": self.schedule.state_dict(),
            "data": self.batches.state_dict(),
            "kept": sorted(self.checkpoints.kept),
            "run_id": self.plan.run_id,
            **values,
        }
        self.checkpoints.save(step, self.job.model, self.optimizer, run)

    def restore(self) -> None:
        """Load the checkpoint that the plan resumes from."""
        plan = self.plan
        if plan.recipe.load_best_model_at_end:
            self.checkpoints.kept = set(plan.checkpoint.get("kept", ()))
        self.checkpoints.load(plan.start, self.job.model, self.optimizer)
        continue_schedule(
            self.schedule,
            self.optimizer,
            plan.checkpoint["schedule"],
            steps=plan.steps,
            steps_before=plan.checkpoint["steps"],
            is_same=plan.keeps_learning_rates,
            say=self.console.say,
        )
        self.batches.load_state_dict(plan.checkpoint["data"])
        self.console.say(f"resuming after step {plan.start:,} of {plan.steps:,}")

    def evaluate(self, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Evaluate on the validation split. Raises Interrupted as soon as `stop` returns True."""

        def batches() -> Iterator[Batch]:
            return until(stop, self.plan.validation_batches(self.job.validation_batch_size))

        return self.job.evaluate(batches)


def build_state(
    plan: RunPlan,
    make_job: JobFactory[Any],
    checkpoints: Checkpoints,
    *,
    prepare_base: Prepare[Any] | None,
    before_training: BeforeTraining | None,
    device: str,
    attention: str,
    ranks: Ranks,
    console: Console,
) -> RunState:
    """Load the base model and make the job, the optimizer, the schedule and the batches from it; load the checkpoint
    that the plan resumes from.

    Args:
        plan: recipe, inputs and number of steps.
        make_job: makes the `Job` from the recipe and the base model.
        checkpoints: the checkpoints in the folder of the run.
        prepare_base: changes the modules of the base model while it is on the meta device; None for no change.
        before_training: called with the plan, the job's model and the console before a checkpoint is loaded, or None.
        device: device of the model.
        attention: attention backend, or "auto".
        ranks: the processes of the run.
        console: where messages and progress go.
    """
    recipe = plan.recipe
    torch.manual_seed(recipe.seed)  # of random numbers that a user's loss or module draws
    shards = is_sharded(recipe.parallel)
    options: dict[str, Any] = {"plan": recipe.parallel} if shards else {}
    with console.progress(f"loading {recipe.base}", in_bytes=True) as update:
        prepare = partial(prepare_model, recipe, prepare_base)
        model = plan.base.load(recipe, device=device, attention=attention, progress=update, prepare=prepare, **options)
    console.say(f"attention: {attention_summary(model.config, torch.device(device), model.dtype, recipe.seq_len)}")
    if plan.base.weights is None and not plan.resumes:
        count = sum(parameter.numel() for parameter in model.parameters())
        console.say(f"{recipe.base}: a config without weights: training {count:,} random parameters")
    model.activation_checkpointing = recipe.activation_checkpointing
    job = make_job(recipe, model, resuming=plan.resumes)
    console.say(trained_parameters(job.model))
    trains_model = any(parameter.requires_grad for parameter in model.parameters())
    if trains_model:
        end_with_turns(recipe, model, plan.documents, console.say)
    if shards:
        parallelize(job.model, recipe.parallel)
    optimizer: Any = optimizer_of(recipe, job)  # its errors come before the passes of `before_training`
    if before_training is not None:
        before_training(plan, job.model, console)
    rank, _ = data_share(recipe.parallel, (*DATA, "context"))
    if rank:
        torch.manual_seed(recipe.seed + rank)  # tensor-parallel ranks of one group have the same dropout
    _warn_of_lost_updates(model, recipe, console.say)
    console.say(recipe.optimizer_summary())
    if shards:
        _check_parameters(job, optimizer)
    if recipe.optimizer_in_bwd:
        optimizer.step_in_backward()
    schedule = lr_schedule(
        optimizer, steps=plan.steps, warmup_steps=plan.warmup_steps, **schedule_options(recipe.settings())
    )
    batches = job.batches(plan.training_batches(device))
    state = RunState(plan, job, optimizer, schedule, batches, checkpoints, ranks, console)
    if plan.resumes:
        state.restore()
    return state


def optimizer_of(recipe: TrainingRecipe, job: Job) -> Optimizer:
    """The optimizer of a job's parameters. Raises InputError if a pattern matches no trained parameter."""
    groups = parameter_groups(
        job.learning_rates,
        recipe.weight_decay,
        names={id(parameter): name for name, parameter in job.model.named_parameters()},
        learning_rate_patterns=recipe.learning_rate_patterns,
        weight_decay_patterns=recipe.weight_decay_patterns,
    )
    return optimizer_named(
        recipe.optimizer,
        groups,
        model=job.model,
        betas=(recipe.beta1, recipe.beta2),
        momentum=recipe.momentum,
        rounding=recipe.rounding,
        seed=recipe.seed,
    )


def end_with_turns(recipe: TrainingRecipe, model: CausalLM, documents: Documents, say: Callable[[str], object]) -> None:
    """Add the token that ends a turn to the EOS tokens in the model's exports, if the recipe's data has chats, or its
    chat template is a built-in one.

    Args:
        recipe: the settings.
        model: the model.
        documents: the data, with the tokenizer and the chat template.
        say: called with a message if there is a new EOS token.
    """
    if recipe.chat_template not in TOKENS and not documents.has_chats():
        return
    spec = model.require_export_spec()
    template, tokenizer = documents.template, documents.tokenizer
    config = with_end_of_turn(spec.generation_config, spec.hf_config, template, tokenizer)
    if config is not None and config is not spec.generation_config:
        model.export_spec = replace(spec, generation_config=config)
        token = tokenizer.backend.id_to_token(config["eos_token_id"][-1])
        say(f"generation_config.json: eos_token_id gets {token}, which ends a turn in the chat template")


def _warn_of_lost_updates(model: CausalLM, recipe: TrainingRecipe, say: Callable[[str], object]) -> None:
    is_stochastic = recipe.optimizer != "adafactor" and recipe.rounding == "stochastic"
    if model.dtype.itemsize < 4 and not (is_stochastic and model.dtype == torch.bfloat16):
        say(
            f"{model.dtype} loses small updates; dtype: float32 keeps them, and so does bfloat16 with "
            "optimizer: adamw and rounding: stochastic"
        )


def _check_parameters(job: Job, optimizer: Optimizer) -> None:
    """Raise InputError unless the optimizer has the parameters of the sharded model."""
    parameters = {id(parameter) for parameter in job.model.parameters()}
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(id(parameter) not in parameters for parameter in trained):
        raise InputError(
            "learning_rates: holds parameters that the model had before it was sharded; give iterators such as "
            "model.parameters(), which are read afterwards"
        )
