"""What a causal language model returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.utils._pytree import register_dataclass

from ligermodels.layers.packing import Unpadding


@dataclass
class CausalLMOutput:
    """What `CausalLM` returns; what was not asked for is None.

    loss: fp32 scalar, or (B, T) with reduction "none".
    logits: (B, T, V), or (1, n, V) of `token_indices`.
    aux_loss: with labels, the load-balancing loss of mixtures of experts, unweighted.
    last_hidden_state: (B, T, H) after the final norm, or (1, n, H).
    ranks: with `return_rank`, long: how many tokens are likelier than the target, -1 without one.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    last_hidden_state: Tensor | None = None
    ranks: Tensor | None = None

    def padded(self, unpad: Unpadding) -> CausalLMOutput:
        """Of a pass without padding: with it again, zeros in logits, states and losses."""
        whole = {name: None if x is None or x.ndim < 2 else unpad.put_back(x) for name, x in vars(self).items()}
        return replace(self, **{name: x for name, x in whole.items() if x is not None})


register_dataclass(CausalLMOutput)  # so that FSDP2 finds the tensors in it
