"""Statistics of each token for TRL, from hidden states, by `ops.linear_log_probs`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.layers import IGNORE_INDEX, HeadConfig

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The names under which TRL asks for them."""


def token_statistics(
    config: HeadConfig,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    outputs: Collection[str],
    temperature: float = 1.0,
    num_targets: int | None = None,
) -> dict[str, Tensor]:
    """Statistics of softmax(x), with x the head's logits / temperature.

    Args:
        config: scale and softcap of the head.
        hidden: (..., H).
        weight: (V, H).
        targets: long (...), -100 where ignored.
        bias: (V,) or None.
        outputs: names of the statistics, of OUTPUTS.
        temperature: divides the logits.
        num_targets: number of targets other than -100, if it is known.

    Returns:
        The `outputs`, and in any case the log-probabilities, by name; each of the shape of `targets`, and 0 where the
        target is -100.

    log_probs, entropy: with gradients, float32 (float64 for float64 hidden), as are the following.
    log_sum_sq_probs: log sum_v p_v^2 = lse(2 x) - 2 lse(x), without a gradient; the head's GEMM runs once more for it.
    mean_logits: the mean of x over the vocabulary, without a gradient; the head's GEMM runs once more for it if the
        head has a softcap.
    is_top1: bool, whether the target is the class of the greatest logit, the first of equal ones.
    """
    softcap = config.softcap

    def head(temperature: float) -> dict[str, Any]:
        return {
            "softcap": None if softcap is None else softcap / temperature,
            "logit_scale": config.logit_scale / temperature,
            "num_targets": num_targets,
        }

    capped_mean = "mean_logits" in outputs and softcap is not None
    found: Any = ops.linear_log_probs(
        hidden, weight, targets, bias, **head(temperature), return_entropy="entropy" in outputs,
        return_lse=capped_mean or "log_sum_sq_probs" in outputs, return_predicted=True,
    )  # fmt: skip
    statistics: dict[str, Tensor] = {"log_probs": found.log_probs}
    if "entropy" in outputs:
        statistics["entropy"] = found.entropy
    if "is_top1" in outputs:
        statistics["is_top1"] = found.predicted == targets
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:
            squared: Any = ops.linear_log_probs(hidden, weight, targets, bias, **head(temperature / 2), return_lse=True)
            statistics["log_sum_sq_probs"] = squared.lse - 2 * found.lse
        if capped_mean:
            # Entirely smoothed, the cross entropy is lse(x) - mean(x).
            smoothed: Any = ops.linear_cross_entropy(
                hidden, weight, targets, bias, **head(temperature), reduction="none", label_smoothing=1.0
            )
            statistics["mean_logits"] = found.lse - smoothed
        elif "mean_logits" in outputs:
            mean = _mean_logits(hidden, weight, bias) * (config.logit_scale / temperature)
            statistics["mean_logits"] = mean.masked_fill(targets == IGNORE_INDEX, 0.0)
    return statistics


def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean over classes of hidden @ weight.T + bias, by the mean of the weight, in at least float32."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        mean = hidden.to(dtype) @ weight.mean(0, dtype=dtype)
    return mean if bias is None else mean + bias.mean(dtype=dtype)
