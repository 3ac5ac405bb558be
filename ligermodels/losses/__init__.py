"""Objectives above per-token log-probabilities, and distillation from a teacher's hidden states."""

from ligermodels.losses.advantages import group_advantages
from ligermodels.losses.distillation import generalized_jsd_loss
from ligermodels.losses.policy import GRPOLoss, grpo_loss
from ligermodels.losses.preference import PreferenceLoss, cpo_loss, dpo_loss, orpo_loss, simpo_loss
from ligermodels.losses.sequences import sequence_log_probs
from ligermodels.losses.unpaired import UnpairedLoss, kto_loss

__all__ = [
    "GRPOLoss",
    "PreferenceLoss",
    "UnpairedLoss",
    "cpo_loss",
    "dpo_loss",
    "generalized_jsd_loss",
    "group_advantages",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "sequence_log_probs",
    "simpo_loss",
]
