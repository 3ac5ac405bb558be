"""A recipe carried out: from a checkpoint and files of text to trained heads, through stops and starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ligermodels.archs.medusa import MedusaModel
from ligermodels.convert import hub
from ligermodels.convert.config_json import dtype_of, read_json
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.model import CausalLM
from ligermodels.pretrained import from_pretrained
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.data import Batch
from ligermodels.training.documents import documents_of
from ligermodels.training.evaluation import Drift, HeadScores, evaluate_drift, evaluate_heads
from ligermodels.training.folder import CHECKPOINTS, prepare
from ligermodels.training.interruption import Interrupted, sigterm, until
from ligermodels.training.joint import Joint, frozen_copy
from ligermodels.training.loop import Hook, StepMetrics, Trainable, is_due, train
from ligermodels.training.metrics import Metrics
from ligermodels.training.optimizer import optimizer_named, parameter_groups, warmup_cosine
from ligermodels.training.recipe import Recipe
from ligermodels.training.resume import content_of, require_same_content, same_recipe
from ligermodels.training.stream import Ahead, Stream


class Update(Protocol):
    """Called with the amount done, the amount in all, and perhaps a few words on how it goes."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


@dataclass(frozen=True)
class Console:
    """Where a run tells how it goes: messages, and bars. By default nowhere."""

    say: Callable[[str], object] = lambda message: None
    progress: Callable[..., AbstractContextManager[Update]] = lambda what, **_: nullcontext(lambda *_, **__: None)


@dataclass(frozen=True)
class Outcome:
    """The step that a run reached, of how many, and the scores at the end: None when it was stopped before, or when
    nothing was held out. `drift`, of stage 2: how far the model is from what it was, if that was asked for. `stopped`:
    whether SIGTERM ended it, be it after the last step."""

    step: int
    steps: int
    scores: HeadScores | None = None
    drift: Drift | None = None
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Whether it came to its end, and the heads are written."""
        return self.step == self.steps and not self.stopped


def train_heads(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    attention: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Train Medusa heads as `recipe` says, and write them to `out`, with recipe.yaml, metrics.jsonl, checkpoints/, and
    fingerprints of what the run has read, content.json.

    In stage 2 the model is trained too, and `out` gets it as well: a Hugging Face checkpoint, with the heads in it.

    The process may be killed at any time: with `resume` it goes on from the newest checkpoint, and every loss is the
    one that an undisturbed run has: to the bit on a CPU of the same kind, and on a GPU of the same kind where
    attention's backward is deterministic. On SIGTERM the step is finished, a checkpoint written, and the outcome is not
    `finished`; an evaluation is broken off, and done again when the run goes on.

    Before the heads are written there is a checkpoint of the last step in any case; where the recipe asks for none, it
    is removed afterwards.

    Args:
        device: where to run.
        attention: the attention backend.
        resume: go on from the newest checkpoint in `out`, if there is one. Otherwise what an earlier run left is
            removed.

    Raises:
        ConfigError: the recipe lacks a base or data, has a dtype that is not trained in, or is not the one that the
            checkpoint is of.
        InputError: the data cannot be read, holds more unusable lines than allowed, or is not what the run began with.
        CheckpointError: the base, its tokenizer or template, or a checkpoint of the run cannot be used; or the base is
            not the one that the run began with.
        TrainingError: the loss is not finite any more, or there is nothing to learn in the data.
    """
    run = _Run(recipe, Path(out), resume, console or Console())
    run.load(device, attention)
    return run.train()


class _Run:
    def __init__(self, recipe: Recipe, out: Path, resume: bool, console: Console) -> None:
        if recipe.base is None or not recipe.data:
            raise ConfigError(f"{'data' if recipe.base else 'base'}: the recipe names none; give it")
        self.out, self.console = out, console
        self.checkpoints = Checkpoints(out / CHECKPOINTS, recipe.keep_checkpoints)
        self.start, self.targets, self.about = 0, 0, dict[str, Any]()
        if resume and (found := self.checkpoints.steps()):
            self.start = found[-1]
            self.about = self.checkpoints.about(self.start)
            self.targets = self.about.get("targets", 0)
            recipe = same_recipe(recipe, self.about["recipe"])
        elif recipe.date is None:
            recipe = replace(recipe, date=datetime.now().date().isoformat())
        self.recipe = recipe
        self.folder = hub.resolve(str(recipe.base))
        if recipe.dtype is None and dtype_of(read_json(self.folder / "config.json")) == torch.float16:
            raise ConfigError(
                "dtype: the checkpoint's is float16, in which gradients and second moments are lost; give bfloat16 or "
                "float32"
            )
        self.documents = documents_of(
            self.folder,
            recipe.data,
            chat_template=recipe.chat_template,
            date=recipe.date,
            max_bad_lines=recipe.max_bad_lines,
            on_bad_line=self.console.say,
        )
        self.content = content_of(recipe, self.folder)
        if self.about:
            require_same_content(self.content, self.about["content"])
        self.indices, self.held = self.documents.corpus.split(recipe.held_out, recipe.seed)
        self.steps = self.about["steps"] if self.about else self._count_steps()
        self.warmup = min(40, self.steps // 10) if recipe.warmup is None else min(recipe.warmup, self.steps)
        if recipe.warmup is not None and recipe.warmup > self.warmup:
            console.say(f"warmup: {recipe.warmup:,} is more than there are steps; all {self.steps:,} are a warm-up")

    def _count_steps(self) -> int:
        """Steps of the recipe. What is held out is read in any case: errors in it shall show now, not at the end."""
        recipe, which = self.recipe, self.held if self.recipe.steps else np.concatenate([self.held, self.indices])
        with self.console.progress("reading text") as update:
            tokens = self.documents.count(which, update)
            if recipe.steps:
                return recipe.steps
            tokens -= self.documents.count(self.held)
        steps = max(1, math.ceil(recipe.epochs * tokens / recipe.batch_tokens))
        a_step = recipe.batch_tokens
        self.console.say(f"{len(self.indices):,} documents, {tokens:,} tokens; {steps:,} steps of {a_step:,} tokens")
        return steps

    def load(self, device: str, attention: str) -> None:
        """The model, new heads or those to start from, and the optimiser; all as the checkpoint has it, if any."""
        recipe = self.recipe
        dtype = getattr(torch, recipe.dtype) if recipe.dtype else None
        with self.console.progress(f"loading {recipe.base}", in_bytes=True) as update:
            model = from_pretrained(self.folder, dtype=dtype, device=device, attention=attention, progress=update)
        if recipe.start_from is None or self.about:
            self.medusa = MedusaModel.from_base(model, recipe.heads, recipe.layers, recipe.lm_head, recipe.decay)
        else:
            own = recipe.lm_head == "own"
            self.medusa = MedusaModel.from_pretrained(model, recipe.start_from, decay=recipe.decay, own_lm_heads=own)
            shape = self.medusa.shape
            found = (shape.num_heads, shape.num_layers, self.medusa.lm_head)
            if found != (recipe.heads, recipe.layers, recipe.lm_head):
                raise ConfigError(
                    f"start_from: heads, layers and lm_head are {found} there, not as the recipe has them"
                )
        self.trained: Trainable = self.medusa
        self.reference: CausalLM | None = None
        rates = [(self.medusa.head_parameters(), recipe.learning_rate)]
        if recipe.stage == 2:
            if loses_small_steps(recipe, model.dtype):
                self.console.say(
                    f"the model learns in {model.dtype}, where small steps are lost; dtype: float32 has them, and so "
                    "has bfloat16 with optimizer: adamw and rounding: stochastic"
                )
            if recipe.distill or recipe.drift:
                self.reference = frozen_copy(model, recipe.reference)
            self.trained = Joint(self.medusa, self.reference if recipe.distill else None)
            heads_rate = recipe.learning_rate * recipe.head_lr_multiplier
            rates = [(model.parameters(), recipe.learning_rate), (self.medusa.head_parameters(), heads_rate)]
        groups = parameter_groups(rates, recipe.weight_decay)
        self.optimizer = optimizer_named(
            recipe.optimizer, groups, betas=(recipe.beta1, recipe.beta2), rounding=recipe.rounding, seed=recipe.seed
        )
        self.schedule = warmup_cosine(self.optimizer, self.steps, warmup=self.warmup, floor=recipe.final_lr)
        stream = Stream(
            self.documents, self.indices, length=recipe.length, rows=recipe.micro_batch_rows, seed=recipe.seed
        )
        self.batches = Ahead(stream)
        if self.about:
            self.checkpoints.load(self.start, self.medusa, self.optimizer)
            self.schedule.load_state_dict(self.about["schedule"])
            self.batches.load_state_dict(self.about["data"])
            self.console.say(f"going on after step {self.start:,} of {self.steps:,}")

    def train(self) -> Outcome:
        """Up to the end, or to SIGTERM."""
        recipe = self.recipe
        prepare(self.out, recipe, self.content, anew=not self.about)
        metrics = Metrics(self.out, after=self.start)
        evaluate_every = recipe.evaluate_every or self.steps
        scored: dict[int, Outcome] = {}
        try:
            with self.console.progress("training") as update, sigterm() as stop:

                def report(state: StepMetrics) -> None:
                    self.targets = state.targets
                    update(state.step, state.steps, _note(state))
                    metrics.write_steps(state)

                def score(step: int) -> None:
                    with suppress(Interrupted):
                        scored[step] = found = self._score(step, stop)
                        metrics.write_scores(step, found.scores, found.drift)

                # A checkpoint comes first: when the evaluation fails or is broken off, nothing else is lost.
                hooks: list[Hook] = [(recipe.checkpoint_every or self.steps, self._save)]
                if len(self.held):
                    hooks.append((evaluate_every, score))
                    if self.start and is_due(self.start, evaluate_every, self.steps) and not metrics.scored:
                        score(self.start)
                step = self.start
                if not stop():
                    step = train(
                        self.trained,
                        self.batches,
                        steps=self.steps,
                        optimizer=self.optimizer,
                        schedule=self.schedule,
                        grad_clip=recipe.grad_clip,
                        accumulate=recipe.accumulate,
                        on_step=report,
                        report_every=recipe.report_every or max(1, min(10, self.steps // 50)),
                        hooks=hooks,
                        start=self.start,
                        targets=self.targets,
                        stop=stop,
                        loss_options=self._loss_options,
                    )
                self._settle(step)
                stopped = stop()
        except BaseException:
            with suppress(CheckpointError):  # The one being written is of before.
                self.checkpoints.wait()
            raise
        finally:
            self.batches.close()
            metrics.close()
        if stopped:
            return Outcome(step, self.steps, stopped=True)
        self._export()
        return scored.get(step) or self._score(step)  # A run that had come to its end before has yet to be scored.

    def _settle(self, step: int) -> None:
        """Wait for the checkpoint that is being written, and see to it that there is one of `step`."""
        try:
            self.checkpoints.wait()
            if step not in self.checkpoints.steps():
                self._save(step)
                self.checkpoints.wait()
        except CheckpointError as error:
            if step < self.steps:
                raise
            self.console.say(f"{error}; the heads are written all the same")

    def _export(self) -> None:
        if self.recipe.stage == 2:
            self.medusa.export(self.out, "full-hf", overwrite=True)
        else:
            self.medusa.save_pretrained(self.out, overwrite=True)
        if self.recipe.checkpoint_every is None:
            self.checkpoints.remove()

    def _loss_options(self, step: int) -> dict[str, float]:
        recipe = self.recipe
        return {} if recipe.stage == 1 else {"heads_scale": recipe.lambda0_at(step, self.steps)}

    def _save(self, step: int) -> None:
        self.checkpoints.save(
            step,
            self.medusa,
            self.optimizer,
            {
                "steps": self.steps,
                "targets": self.targets,
                "recipe": self.recipe.settings(),
                "content": self.content,
                "schedule": self.schedule.state_dict(),
                "data": self.batches.state_dict(),
            },
        )

    def _score(self, step: int, stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Scores on the documents that were held out, or on the first `held_out_tokens` of them; Interrupted when
        `stop` tells to."""
        if not len(self.held):
            return Outcome(step, self.steps)
        scores = evaluate_heads(self.medusa, until(stop, self._held_batches()))
        drift = None
        if self.reference is not None:
            drift = evaluate_drift(self.medusa.base, self.reference, until(stop, self._held_batches()))
        return Outcome(step, self.steps, scores, drift)

    def _held_batches(self) -> Iterable[Batch]:
        recipe, rows = self.recipe, self.recipe.micro_batch_rows
        stream = Stream(self.documents, self.held, length=recipe.length, rows=rows, epochs=1)
        tokens = recipe.held_out_tokens
        return islice(stream, None if tokens is None else max(1, tokens // (recipe.length * rows)))


def loses_small_steps(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Whether parameters of `dtype` stay as they are where a step is less than half a unit in their last place."""
    stochastic = recipe.optimizer == "adamw" and recipe.rounding == "stochastic"
    return dtype.itemsize < 4 and not (stochastic and dtype == torch.bfloat16)


def _note(state: StepMetrics) -> str:
    """What the bar says of the last steps."""
    note = f"loss {state.loss:.4f}, {state.tokens_per_second:,.0f} tokens/s"
    if (own := state.each[-1].base_loss) is not None:
        note += f", the model's own {own:.4f}"
    if state.accuracy:
        note += f", right {' '.join(f'{share:.0%}' for share in state.accuracy)}"
    if state.memory is not None:
        note += f", {state.memory / 2**30:.1f} GiB"
    return note
