"""Training: recipes, one loop for every job, optimizers and schedules, checkpoints and metrics."""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.training.fused_adamw import FusedAdamW
    from ligermodels.training.job import Job
    from ligermodels.training.loop import StepMetrics, train
    from ligermodels.training.medusa import train_heads
    from ligermodels.training.optimizer import adamw, warmup_cosine
    from ligermodels.training.recipe import Recipe, read_recipe
    from ligermodels.training.run import Console, Outcome, run_job

# Reading a recipe, and `--help`, must not import torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "fused_adamw": ("FusedAdamW",),
        "job": ("Job",),
        "loop": ("StepMetrics", "train"),
        "medusa": ("train_heads",),
        "optimizer": ("adamw", "warmup_cosine"),
        "recipe": ("Recipe", "read_recipe"),
        "run": ("Console", "Outcome", "run_job"),
    },
)

__all__ = [
    "Console",
    "FusedAdamW",
    "Job",
    "Outcome",
    "Recipe",
    "StepMetrics",
    "adamw",
    "read_recipe",
    "run_job",
    "train",
    "train_heads",
    "warmup_cosine",
]
