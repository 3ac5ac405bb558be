"""A run: trains a job by a recipe, from a checkpoint and files of text to an export, and resumes at any point."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch
import torch.distributed as dist

from ligermodels.arguments import check_flag
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import CheckpointError, InputError, LigerModelsError, TrainingError
from ligermodels.ops.runtime.devices import own_random_numbers
from ligermodels.parallel.ranks import join, rank_device_type
from ligermodels.training.callback import Callback, callbacks_at, check_callbacks, lm_eval_callback
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.console import Console, Outcome
from ligermodels.training.folder import CHECKPOINTS, alone_in, prepare, require_run, require_usable
from ligermodels.training.interruption import AgreedStop, stop_signals
from ligermodels.training.job import BeforeTraining, JobFactory, Prepare, RunOptions
from ligermodels.training.loop import train
from ligermodels.training.metrics import Metrics, draw_curves
from ligermodels.training.recipe import R, TrainingRecipe
from ligermodels.training.run_callbacks import RunCallbacks, SaveCheckpoint
from ligermodels.training.run_plan import plan_run
from ligermodels.training.run_state import RunState, build_state
from ligermodels.training.trackers import Tracker, open_trackers, tracker_names

if TYPE_CHECKING:
    from typing_extensions import Unpack


@contextmanager
def on_cpu_by_default() -> Iterator[None]:
    """Context manager in which tensors without a device are on the CPU, also if the caller has another default device
    (`torch.set_default_device`): a run names the device of its model, and makes data and counts on the CPU."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@on_cpu_by_default()
def run_job(
    job: JobFactory[R],
    recipe: R,
    out: str | os.PathLike[str],
    *,
    prepare_base: Prepare[R] | None = None,
    before_training: BeforeTraining | None = None,
    device: str | None = None,
    attention: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
) -> Outcome:
    """Train by `recipe` and write the result to `out`, with recipe.yaml, metrics.jsonl, checkpoints/, content.json
    (fingerprints of the files that were read) and, if matplotlib is installed, curves.png.

    A run that was killed resumes with the losses of an uninterrupted run: bit for bit on a CPU of the same kind, and on
    a GPU of the same kind if the backward pass of attention is deterministic. On SIGTERM, SIGHUP (its terminal is
    closed) and Ctrl-C the run finishes the current step, abandons an evaluation (and repeats it on resuming) and writes
    a checkpoint; after SIGTERM and SIGHUP the outcome is not `finished`, after Ctrl-C KeyboardInterrupt is raised, and
    at once by a second Ctrl-C.

    A resumed run may have more steps, or epochs, than before. From there on it has the learning rates of the longer
    run; a message says so. It resumes from the newest checkpoint; if this is damaged, from the checkpoint before it,
    with a warning.

    The checkpoint of the last step is written before the export, and removed after it if the recipe keeps none. Only
    one run at a time can use a folder.

    Under torchrun the recipe's `parallel` says how the model is sharded (`parallelize`), and the ranks divide each
    batch: loss and gradient are those of one process, except for the order of sums. The first rank writes; any number
    of ranks can resume. All ranks must see the same folders.

    Args:
        job: makes the `Job` from the recipe and the base model.
        recipe: the settings.
        out: folder to write to.
        prepare_base: changes the modules of the base model while it is on the meta device, before it is sharded and
            loaded; None for no change.
        before_training: called with the model of the job when it is loaded and sharded, before a checkpoint is loaded;
            None for nothing.
        device, attention, resume, overwrite, console, callbacks: see `RunOptions`.

    Returns:
        The last step and the final evaluation.

    Raises:
        ConfigError: the recipe has no base or data, a dtype that cannot be trained in, or a tokenizer that does not fit
            the base; or it differs from the recipe of the checkpoint.
        InputError: the data cannot be read, has more unusable lines than allowed, or is not the data that the run
            started with; `callbacks` are no callbacks, or one ends the run before its first step; or `resume` or
            `overwrite` is neither True nor False.
        CheckpointError: the base, its tokenizer or chat template, or every checkpoint of the run is unusable; the base
            is not the base that the run started with; or `out` cannot be written, another run uses it, or it holds the
            base, tokenizer or heads that the run reads; or, without `overwrite`, no run to resume, or something else.
        BackendError: the package of a tracker, or lm-eval, is not installed; or a tracker cannot start.
        TrainingError: the loss is not finite, there is nothing to learn in the data, or another rank has ended.
        KeyboardInterrupt: Ctrl-C, after the checkpoint of the step has been written.
    """
    TrainingRecipe.check_kind(recipe)
    check_callbacks(callbacks)
    for flag, value in (("resume", resume), ("overwrite", overwrite)):
        check_flag(flag, value)
    named, lm_eval = named_callbacks(recipe)
    callbacks = [*callbacks, *named]
    folder, console = folder_to_write(out), console or Console()
    device = rank_device_type() if device is None else device
    with _only_run_in(folder, device, resumes=resume and not overwrite) as ranks, own_random_numbers(device):
        ranks.from_first(str(folder), lambda: require_usable(folder, resume=resume, overwrite=overwrite))
        _check_unstopped(callbacks)
        checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.keep_checkpoints)
        plan = plan_run(recipe, folder, checkpoints, resume=resume, ranks=ranks, console=console)
        with closing(plan.documents), open_trackers(plan, folder, ranks) as trackers:
            state = build_state(
                plan,
                job,
                checkpoints,
                prepare_base=prepare_base,
                before_training=before_training,
                device=device,
                attention=attention,
                ranks=ranks,
                console=console,
            )
            outcome, is_ctrl_c = _train(state, trackers, callbacks, lm_eval)
        ranks.gather(None)  # no rank leaves while another rank needs it
    if is_ctrl_c:
        raise KeyboardInterrupt(f"stopped after step {outcome.step:,} of {outcome.steps:,}")
    return outcome


@dataclass(frozen=True)
class JobKind(Generic[R]):
    """A kind of training.

    recipe: class of its recipes.
    make: makes the `Job` of a recipe.
    prepare_base, before_training: see `run_job`.
    """

    recipe: type[R]
    make: JobFactory[R]
    prepare_base: Prepare[R] | None = None
    before_training: BeforeTraining | None = None

    def train(self, recipe: R, out: str | os.PathLike[str], **options: Unpack[RunOptions]) -> Outcome:
        """`run_job` by `recipe` in the folder `out`; ConfigError if it is a recipe of another kind."""
        self.recipe.check_kind(recipe)
        parts: dict[str, Any] = {"prepare_base": self.prepare_base, "before_training": self.before_training}
        return run_job(self.make, recipe, out, **parts, **options)


def named_callbacks(recipe: TrainingRecipe) -> tuple[list[Callback], Any]:
    """The callbacks that a recipe names, and its evaluation by lm-eval or None.

    Raises:
        ConfigError: a callback cannot be imported, or lm-eval has no such task.
        BackendError: lm-eval, or the package of a tracker, is not installed.
    """
    tracker_names(recipe.track)  # raises for a package that is not installed
    return callbacks_at(recipe.callback), lm_eval_callback(recipe.settings())


def _check_unstopped(callbacks: Sequence[Callback]) -> None:
    """Raise InputError for a callback that would end the run before its first step, so that nothing is trained."""
    for callback in callbacks:
        if callback.should_stop():
            raise InputError(
                f"callbacks: {type(callback).__name__} ends the run before its first step, as after an earlier run; "
                "give a new object, or set its attribute `stop` to False"
            )


def _train(
    state: RunState, trackers: Sequence[Tracker], user_callbacks: Sequence[Callback], lm_eval: Any
) -> tuple[Outcome, bool]:
    """Train to the last step, to a signal, or until a callback stops, and export. Returns the outcome, and whether
    Ctrl-C stopped the run."""
    plan, recipe, folder, ranks = state.plan, state.plan.recipe, state.plan.folder, state.ranks
    ranks.from_first(str(folder), lambda: prepare(folder, recipe, plan.content, start_over=not plan.resumes))
    metrics = Metrics(folder, after=plan.start, writes=ranks.writes, trackers=trackers)
    try:
        with state.console.progress("training") as update, stop_signals(state.console.say) as arrived:
            stop = AgreedStop(arrived)
            callbacks = RunCallbacks(state, metrics, update, stop, user_callbacks, lm_eval)
            callbacks.resume()
            step = plan.start
            if not callbacks.should_stop():
                step = train(
                    state.job.trainable,
                    state.batches,
                    steps=plan.steps,
                    optimizer=state.optimizer,
                    schedule=state.schedule,
                    max_grad_norm=recipe.max_grad_norm,
                    accumulation_steps=plan.micro_batches[1],
                    report_every=recipe.report_every or max(1, min(10, plan.steps // 50)),
                    callbacks=callbacks.all,
                    start=plan.start,
                    targets=plan.targets,
                    loss_options=lambda step: state.job.loss_options(step, plan.steps),
                    output_metrics=state.job.output_metrics,
                    cuda_graph=recipe.cuda_graph,
                    router_bias_update_rate=state.job.router_bias_update_rate,
                )
            plan.documents.notes.say_totals()
            _complete_checkpoint(step, callbacks.save, state)
            is_stopped = stop.should_stop()
            if not is_stopped:
                callbacks.evaluate_last(step)
                is_stopped = stop.should_stop()  # a signal abandons the evaluation
        if is_stopped:
            return Outcome(step, plan.steps, stopped=True), arrived.is_ctrl_c
        return _finish(step, callbacks, state), False
    except BaseException:
        with suppress(CheckpointError):  # of the checkpoint in progress; the first error counts
            state.checkpoints.wait()
        raise
    finally:
        state.batches.close()
        metrics.close()


def _finish(step: int, callbacks: RunCallbacks, state: RunState) -> Outcome:
    """Write the result of a run that ended at `step`: its model, or the best one if the recipe says so."""
    plan, folder, say, is_early = state.plan, state.plan.folder, state.console.say, step < state.plan.steps
    if is_early:
        say(f"stopped early, after step {step:,} of {plan.steps:,}")
    best = callbacks.best.best.step if plan.recipe.load_best_model_at_end else None
    best_result = plan.recipe.data_form.best_result
    if best is not None and best not in state.ranks.from_first(str(folder), state.checkpoints.steps):
        say(f"the checkpoint of step {best:,}, which has the {best_result}, is missing")
        best = None
    if best is not None:
        since = f" of the evaluations since step {callbacks.best.since:,}" if callbacks.best.since else ""
        say(f"the result is the model of step {best:,}, which has the {best_result}{since}")
        if best != step:
            state.checkpoints.load(best, state.job.model, state.optimizer)
    state.job.export(folder)
    if plan.recipe.checkpoint_every is None:
        state.checkpoints.remove()
    callbacks.evaluate_result(step if best is None else best)
    if state.ranks.writes and (message := draw_curves(folder)):
        say(message)
    evaluation = None
    if plan.has_validation:  # a run that resumed after its last step has no evaluation yet
        evaluation = callbacks.validate.evaluations.get(step if best is None else best) or state.evaluate()
    return Outcome(step, plan.steps, evaluation, stopped_early=is_early, best_step=best)


def _complete_checkpoint(step: int, save: SaveCheckpoint, state: RunState) -> None:
    """Wait for the checkpoint in progress, and write the checkpoint of `step` unless it exists."""
    try:
        save.complete()
        if step not in state.ranks.from_first(str(state.plan.folder), state.checkpoints.steps):
            save.on_step_end(step)
            save.complete()
    except CheckpointError as error:
        if step < state.plan.steps:
            raise
        state.console.say(f"{error}; the result is written all the same")


@contextmanager
def _only_run_in(folder: Path, device: str, *, resumes: bool) -> Iterator[Ranks]:
    """Join the process group of torchrun, if there is one, and lock `folder` for this run.

    Args:
        folder: the output folder.
        device: device of the model.
        resumes: whether there must be a run in the folder.

    Raises:
        CheckpointError: another run uses the folder, or it cannot be written; or there is no run in it.
        TrainingError: another rank has ended.
    """
    is_joined, lock = join(device), ExitStack()
    try:
        ranks = Ranks.of_group()
        with ranks.step(str(folder), ""):
            if ranks.writes:
                if resumes:
                    require_run(folder)
                lock.enter_context(alone_in(folder))
        yield ranks
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, LigerModelsError) or not (dist.is_initialized() and _is_from_peers(error)):
            raise
        raise TrainingError(
            "another rank has ended, or cannot be reached: see its own message. The run continues from its newest "
            f"checkpoint with resume ({str(error).splitlines()[0]})"
        ) from error
    finally:
        lock.close()
        if is_joined:
            dist.destroy_process_group()


def _is_from_peers(error: Exception) -> bool:
    """Whether a collective call failed because of other ranks."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out", "timed out")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
