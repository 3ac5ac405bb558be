"""Settings of a recipe for lm-eval while training. After `lm_eval_` come names of lm-eval's command line."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ligermodels.training.monitoring_settings import Condition, one_or_several

Tasks = Annotated[
    tuple[str, ...],
    BeforeValidator(one_or_several),
    Field(description="Tasks of lm-evaluation-harness, also as a,b: evaluated on the model while it is trained."),
]
Every = Annotated[
    int | None, Field(ge=1, description="Steps between evaluations of these tasks.  [default: on the result only]")
]
Limit = Annotated[
    float | None, Field(gt=0, description="lm-eval: examples per task, or below 1 a fraction of them.  [default: all]")
]
NumFewshot = Annotated[int | None, Field(ge=0, description="lm-eval: examples in the prompt.  [default: the task's]")]
BatchSize = Annotated[int, Field(ge=1, description="lm-eval: sequences per batch.")]
IncludePath = Annotated[str | None, Field(description="lm-eval: a folder with further tasks.")]

OPTIONS = ("every", "limit", "num_fewshot", "batch_size", "include_path")
CONDITIONS: tuple[Condition, ...] = (
    (
        tuple(f"lm_eval_{name}" for name in OPTIONS),
        lambda settings: bool(settings["lm_eval"]),
        "is for tasks of lm-eval; give lm_eval too",
    ),
)
MAY_CHANGE = frozenset({"lm_eval", *(f"lm_eval_{name}" for name in OPTIONS)})
