"""Training: text into packed rows, the optimiser and its schedule, the loop, and scores on held-out text."""

from ligermodels.training.data import Batch, Rows, batches, encode, hold_out, pack, read_documents
from ligermodels.training.evaluation import HeadScores, Race, evaluate, evaluate_heads, race
from ligermodels.training.loop import StepMetrics, train
from ligermodels.training.optimizer import adamw, warmup_cosine

__all__ = [
    "Batch",
    "HeadScores",
    "Race",
    "Rows",
    "StepMetrics",
    "adamw",
    "batches",
    "encode",
    "evaluate",
    "evaluate_heads",
    "hold_out",
    "pack",
    "race",
    "read_documents",
    "train",
    "warmup_cosine",
]
