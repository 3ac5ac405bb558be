"""Training: recipes, one loop for every job, optimizers and schedules, checkpoints and metrics."""

from typing import TYPE_CHECKING, Any

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.models.hidden_matrices import hidden_matrices
    from ligermodels.training.callback import Callback, Event
    from ligermodels.training.console import Console, Outcome
    from ligermodels.training.cuda_graph import GraphStep, graph_step
    from ligermodels.training.draft_recipe import DFlashRecipe, DSparkRecipe, EagleRecipe
    from ligermodels.training.dspark import train_dflash, train_dspark
    from ligermodels.training.eagle import train_eagle
    from ligermodels.training.early_stopping import EarlyStopping
    from ligermodels.training.fine_tuning import fine_tune
    from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
    from ligermodels.training.fused_adamw import FusedAdamW
    from ligermodels.training.job import Job, RunOptions
    from ligermodels.training.loop import train
    from ligermodels.training.medusa import train_heads
    from ligermodels.training.medusa_recipe import MedusaRecipe, read_recipe
    from ligermodels.training.mtp import train_mtp
    from ligermodels.training.mtp_recipe import MTPRecipe
    from ligermodels.training.muon_optimizer import Muon, muon
    from ligermodels.training.optimizer import adamw
    from ligermodels.training.preview import DryRun, dry_run
    from ligermodels.training.recipe import TrainingRecipe
    from ligermodels.training.recording import RecordableOptimizer, Recording
    from ligermodels.training.reports import OutputMetrics, StepMetrics
    from ligermodels.training.router_bias import update_router_bias
    from ligermodels.training.run import run_job
    from ligermodels.training.schedule import lr_schedule, schedule_factor, warmup_cosine
    from ligermodels.training.step import clip_gradients

# Reading a recipe, and `--help`, must not import torch.
_get, __dir__ = lazy_names(
    __name__,
    {
        "callback": ("Callback", "Event"),
        "console": ("Console", "Outcome"),
        "dspark": ("train_dflash", "train_dspark"),
        "draft_recipe": ("DFlashRecipe", "DSparkRecipe", "EagleRecipe"),
        "eagle": ("train_eagle",),
        "early_stopping": ("EarlyStopping",),
        "fine_tuning": ("fine_tune",),
        "fine_tuning_recipe": ("FineTuningRecipe",),
        "fused_adamw": ("FusedAdamW",),
        "job": ("Job", "RunOptions"),
        "cuda_graph": ("GraphStep", "graph_step"),
        "loop": ("train",),
        "medusa": ("train_heads",),
        "medusa_recipe": ("MedusaRecipe", "read_recipe"),
        "mtp": ("train_mtp",),
        "mtp_recipe": ("MTPRecipe",),
        "muon_optimizer": ("Muon", "hidden_matrices", "muon"),
        "optimizer": ("adamw",),
        "preview": ("DryRun", "dry_run"),
        "recipe": ("TrainingRecipe",),
        "recording": ("RecordableOptimizer", "Recording"),
        "reports": ("OutputMetrics", "StepMetrics"),
        "router_bias": ("update_router_bias",),
        "run": ("run_job",),
        "step": ("clip_gradients",),
        "schedule": ("lr_schedule", "schedule_factor", "warmup_cosine"),
    },
)


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from ligermodels.training.medusa_recipe import MedusaRecipe
        from ligermodels.training.renamed import warn

        warn("Recipe", "MedusaRecipe", __name__, stacklevel=3)
        return MedusaRecipe
    return _get(name)


__all__ = [
    "Callback",
    "Console",
    "DFlashRecipe",
    "DSparkRecipe",
    "DryRun",
    "EagleRecipe",
    "EarlyStopping",
    "Event",
    "FineTuningRecipe",
    "FusedAdamW",
    "GraphStep",
    "Job",
    "MTPRecipe",
    "MedusaRecipe",
    "Muon",
    "Outcome",
    "OutputMetrics",
    "RecordableOptimizer",
    "Recording",
    "RunOptions",
    "StepMetrics",
    "TrainingRecipe",
    "adamw",
    "clip_gradients",
    "dry_run",
    "fine_tune",
    "graph_step",
    "hidden_matrices",
    "lr_schedule",
    "muon",
    "read_recipe",
    "run_job",
    "schedule_factor",
    "train",
    "train_dflash",
    "train_dspark",
    "train_eagle",
    "train_heads",
    "train_mtp",
    "update_router_bias",
    "warmup_cosine",
]
