"""lm-evaluation-harness on a native model, also while it is trained."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.generation.eval_mode import evaluating
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.devices import own_random_numbers
from ligermodels.training.callback import Callback
from ligermodels.training.interruption import Interrupted

PREFIX = "lm_eval/"
"""Prefix of the metrics."""


class NativeHFLM(HFLM):
    """lm-eval's `HFLM` that computes with a native model.

    Args:
        model: the model; it is not changed.
        tokenizer: folder or hub id of a tokenizer for transformers.
        batch_size: sequences per batch.
        stop: asked before each batch; if it returns True, `Interrupted` is raised.

    Examples:
        >>> harness = NativeHFLM(model, "Qwen/Qwen3-0.6B", batch_size=8)
        >>> lm_eval.simple_evaluate(model=harness, tasks=["hellaswag"])
    """

    def __init__(
        self, model: CausalLM, tokenizer: str, batch_size: int = 1, stop: Callable[[], bool] = lambda: False
    ) -> None:
        config = SimpleNamespace(
            model_type=model.hf_config.get("model_type"), max_position_embeddings=model.config.max_position_embeddings
        )
        shown: Any = SimpleNamespace(config=config, device=model.device, dtype=model.dtype, name_or_path=tokenizer)
        self._native, self._stop = model, stop
        super().__init__(shown, backend="causal", tokenizer=tokenizer, batch_size=batch_size)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See lm-eval. Without a progress bar by default, as the next two methods."""
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See lm-eval."""
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """See lm-eval."""
        return super().generate_until(requests, disable_tqdm)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        self._check_stop()
        with torch.no_grad(), evaluating(self._native):
            logits: Tensor = self._native(inps).logits
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        self._check_stop()
        if not options.get("do_sample"):  # tasks give a temperature of 0 for greedy decoding
            options = {name: value for name, value in options.items() if name not in ("temperature", "top_p", "top_k")}
        ends = {"eos_token_id": _eos_token_id(self._native), "pad_token_id": self.tokenizer.pad_token_id}
        return self._native.generate(
            context,
            max_new_tokens=max_length - context.shape[1],
            stop_strings=[text for text in stop if text] or None,
            tokenizer=self.tokenizer,
            **{**ends, **options},  # tasks may have tokens of their own
        )

    def _check_stop(self) -> None:
        if self._stop():
            raise Interrupted


class LmEval(Callback):
    """Evaluates tasks of lm-eval while a model is trained, for the settings `lm_eval` of a recipe.

    The results are metrics `lm_eval/TASK/METRIC`. The random generators and the training mode of the model are
    afterwards as they were before. A signal abandons the evaluation.

    Args:
        settings: the settings of the recipe.

    Raises:
        ConfigError: lm-eval has no such task.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.every = settings["lm_eval_every"]
        self._tasks = [name.strip() for names in settings["lm_eval"] for name in names.split(",")]
        self._manager = _manager_of(self._tasks, settings["lm_eval_include_path"])
        self._options = {"limit": settings["lm_eval_limit"], "num_fewshot": settings["lm_eval_num_fewshot"]}
        self._batch_size = settings["lm_eval_batch_size"]
        self.evaluated: set[int] = set()
        """Steps that were evaluated."""

    def attach(
        self,
        model: CausalLM,
        tokenizer: Path,
        *,
        write: Callable[[int, Mapping[str, float]], object],
        say: Callable[[str], object],
        stop: Callable[[], bool],
    ) -> None:
        """Take the parts of a run.

        Args:
            model: the model to evaluate.
            tokenizer: folder of its tokenizer.
            write: called with a step and its metrics.
            say: called with a line about the results.
            stop: ends the evaluation when it returns True.
        """
        self._model, self._tokenizer, self._write, self._say, self._stop = model, str(tokenizer), write, say, stop

    def on_step_end(self, step: int) -> None:
        """Evaluate after `step`, write the metrics and print them."""
        with suppress(Interrupted):
            metrics = self._evaluate()
            self.evaluated.add(step)
            self._write(step, {f"{PREFIX}{name}": value for name, value in metrics.items()})
            self._say(f"step {step:,}: lm-eval {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}")

    def _evaluate(self) -> dict[str, float]:
        with evaluating(self._model), _generators_kept(self._model.device):
            harness = NativeHFLM(self._model, self._tokenizer, self._batch_size, self._stop)
            results = lm_eval.simple_evaluate(
                model=harness,
                tasks=self._tasks,
                task_manager=self._manager,
                bootstrap_iters=0,  # no standard errors
                log_samples=False,
                **self._options,
            )
        return _metrics_of(results or {"results": {}})  # None on ranks other than the first


def _manager_of(tasks: Sequence[str], include_path: str | None) -> TaskManager:
    """lm-eval's index of tasks. It takes long to read all tasks of lm-eval, so they are left out if all `tasks` (names
    of tasks, groups or tags, or patterns) are in the folder `include_path`. Raises ConfigError for an unknown task."""

    def unknown(manager: TaskManager) -> list[str]:
        return [name for name in tasks if not manager.match_tasks([name])]

    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if not unknown(manager):
            return manager
    manager = TaskManager(include_path=include_path)
    if missing := unknown(manager):
        raise ConfigError(
            f"lm_eval: lm-eval has no task {missing[0]!r}; `lm-eval ls tasks` lists them, and lm_eval_include_path "
            "adds a folder of tasks"
        )
    return manager


def _metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """ "TASK/METRIC" -> value; a filter other than "none" follows the metric after a dot."""
    metrics = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, name = key.partition(",")
            if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
                metrics[f"{task}/{metric}{'' if name == 'none' else f'.{name}'}"] = float(value)
    return metrics


def _eos_token_id(model: CausalLM) -> Any:
    """The tokens that end a text: of generation_config.json, or of config.json."""
    spec = model.require_export_spec()
    text_config = spec.hf_config.get("text_config") or {}
    configs = (spec.generation_config or {}, spec.hf_config, text_config)
    return next((ids for fields in configs if (ids := fields.get("eos_token_id")) is not None), None)


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Keep the states of all random generators: lm-eval seeds them."""
    states = random.getstate(), numpy.random.get_state()
    with own_random_numbers(device):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
