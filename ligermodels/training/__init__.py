"""Training: recipes, text and chats as packed batches, the optimiser and its schedule, the loop, and scores."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.training.corpus import Corpus, Documents
    from ligermodels.training.data import Batch, Rows, batches, encode, hold_out, pack, read_documents
    from ligermodels.training.decoding import OwnText, Race, Trial, evaluate_own_text, race, trial
    from ligermodels.training.documents import documents_of
    from ligermodels.training.evaluation import Drift, HeadScores, evaluate, evaluate_drift, evaluate_heads
    from ligermodels.training.fused_adamw import FusedAdamW
    from ligermodels.training.joint import Joint, frozen_copy
    from ligermodels.training.loop import StepMetrics, train
    from ligermodels.training.optimizer import adamw, warmup_cosine
    from ligermodels.training.own_data import OwnWords, opening_prompts, write_own_data
    from ligermodels.training.recipe import Recipe, read_recipe
    from ligermodels.training.run import Console, Outcome, train_heads
    from ligermodels.training.stream import Ahead, Stream

_HOMES = {
    "corpus": ("Corpus", "Documents"),
    "data": ("Batch", "Rows", "batches", "encode", "hold_out", "pack", "read_documents"),
    "decoding": ("OwnText", "Race", "Trial", "evaluate_own_text", "race", "trial"),
    "documents": ("documents_of",),
    "evaluation": ("Drift", "HeadScores", "evaluate", "evaluate_drift", "evaluate_heads"),
    "fused_adamw": ("FusedAdamW",),
    "joint": ("Joint", "frozen_copy"),
    "loop": ("StepMetrics", "train"),
    "optimizer": ("adamw", "warmup_cosine"),
    "own_data": ("OwnWords", "opening_prompts", "write_own_data"),
    "recipe": ("Recipe", "read_recipe"),
    "run": ("Console", "Outcome", "train_heads"),
    "stream": ("Ahead", "Stream"),
}

__all__ = [
    "Ahead",
    "Batch",
    "Console",
    "Corpus",
    "Documents",
    "Drift",
    "FusedAdamW",
    "HeadScores",
    "Joint",
    "Outcome",
    "OwnText",
    "OwnWords",
    "Race",
    "Recipe",
    "Rows",
    "StepMetrics",
    "Stream",
    "Trial",
    "adamw",
    "batches",
    "documents_of",
    "encode",
    "evaluate",
    "evaluate_drift",
    "evaluate_heads",
    "evaluate_own_text",
    "frozen_copy",
    "hold_out",
    "opening_prompts",
    "pack",
    "race",
    "read_documents",
    "read_recipe",
    "train",
    "train_heads",
    "trial",
    "warmup_cosine",
    "write_own_data",
]


def __getattr__(name: str) -> Any:
    # The command line reads recipes before it needs torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
