"""Distillation on the teacher's whole distribution: `ops.linear_distillation` under the names of GKD."""

from numbers import Real
from typing import Any

from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError, short
from ligermodels.ops.loss.divergences import Divergence

ENDS: dict[float, Divergence] = {0.0: "forward_kl", 1.0: "reverse_kl"}


def generalized_jsd_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    mask: Tensor | None = None,
    *,
    beta: float = 0.5,
    **options: Any,
) -> Tensor:
    """The generalized Jensen-Shannon divergence of GKD (https://arxiv.org/abs/2306.13649), for each token:
    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.

    hidden, weight, teacher_hidden, teacher_weight, mask and the options (bias, teacher_bias, temperature, reduction,
        softcap, logit_scale, teacher_softcap, teacher_logit_scale, memory_budget, num_tokens) and the result: as in
        `ops.linear_distillation`, with which the logits never exist whole.
    beta: in [0, 1]. At 0 it is the forward KL, KL(teacher || student), at 1 the reverse KL, KL(student || teacher):
        the limits of the divergence over beta, and over 1 - beta; the divergence itself vanishes there.
    Raises InputError for another beta, and as `ops.linear_distillation` does.
    """
    if not isinstance(beta, Real) or not 0 <= beta <= 1:
        raise InputError(f"generalized_jsd_loss: beta must be in [0, 1], got {short(beta)}")
    chosen: dict[str, Any] = {"divergence": ENDS[beta]} if beta in ENDS else {"divergence": "jsd", "beta": beta}
    return ops.linear_distillation(hidden, weight, teacher_hidden, teacher_weight, mask, **chosen, **options)
