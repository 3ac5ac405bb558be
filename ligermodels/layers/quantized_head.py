"""A language-model head whose weight is frozen and kept in 8 or 4 bits.

A step of decoding reads the whole head, which quantised blocks leave as the largest matrix in the model's dtype.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.layers.initialization import skip_init
from ligermodels.layers.lm_head import HeadConfig, LMHead, head_loss, scaled_logits
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.ops import Quantized


class QuantizedHead(QuantizedLinear):
    """An `LMHead` whose weight is quantised: it is called alike, with its own weight even where that was tied."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        kind: Quantized,
        config: HeadConfig,
        bias: nn.Parameter | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Not filled: see `fill`. `bias` (vocab_size,)."""
        super().__init__(hidden_size, vocab_size, kind, bias, device)
        self.config = config

    @classmethod
    def of_head(cls, head: LMHead, kind: Quantized) -> QuantizedHead:
        """What takes the place of `head`, with its config and bias; on the meta device not filled. InputError for a
        weight that has values that are not finite."""
        vocab_size, hidden_size = head.weight.shape
        found = cls(hidden_size, vocab_size, kind, head.config, head.bias, head.weight.device)
        found.fill(head.weight)
        return found.train(head.training)

    def dequantized(self, dtype: torch.dtype) -> LMHead:
        """A head of the rounded weight, in `dtype`, frozen, and of the bias."""
        with torch.device("meta"), skip_init():
            head = LMHead(self.in_features, self.out_features, self.config)
        return self._give(head, dtype)

    def forward(  # type: ignore[override]  # called as an LMHead is
        self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any
    ) -> Any:
        """As `LMHead.forward`. The loss is that of the rounded weight, which is dequantised for it, and again where
        its backward pass needs it: several losses, as of Medusa heads that share the lm_head, do not each keep one."""
        if targets is None:
            return scaled_logits(self.config, super().forward(hidden))
        dtype, weight = hidden.dtype, self.rounded(hidden.dtype)
        kept = weakref.ref(weight)

        def pack(saved: Tensor) -> Tensor | None:
            return None if saved is kept() else saved

        def unpack(saved: Tensor | None) -> Tensor:
            return self.rounded(dtype) if saved is None else saved

        hooks: Any = contextlib.nullcontext()
        if not torch.compiler.is_compiling():
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        with hooks:
            return head_loss(self.config, hidden, weight, targets, self.bias, **loss_options)


def plain_head_state(head: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a head; of a quantised one that of the head with its rounded weight, in `dtype`."""
    return (head.dequantized(dtype) if isinstance(head, QuantizedHead) else head).state_dict()
