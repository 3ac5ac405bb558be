"""Distillation on the teacher's whole distribution: `ops.linear_distillation` with the argument names of GKD."""

from numbers import Real
from typing import Any

from torch import Tensor

from ligermodels import ops
from ligermodels.arguments import Divergence
from ligermodels.errors import InputError, short

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
) -> Tensor | tuple[Tensor, ...]:
    """Generalized Jensen-Shannon divergence of GKD (https://arxiv.org/abs/2306.13649), without the logits in memory.

    For each token beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 - beta) student.

    Args:
        hidden: hidden states of the student, (..., H), any floating dtype.
        weight: the student's LM head, (V, H), the dtype of `hidden`.
        teacher_hidden: hidden states of the teacher, (..., H').
        teacher_weight: the teacher's LM head, (V, H'), the dtype of `teacher_hidden`; no gradient.
        mask: bool (...), the tokens that count. Default: all.
        beta: in [0, 1]. 0 is the forward KL, KL(teacher || student), and 1 the reverse KL, KL(student || teacher): the
            limits of the divergence over beta and over 1 - beta, because the divergence itself vanishes there.
            Default: 0.5.
        options: bias, teacher_bias, temperature, reduction, token_weights, softcap, logit_scale, teacher_softcap,
            teacher_logit_scale, return_acceptance, return_agreement, memory_budget and num_tokens of
            `ops.linear_distillation`; call that op for other divergences, such as the total variation.

    Returns:
        The mean over the tokens of the mask, or another `reduction`; float32 (float64 for float64 `hidden`). With
        return_acceptance or return_agreement a tuple of the loss and these, as `ops.linear_distillation`.

    Raises:
        InputError: beta is not in [0, 1], or shapes, dtypes, devices or options do not fit.

    Examples:
        >>> student, teacher = torch.randn(2, 8, 16, requires_grad=True), torch.randn(2, 8, 32)
        >>> loss = generalized_jsd_loss(student, torch.randn(100, 16), teacher, torch.randn(100, 32), beta=0.1)
        >>> loss.backward()
    """
    if not isinstance(beta, Real) or not 0 <= beta <= 1:
        raise InputError(f"generalized_jsd_loss: beta must be in [0, 1], got {short(beta)}")
    divergence: dict[str, Any] = {"divergence": ENDS[beta]} if beta in ENDS else {"divergence": "jsd", "beta": beta}
    return ops.linear_distillation(hidden, weight, teacher_hidden, teacher_weight, mask, **divergence, **options)
