"""A native decoder on the modules of a transformers model's backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.integrations.modules import (
    FINAL_NORM,
    OnModules,
    attribute_named,
    native_of,
    part_named,
    within_checkpoint,
)
from ligermodels.layers import BlockOutput, ForwardContext, PerLayerInputs, PerLayerInputsConfig, RotaryEmbedding
from ligermodels.layers.tokens import TokenLayout
from ligermodels.models.decoder import Decoder, DecoderConfig
from ligermodels.ops import refuse_batch_invariant


def refuse_batch_invariance() -> None:
    """BackendError under `ops.set_batch_invariant`: linear layers are torch's here."""
    refuse_batch_invariant("a model of transformers", "load the checkpoint by lm.from_pretrained")


@dataclass(frozen=True)
class AddedFeatures:
    """Features of images that are added to the hidden states of some tokens (DeepStack,
    https://arxiv.org/abs/2406.04334).

    mask: bool (rows, length) in the layout of the pass, or (B, T); True for n tokens.
    features: (n, H), in the order of these tokens.
    """

    mask: Tensor
    features: Tensor

    def add_to(self, x: Tensor) -> Tensor:
        """x, all tokens of the pass in rows of any length, (..., H) -> the same with the features added."""
        mask = self.mask.reshape(*x.shape[:-1], 1).expand_as(x)
        return x + torch.zeros_like(x).masked_scatter(mask, self.features.to(x))


class HFPerLayerInputs(OnModules, PerLayerInputs):
    """`PerLayerInputs` on a transformers backbone."""

    embed, projection, norm = (
        attribute_named(PerLayerInputsConfig.NAMES[name]) for name in ("embed", "projection", "norm")
    )


class _LayerCall:
    """Calls a transformers layer in the place of a native block, and adds features of images to its result."""

    def __init__(self, layer: nn.Module, added: AddedFeatures | None = None) -> None:
        self._layer, self._added = layer, added

    @property
    def token_wise(self) -> bool:
        """See `Block`."""
        token_wise: bool = native_of(within_checkpoint(self._layer)).layer.token_wise
        return token_wise

    def __call__(self, *args: Any) -> BlockOutput:
        output = BlockOutput(*self._layer(*args))  # gradient checkpointing makes it a plain tuple
        return output if self._added is None else output._replace(hidden=self._added.add_to(output.hidden))


class _Blocks:
    """The layers of a backbone, as native blocks. As in transformers, the layers may change, or the number of layers in
    the config."""

    def __init__(self, backbone: Any, added: Sequence[AddedFeatures] = ()) -> None:
        self._backbone, self._added = backbone, added

    def __len__(self) -> int:
        return min(len(self._backbone.layers), self._backbone.config.num_hidden_layers)

    def __getitem__(self, index: int) -> _LayerCall:
        added = self._added[index] if index < len(self._added) else None
        return _LayerCall(self._backbone.layers[index], added)

    def __iter__(self) -> Iterator[_LayerCall]:
        return iter([self[index] for index in range(len(self))])


class HFDecoder(OnModules, Decoder):
    """`Decoder` on a transformers backbone.

    Args:
        backbone: the backbone.
        config: config of the native decoder.
        ropes: the native rotary embeddings.
    """

    norm = part_named(FINAL_NORM)
    expert_routers = MappingProxyType({})

    def __init__(self, backbone: nn.Module, config: DecoderConfig, ropes: nn.ModuleList) -> None:
        super().__init__(backbone, config)
        self._activation_checkpointing = "none"  # transformers' layers have gradient checkpointing of their own
        self.blocks: Any = _Blocks(backbone)
        inputs = config.per_layer_inputs
        self.per_layer_inputs = None if inputs is None else HFPerLayerInputs(backbone, inputs)
        self.ropes = ropes

    def with_features(self, added: Sequence[AddedFeatures]) -> HFDecoder:
        """A decoder that adds features of images to the results of the first layers, for one pass."""
        decoder = HFDecoder(self.source, self.config, self.ropes)
        decoder.blocks = _Blocks(self.source, added)
        return decoder

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Tensor:
        """See `Decoder.forward`. The positions may also be times, heights and widths of tokens, (3, B, T), or with the
        positions before them (4, B, T). BackendError under `ops.set_batch_invariant`."""
        refuse_batch_invariance()
        tokens: Any = inputs["inputs_embeds"] if input_ids is None else input_ids
        if any(rope.frequencies.device != tokens.device for rope in cast(Iterable[RotaryEmbedding], self.ropes)):
            self.ropes.to_empty(device=tokens.device)  # and computes the frequencies anew
        return super().forward(input_ids, **inputs)

    def _context(
        self, layout: TokenLayout, x: Tensor, position_ids: Tensor | None, *args: Any, **kwargs: Any
    ) -> ForwardContext:
        """With times, heights and widths, the rotary tables are computed by the rotary embedding of transformers."""
        positions, grid = split_positions(position_ids)
        context = super()._context(layout, x, positions, *args, **kwargs)
        if grid is None:
            return context
        rope = cast(RotaryEmbedding, self.ropes[0]).config
        grid = layout.take(grid.permute(1, 2, 0)).permute(2, 0, 1)
        cos, sin = (table[..., : table.shape[-1] // 2].contiguous() for table in self.source.rotary_emb(x, grid))
        return replace(context, rope_tables={rope: (cos, sin)})

    def embed(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        """input_ids (B, T) -> (B, T, H)."""
        x: Tensor = self.source.embed_tokens(input_ids)
        scale = native_of(self.source).config.embed_scale
        return x if scale is None else x * torch.tensor(scale, dtype=x.dtype)


def split_positions(position_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split positions as transformers gives them into positions in the text (B or 1, T), and times, heights and widths
    (3, B, T); None where there are none."""
    if position_ids is None or position_ids.ndim == 2:
        return position_ids, None
    return (position_ids[0], position_ids[1:]) if len(position_ids) == 4 else (None, position_ids)
