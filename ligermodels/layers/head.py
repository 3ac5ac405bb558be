"""The language-model head, which computes its own loss, and the shift from labels to targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.on_host import OnHost
from ligermodels.layers.packing import document_of

IGNORE_INDEX = -100


@dataclass(frozen=True)
class HeadConfig:
    """`tied`: the weight is the embedding's. Logits are scaled by `logit_scale`, then capped by `softcap`."""

    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0


class LMHead(nn.Module):
    """Projects hidden states to the vocabulary. The weight is used inside forward only, so that FSDP can gather it."""

    weight: Tensor

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadConfig | None = None) -> None:
        super().__init__()
        self.config = config or HeadConfig()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if self.config.bias else None

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """hidden (..., H) -> logits (..., V); with targets (...) the loss of `ops.linear_cross_entropy` instead.

        `loss_options` (reduction, token_weights, label_smoothing, z_loss, return_rank ...) go to that op.
        """
        scale, softcap = self.config.logit_scale, self.config.softcap
        if targets is not None:
            return ops.linear_cross_entropy(
                hidden, self.weight, targets, self.bias, softcap=softcap, logit_scale=scale, **loss_options
            )
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits if scale == 1.0 else logits * scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class TargetCount:
    """How many targets are not ignored, on its way from the device.

    Asked for before a forward pass, the answer is there when the head needs it: the device has long begun that pass
    then, while its queue is full, and nothing waits that had something to do.
    """

    def __init__(self, targets: Tensor) -> None:
        """targets: long (B, T), or (n, B, T) for n counts, which come by one copy."""
        self._counts: OnHost | None = None
        if not (torch.compiler.is_compiling() or (targets.is_cuda and torch.cuda.is_current_stream_capturing())):
            self._counts = OnHost((targets != IGNORE_INDEX).sum((-2, -1)))

    def get(self) -> Any:
        """For the losses in `ops`: the count as an int, or the n counts as a list; None where they cannot use it."""
        return None if self._counts is None else self._counts.get()


def shift_labels(labels: Tensor, ahead: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """targets[b, t] = labels[b, t + ahead], and -100 where that is past the row's end or in another document.

    Args:
        labels: (B, T) long, aligned with the inputs.
        ahead: 1 for the language-model head; 2 + i for Medusa head i.
        cu_seqlens: int32 (n + 1,), bounds of packed documents over the flattened B * T tokens.
    """
    length = labels.shape[1]
    targets = F.pad(labels[:, ahead:], (0, min(ahead, length)), value=IGNORE_INDEX)
    if cu_seqlens is None:
        return targets
    place = torch.arange(labels.numel(), device=labels.device)
    end = cu_seqlens[document_of(cu_seqlens, labels.numel()) + 1]
    return targets.masked_fill((place + ahead >= end).view_as(labels), IGNORE_INDEX)
