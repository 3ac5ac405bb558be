"""A run: a job carried out by a recipe, from a checkpoint and files of text to an export, resumable at any point."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ligermodels.convert.config_json import dtype_of, read_json
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch
from ligermodels.data.packing import PackedBatches, Prefetcher, RankBatches
from ligermodels.errors import CheckpointError, ConfigError, InputError, LigerModelsError, TrainingError
from ligermodels.parallel.apply import parallelize
from ligermodels.parallel.plan import ParallelPlan
from ligermodels.parallel.ranks import DATA, data_share, join, world_size
from ligermodels.training.base import Base
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.extension import check_longer, continue_schedule, warmup_steps
from ligermodels.training.folder import CHECKPOINTS, alone_in, prepare, require_apart
from ligermodels.training.inputs import content_of, documents_of, length_changes, require_same_content, same_recipe
from ligermodels.training.interruption import AgreedStop, Interrupted, stop_signals, until
from ligermodels.training.job import Evaluation, JobFactory
from ligermodels.training.loop import Hook, StepMetrics, is_due, train
from ligermodels.training.metrics import Metrics, progress_note
from ligermodels.training.optimizer import optimizer_named, parameter_groups, warmup_cosine
from ligermodels.training.preparation import prepare_model
from ligermodels.training.recipe import R, TrainingRecipe

T = TypeVar("T")
B = TypeVar("B", bound=Iterator[Batch])


@dataclass(frozen=True)
class Console:
    """Where a run reports: `say` gets messages; `progress` makes a progress bar, called with the amount done, the
    total, and a note. By default nothing is shown."""

    say: Callable[[str], object] = lambda message: None
    progress: Callable[..., AbstractContextManager[Callable[..., None]]] = lambda what, **_: nullcontext(
        lambda *_: None
    )


@dataclass(frozen=True)
class Outcome:
    """The last step taken, of how many; the final evaluation, None without a validation split or when the run was
    stopped; `stopped`: whether a signal ended it, even if after the last step."""

    step: int
    steps: int
    evaluation: Any = None
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Whether the run is complete and the result written."""
        return self.step == self.steps and not self.stopped


def run_job(
    job: JobFactory[R],
    recipe: R,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Train by `recipe` and write the result to `out`, with recipe.yaml, metrics.jsonl, checkpoints/ and content.json
    (fingerprints of the files read).

    A run that was killed resumes with the losses of an uninterrupted one: bit for bit on a CPU of the same kind, and on
    a GPU of the same kind where the backward of attention is deterministic. On SIGTERM and Ctrl-C the current step is
    finished, an evaluation is abandoned (and repeated on resuming) and a checkpoint is written; after SIGTERM the
    outcome is not `finished`, after Ctrl-C KeyboardInterrupt is raised, and at once by a second one.

    A resumed run may be given more steps, or epochs, than before. From there on its learning rates, and what else
    depends on how many steps there are, are those of the longer run; a message says so.

    Only one run at a time has a folder. Of checkpoints that are damaged, or of another step than they say, it resumes
    from the one before, with a warning.

    The last step's checkpoint is written before the export, and removed after it if the recipe keeps none.

    On the processes of torchrun the model is spread by the recipe's `parallel`, see `parallelize`, and each step's
    batch is divided among them: its loss and gradient are those of one process, but for the order of sums. The first
    rank writes; a checkpoint is resumed by any number of ranks. All see the same folders.

    Args:
        job: makes what is trained.
        device, attention: as of `from_pretrained`; "cuda" is the GPU of the process.
        resume: continue from the newest checkpoint in `out`, if any; otherwise files of an earlier run are removed.

    Raises:
        ConfigError: the recipe has no base or data, a dtype that cannot be trained in, or a tokenizer that does not fit
            the base; or is not that of the checkpoint.
        KeyboardInterrupt: Ctrl-C, after the checkpoint of the step has been written.
        InputError: the data cannot be read, has more unusable lines than allowed, or is not what the run started with.
        CheckpointError: the base, its tokenizer or template, or every checkpoint of the run is unusable; or the base is
            not the one that the run started with; or `out` cannot be written, another run has it, or it holds what the
            run starts from: base, tokenizer, heads.
        TrainingError: the loss is not finite, or there is nothing to learn in the data; or another rank has ended.
    """
    TrainingRecipe.check_kind(recipe)
    folder = folder_to_write(out)
    joined, held = join(device), ExitStack()
    try:
        ranks = Ranks.of_group()
        with ranks.step(str(folder), ""):
            if ranks.writes:
                held.enter_context(alone_in(folder))
        run = _Run(recipe, folder, resume, console or Console())
        run.load(job, device, attention)
        outcome = run.train()
        if joined:
            run.ranks.gather(None)  # so that no rank leaves while another needs it
        if run.is_interrupted:
            raise KeyboardInterrupt(f"stopped after step {outcome.step:,} of {outcome.steps:,}")
        return outcome
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, LigerModelsError) or not (dist.is_initialized() and _is_of_peers(error)):
            raise
        raise TrainingError(
            "another rank has ended, or cannot be reached: see its own message. The run continues from its newest "
            f"checkpoint with resume ({str(error).splitlines()[0]})"
        ) from error
    finally:
        held.close()
        if joined:
            dist.destroy_process_group()


def _is_of_peers(error: Exception) -> bool:
    """Whether a collective call failed because of other ranks."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "timed out")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


class _Run:
    def __init__(self, recipe: TrainingRecipe, out: Path, resume: bool, console: Console) -> None:
        """Read the inputs and plan the steps; nothing is written."""
        if recipe.base is None or not recipe.data:
            raise ConfigError(f"{'data' if recipe.base else 'base'}: the recipe has none; give it")
        self.out, self.console, self.ranks = out, console, Ranks.of_group()
        self.data_rank, self.data_size = data_share(recipe.parallel)
        if world_size() > 1 and recipe.optimizer == "adafactor":
            raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
        self.micro_batch_size, self.accumulation_steps = recipe.micro_batches(self.data_size)
        self.checkpoints = Checkpoints(out / CHECKPOINTS, recipe.keep_checkpoints)
        self.start, self.targets, self.about = 0, 0, dict[str, Any]()
        self.is_interrupted = False
        if resume and (found := self._first(self.checkpoints.newest)):
            self.start, self.about = found
            self.targets = self.about.get("targets", 0)
            recipe = same_recipe(recipe, self.about["recipe"])
        elif recipe.date is None:
            today = self._first(lambda: datetime.now().date().isoformat())
            recipe = recipe.model_copy(update={"date": today})
        self.recipe = recipe
        self.base = Base.find(recipe)
        self._first(lambda: require_apart(out, self.base, recipe))
        if recipe.dtype is None and dtype_of(read_json(self.base.config)) == torch.float16:
            raise ConfigError(
                "dtype: the checkpoint's is float16, in which gradients and second moments underflow; give bfloat16 or "
                "float32"
            )
        self.documents = documents_of(recipe, self.base, console.say)
        self.content = self._first(lambda: content_of(recipe, self.base))
        self._require_same_data()
        if self.about:
            require_same_content(self.content, self.about["content"])
        self.indices, self.validation = self.documents.corpus.split(recipe.validation_fraction, recipe.seed)
        before = self.about.get("steps")
        if before is None or length_changes(recipe, self.about["recipe"]):
            self.steps = self._count_steps()
            check_longer(self.steps, before or 0)
        else:
            self.steps = before
        wanted = warmup_steps(recipe.warmup_steps, self.steps, self.about)
        self.warmup_steps = min(wanted, self.steps)
        if wanted > self.steps:
            console.say(f"warmup_steps: {wanted:,} is more than there are steps; all {self.steps:,} are warm-up")

    def _first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first rank."""
        return self.ranks.from_first(str(self.out), function)

    def _require_same_data(self) -> None:
        """InputError, on all ranks, unless all read the same text: each takes its share of what it reads itself."""
        found: list[Any] = []
        with self.ranks.step("data", ""):
            found = [self.documents.fingerprint] if self.ranks.together else []
        every = self.ranks.gather(found)
        if others := [rank for rank, each in enumerate(every) if each != every[0]]:
            told = ", ".join(map(str, others))
            raise InputError(f"data: has other content on rank {told} than on rank 0; give all ranks the same files")

    def _count_steps(self) -> int:
        """Steps of the recipe. The validation split is read in any case, so that errors in it show now."""
        recipe = self.recipe
        which = self.validation if recipe.steps else np.concatenate([self.validation, self.indices])
        with self.console.progress("reading text") as update:
            tokens = self.documents.count(which, update)
            if recipe.steps:
                return recipe.steps
            tokens -= self.documents.count(self.validation)
        steps = max(1, math.ceil(recipe.epochs * tokens / recipe.batch_tokens))
        self.console.say(
            f"{len(self.indices):,} documents, {tokens:,} tokens; {steps:,} steps of {recipe.batch_tokens:,} tokens"
        )
        return steps

    def load(self, make_job: JobFactory[Any], device: str, attention: str) -> None:
        """The base model, the job and the optimizer, in the state of the checkpoint, if there is one."""
        recipe = self.recipe
        options: dict[str, Any] = {"prepare": partial(prepare_model, make_job, recipe)}
        if spread := world_size() > 1 or recipe.parallel != ParallelPlan():
            options["plan"] = recipe.parallel
        with self.console.progress(f"loading {recipe.base}", in_bytes=True) as update:
            model = self.base.load(recipe, device=device, attention=attention, progress=update, **options)
        if self.base.weights is None and not self.about:
            count = sum(parameter.numel() for parameter in model.parameters())
            self.console.say(f"{recipe.base}: a config without weights: training {count:,} random parameters")
        model.activation_checkpointing = recipe.activation_checkpointing
        self.job = make_job(recipe, model, resuming=bool(self.about))
        if spread:
            parallelize(self.job.model, recipe.parallel)
        share, _ = data_share(recipe.parallel, (*DATA, "context"))
        if share:
            torch.manual_seed(recipe.seed + share)  # for dropout of its own, and that of its tensor-parallel group
        stochastic = recipe.optimizer == "adamw" and recipe.rounding == "stochastic"
        if model.dtype.itemsize < 4 and not (stochastic and model.dtype == torch.bfloat16):
            self.console.say(
                f"{model.dtype} loses small updates; dtype: float32 keeps them, and so does bfloat16 with "
                "optimizer: adamw and rounding: stochastic"
            )
        self.optimizer = optimizer_named(
            recipe.optimizer,
            parameter_groups(self.job.learning_rates, recipe.weight_decay),
            betas=(recipe.beta1, recipe.beta2),
            rounding=recipe.rounding,
            seed=recipe.seed,
        )
        if spread:
            self._check_trained()
        self.schedule = warmup_cosine(
            self.optimizer, self.steps, warmup_steps=self.warmup_steps, min_lr_ratio=recipe.min_lr_ratio
        )
        self.batches = Prefetcher(self._share(self._packed(self.indices, seed=recipe.seed)))
        if self.about:
            self.checkpoints.load(self.start, self.job.model, self.optimizer)
            continue_schedule(
                self.schedule,
                self.optimizer,
                self.about["schedule"],
                steps=self.steps,
                before=self.about["steps"],
                say=self.console.say,
            )
            self.batches.load_state_dict(self.about["data"])
            self.console.say(f"resuming after step {self.start:,} of {self.steps:,}")

    def _check_trained(self) -> None:
        """InputError when the optimizer has other parameters than the sharded model: those that it had before."""
        there = {id(parameter) for parameter in self.job.model.parameters()}
        trained = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        if any(id(parameter) not in there for parameter in trained):
            raise InputError(
                "learning_rates: holds parameters that the model had before it was sharded; give iterators such as "
                "model.parameters(), which are read afterwards"
            )

    def _packed(self, indices: Any, **options: Any) -> PackedBatches:
        recipe = self.recipe
        sizes = {"seq_len": recipe.seq_len, "batch_size": self.micro_batch_size}
        return PackedBatches(self.documents, indices, **sizes, **options)

    def _share(self, batches: B) -> B | RankBatches:  # of all ranks' batches those of this one
        return batches if self.data_size == 1 else RankBatches(batches, self.data_rank, self.data_size)

    def train(self) -> Outcome:
        """Train to the end, or to a signal, and export."""
        recipe = self.recipe
        self._first(lambda: prepare(self.out, recipe, self.content, start_over=not self.about))
        metrics = Metrics(self.out, after=self.start, writes=self.ranks.writes)
        evaluate_every = recipe.evaluate_every or self.steps
        evaluations: dict[int, Evaluation] = {}
        try:
            with self.console.progress("training") as update, stop_signals(self.console.say) as arrived:
                stop = AgreedStop(arrived)

                def report(state: StepMetrics) -> None:
                    self.targets = state.targets
                    update(state.step, state.steps, progress_note(state))
                    metrics.write_report(state)

                def evaluate(step: int) -> None:
                    with suppress(Interrupted):
                        evaluations[step] = self._evaluate(stop)
                        metrics.write_evaluation(step, evaluations[step].metrics())

                # The checkpoint comes first, so that a failed evaluation loses nothing.
                hooks: list[Hook] = [(recipe.checkpoint_every or self.steps, self._save)]
                if len(self.validation):
                    hooks.append((evaluate_every, evaluate))
                    if (
                        self.start
                        and is_due(self.start, evaluate_every, self.steps)
                        and not self._first(lambda: metrics.evaluated)
                    ):
                        evaluate(self.start)
                step = self.start
                if not stop():
                    step = train(
                        self.job.trainable,
                        self.batches,
                        steps=self.steps,
                        optimizer=self.optimizer,
                        schedule=self.schedule,
                        max_grad_norm=recipe.max_grad_norm,
                        accumulation_steps=self.accumulation_steps,
                        on_step=report,
                        report_every=recipe.report_every or max(1, min(10, self.steps // 50)),
                        hooks=hooks,
                        start=self.start,
                        targets=self.targets,
                        stop=stop,
                        loss_options=lambda step: self.job.loss_options(step, self.steps),
                        output_metrics=self.job.output_metrics,
                    )
                self._ensure_checkpoint(step)
                stopped = stop()
                self.is_interrupted = stopped and arrived.is_ctrl_c
        except BaseException:
            with suppress(CheckpointError):  # of the checkpoint in progress; the first error counts
                self.checkpoints.wait()
            raise
        finally:
            self.batches.close()
            metrics.close()
        if stopped:
            return Outcome(step, self.steps, stopped=True)
        self.job.export(self.out)
        if recipe.checkpoint_every is None:
            self.checkpoints.remove()
        if not len(self.validation):
            return Outcome(step, self.steps)
        return Outcome(step, self.steps, evaluations.get(step) or self._evaluate())  # a finished run has none yet

    def _ensure_checkpoint(self, step: int) -> None:
        """Wait for the checkpoint being written, and write one of `step` if there is none."""
        try:
            self.checkpoints.wait()
            if step not in self._first(self.checkpoints.steps):
                self._save(step)
                self.checkpoints.wait()
        except CheckpointError as error:
            if step < self.steps:
                raise
            self.console.say(f"{error}; the result is written all the same")

    def _save(self, step: int) -> None:
        about = {
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "targets": self.targets,
            "recipe": self.recipe.settings(),
            "content": self.content,
            "schedule": self.schedule.state_dict(),
            "data": self.batches.state_dict(),
        }
        self.checkpoints.save(step, self.job.model, self.optimizer, about)

    def _evaluate(self, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Evaluate on the validation split, or on its first `validation_tokens`. Raises Interrupted on `stop`."""

        recipe, micro = self.recipe, self.micro_batch_size

        def batches() -> Iterable[Batch]:
            found = self._packed(self.validation, epochs=1)
            limit = None
            if recipe.validation_tokens is not None:  # whole batches of one process, however many there are
                each = recipe.micro_batch_size
                sequences = max(1, recipe.validation_tokens // (recipe.seq_len * each)) * each
                limit = max(1, sequences // micro)
            return until(stop, self._share(islice(found, limit)))

        return self.job.evaluate(batches)
