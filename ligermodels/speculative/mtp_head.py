"""The head of multi-token prediction: decoder blocks over hidden states and the embeddings of the next tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.layers import Block, RotaryEmbedding
from ligermodels.layers.checkpointing import ActivationCheckpointing, run
from ligermodels.layers.linear import Linear
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.mtp_format import mtp_block
from ligermodels.speculative.draft_layer import head_context


class MTPHead(nn.Module):
    """The MTP head. With e_t the embedding of token t + 1, and h_t the model's hidden state after the final norm or the
    result y_t of an earlier step:

        x_t = [embedding_norm(e_t) | hidden_norm(h_t)] fc^T
        y_t = norm(block(x)_t)

    The model's lm_head predicts token t + 2 from y_t. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2, with h_t as
    in the checkpoints of Qwen3-Next and Qwen3.5.

    If the head has several layers, layer 0 predicts token t + 2, layer 1, from the result of layer 0, token t + 3, and
    so on. `later` holds the layers after layer 0: heads with one layer each if `separate`, as in DeepSeek-V3; or
    blocks, which share the norms and fc, as in Qwen3.5.

    Args:
        config: the model's config. The block has the config that `models.mtp_format.mtp_block` says.
        num_layers: number of layers.
        separate: whether each layer has its own norms and fc.

    Raises:
        ConfigError: MTP is not implemented for this model: see `models.mtp_format.mtp_block`.
    """

    def __init__(self, config: DecoderConfig, num_layers: int = 1, *, separate: bool = False) -> None:
        super().__init__()
        block = mtp_block(config)
        size = config.hidden_size
        self.embedding_norm, self.hidden_norm = config.norm.build(size), config.norm.build(size)
        self.fc = Linear(2 * size, size, bias=False)
        self.block = Block(size, block)
        self.norm = config.norm.build(size)
        later = (MTPHead(config) if separate else Block(size, block) for _ in range(num_layers - 1))
        self.later: nn.ModuleList = nn.ModuleList(later)
        self.separate = separate
        self.ropes = nn.ModuleList(RotaryEmbedding(rope) for rope in block.ropes)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return 1 + len(self.later)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        *,
        layer: int = 0,
        state: Any = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        **context: Any,
    ) -> Tensor:
        """Apply one layer of the head.

        Args:
            embeds: (B, T, H), embeddings of the next tokens, e.
            hidden: (B, T, H), hidden states of the model or results of the previous step, h.
            layer: number of the layer, from 0.
            state: the decoding state of the layer's block.
            activation_checkpointing: see `CausalLM.activation_checkpointing`.
            context: `position_ids`, and the fields of the `ForwardContext` of the pass: see `head_context`.

        Returns:
            y (B, T, H), in the dtype of `embeds`.
        """
        if layer and self.separate:
            options = {"state": state, "activation_checkpointing": activation_checkpointing, **context}
            return cast(Tensor, self.later[layer - 1](embeds, hidden, **options))
        block = self.later[layer - 1] if layer else self.block
        # The head's dtype may differ from the model's; its results go to the model's lm_head.
        dtype = next(self.parameters()).dtype
        tokens, forward_context = head_context(self.ropes, embeds, dtype, **context)
        e, h = tokens.take(embeds.to(dtype)), tokens.take(hidden.to(dtype))
        x = self.fc(torch.cat([self.embedding_norm(e), self.hidden_norm(h)], dim=-1))
        output = run(activation_checkpointing, block, x, forward_context, state)
        return tokens.restore(self.norm(output.hidden)).to(embeds.dtype)
