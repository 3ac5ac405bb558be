"""The draft head of EAGLE-3: one decoder layer over states of several of the model's layers and the next tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.arguments import EAGLE_FLAGS, check_count, check_flag
from ligermodels.errors import ConfigError, short
from ligermodels.generation.state import DecodingState
from ligermodels.layers import (
    Attention,
    AttentionConfig,
    ForwardContext,
    KeysValues,
    LayerConfig,
    NormConfig,
    RotaryEmbedding,
)
from ligermodels.layers.linear import Linear
from ligermodels.layers.packing import packed_positions
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import family_of
from ligermodels.speculative.draft_layer import check_ascending, following, head_context

KINDS = ("llama", "qwen3")
"""`model_type` of the layers that servers implement: Llama's, and Qwen3's with norms of queries and keys."""


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head as data. The names of the flags are the fields of published heads.

    Args:
        layer: Hugging Face config of a Llama or Qwen3 model with one layer, the layer of the head.
        boundaries: the states that the head reads, in ascending order: L is the residual stream after L layers.
        target_hidden_size: channels of the model's states.
        draft_vocab_size: number of tokens that the head can propose.
        norm_before_residual: the residual stream of the layer starts from the normalised features.
        norm_before_fc: one norm over the states of all boundaries together, before `fc`.
        fc_norm: a norm over the states of each boundary, before `fc`.
        norm_output: the next step reads the result after the final norm (EAGLE-3.1), not before it.

    Raises:
        ConfigError, InputError: a field has a bad value.
    """

    layer: Mapping[str, Any]
    boundaries: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", deepcopy(dict(self.layer)))  # the caller may change its own
        if self.layer.get("model_type") not in KINDS:
            kind = short(self.layer.get("model_type"))
            raise ConfigError(f"transformer_layer_config: model_type must be one of {', '.join(KINDS)}, got {kind}")
        if len(self.decoder.blocks) != 1:
            raise ConfigError(f"num_hidden_layers: heads of one layer are implemented, got {len(self.decoder.blocks)}")
        check_ascending(self.boundaries)
        for flag in EAGLE_FLAGS:
            check_flag(flag, getattr(self, flag))
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc: excludes fc_norm; a head has one of them at most")
        check_count("draft_vocab_size", self.draft_vocab_size, most=self.decoder.vocab_size)

    @cached_property
    def decoder(self) -> DecoderConfig:
        """The composed config of `layer`."""
        return family_of(self.layer).decoder_config(self.layer)

    @property
    def mixer(self) -> AttentionConfig:
        """Config of the layer's attention."""
        return cast(AttentionConfig, self.decoder.blocks[0].mixer)


class DraftStates(NamedTuple):
    """Results of an `Eagle3Head`, each (B, T, H): `next`, which the next step reads; `normed`, which the head's lm_head
    projects to the draft vocabulary."""

    next: Tensor
    normed: Tensor


class TwoStreamAttention(Attention):
    """Attention with queries, keys and values from two inputs of H channels side by side."""

    def __init__(self, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__(hidden_size, config)
        self.qkv = Linear(2 * hidden_size, self.qkv.out_features, bias=config.bias)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, steps: list[KeysValues] | None = None
    ) -> Tensor:
        """Run the layer, in decoding or as a step of training.

        Args:
            x: (B, T, 2 H).
            context: the context of this pass.
            state: the decoding state, or None.
            steps: in training, the keys and values of the earlier steps; those of this step are appended. Each token
                attends to the keys of the first step up to its own position, and of the others to its own.

        Returns:
            (B, T, H).
        """
        if steps is None:
            return cast(Tensor, super().forward(x, context, state))
        config = self.config
        options: dict[str, Any] = {
            "softmax_scale": config.softmax_scale, "window": config.window, "cu_seqlens": context.cu_seqlens,
        }  # fmt: skip
        q, k, v, _ = self.project(x, context, None)
        steps.append(KeysValues(k, v))
        (keys, values), *private = steps
        if private:
            private_keys, private_values = zip(*private, strict=True)
            out = ops.private_key_attention(q, keys, values, private_keys, private_values, **options)
        else:
            out = ops.attention(q, keys, values, backend=config.backend, **options)
        return cast(Tensor, self.o(out.flatten(2)))


class FeatureReader(nn.Module):
    """fc c, or fc norm(c), for states c of several boundaries side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, parts = config.target_hidden_size, len(config.boundaries)
        norm: NormConfig = config.decoder.norm
        self.norm = norm.build(parts * size) if config.norm_before_fc else None
        self.norms = nn.ModuleList(norm.build(size) for _ in range(parts) if config.fc_norm)
        self.fc = Linear(parts * size, config.decoder.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """states (..., n H_target) of the n boundaries -> features (..., H)."""
        if self.norm is not None:
            states = self.norm(states)
        if self.norms:
            parts = states.chunk(len(self.norms), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)
        return cast(Tensor, self.fc(states))


class Eagle3Head(nn.Module):
    """The head of EAGLE-3 (https://arxiv.org/abs/2503.01840). With e_t the embedding of token t + 1, and z_t the
    features of token t (`FeatureReader`) or the result of the step before:

        u_t = [embedding_norm(e_t) | hidden_norm(z_t)]        r_t = z_t, or hidden_norm(z_t) if `norm_before_residual`
        m_t = r_t + attention(u)_t                            next_t = m_t + mlp(mlp_norm(m_t))

    lm_head(norm(next_t)) predicts token t + 2. With `norm_output`, the next step reads norm(next_t).

    Args:
        config: the config of the head.
    """

    tensor_parallel: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, decoder = config, config.decoder
        size, block = decoder.hidden_size, decoder.blocks[0]
        self.reader = FeatureReader(config)
        self.embedding_norm, self.hidden_norm = decoder.norm.build(size), decoder.norm.build(size)
        self.mixer = TwoStreamAttention(size, config.mixer)
        self.mlp_norm, self.mlp = decoder.norm.build_before(size), cast(LayerConfig, block.mlp).build(size)
        self.norm = decoder.norm.build(size)
        self.ropes = nn.ModuleList(RotaryEmbedding(rope) for rope in block.ropes)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        *,
        reads_states: bool = False,
        state: Any = None,
        steps: list[KeysValues] | None = None,
        **context: Any,
    ) -> DraftStates:
        """Apply the head once.

        Args:
            embeds: (B, T, H), embeddings of the next tokens, e.
            hidden: (B, T, H), z; with `reads_states` the model's states (B, T, n H_target).
            reads_states: whether `hidden` are the model's states, from which the features are computed.
            state: the decoding state of the layer.
            steps: in training, the keys and values of the earlier steps: see `TwoStreamAttention`.
            context: `position_ids`, and the fields of the `ForwardContext` of the pass: see `head_context`.

        Returns:
            The results, in the head's dtype.
        """
        dtype = next(self.parameters()).dtype  # it may differ from the model's
        tokens, forward_context = head_context(self.ropes, embeds, dtype, **context)
        e, z = tokens.take(embeds.to(dtype)), tokens.take(hidden.to(dtype))
        z = self.reader(z) if reads_states else z
        normed = self.hidden_norm(z)
        residual = normed if self.config.norm_before_residual else z
        x = torch.cat([self.embedding_norm(e), normed], dim=-1)
        u, middle = self.mlp_norm(residual, self.mixer(x, forward_context, state, steps))
        result = tokens.restore(middle + self.mlp(u, forward_context))
        normed = self.norm(result)
        return DraftStates(normed if self.config.norm_output else result, normed)

    def training_steps(
        self,
        states: Tensor,
        embeds: Tensor,
        num_steps: int,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Apply the head several times to a text: step k reads the tokens k + 1 places ahead.

        Args:
            states: (B, T, n H_target), the model's states at the boundaries.
            embeds: (B, T, H), embeddings of the tokens.
            num_steps: K.
            position_ids: long (B, T); by default counted from 0 in each row or document.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into a single row, or None.

        Returns:
            Of each step, `DraftStates.normed`, (B, T, H).
        """
        length = embeds.shape[1]
        if position_ids is None:
            counted = torch.arange(length, device=embeds.device)[None]
            position_ids = counted if cu_seqlens is None else packed_positions(cu_seqlens, length)
        hidden, earlier = states, list[KeysValues]()
        for step in range(num_steps):
            # In the last step + 1 positions of a document the next token is wrong. This changes no loss: they have no
            # target, and no position with a target attends to them.
            hidden, normed = self(
                following(embeds, step + 1),
                hidden,
                reads_states=step == 0,
                position_ids=position_ids + step,
                cu_seqlens=cu_seqlens,
                steps=earlier,
            )
            yield normed

    def new_state(self, batch_size: int, max_length: int, device: torch.device) -> DecodingState:
        """An empty decoding state of the layer for `batch_size` sequences of up to `max_length` tokens, on `device`."""
        weight = self.reader.fc.weight
        options: dict[str, Any] = {"hidden_size": self.config.decoder.hidden_size, "dtype": weight.dtype}
        return DecodingState([self.config.mixer], batch_size, max_length, device=device, **options)
