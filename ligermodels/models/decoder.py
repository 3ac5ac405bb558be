"""Decoder: from tokens to hidden states, composed from configs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation.state import DecodingState
from ligermodels.layers import (
    Block,
    BlockConfig,
    Embedding,
    ForwardContext,
    HeadConfig,
    KeysValues,
    NormConfig,
    PerLayerInputs,
    PerLayerInputsConfig,
    RotaryEmbedding,
    RouterOutput,
    Targets,
    TreeTokens,
)
from ligermodels.layers.checkpointing import ActivationCheckpointing, run
from ligermodels.layers.context_parallel import shard_of
from ligermodels.layers.packing import packed_positions
from ligermodels.layers.sharding import TensorSharding
from ligermodels.layers.targets import take_tokens
from ligermodels.layers.token_parts import parts_of


@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder as data.

    `blocks` has one entry a layer; embeddings of tokens are multiplied by `embed_scale`, rounded to their dtype, and
    whatever goes into the first block, `inputs_embeds` too, by `input_scale`; the embedding's row of `padding_idx` gets
    no gradient from the inputs; `router_aux_loss_coef` is the weight of the load-balancing loss of mixtures of experts
    in the whole loss; `initializer_range` is the standard deviation of new weights; `max_position_embeddings` the
    longest context the checkpoint was made for; `num_mtp_layers` counts the layers of multi-token
    prediction that checkpoints have after those of the blocks (DeepSeek-V3, GLM-4.5), which are no part of the model;
    `per_layer_inputs` makes what blocks take beside the hidden states, if they do.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm: NormConfig
    head: HeadConfig = field(default_factory=HeadConfig)
    embed_scale: float | None = None
    input_scale: float = 1.0
    padding_idx: int | None = None
    router_aux_loss_coef: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int | None = None
    num_mtp_layers: int = 0
    per_layer_inputs: PerLayerInputsConfig | None = None

    def weight_map(
        self,
        *,
        prefix: str = "model",
        head: str = "lm_head.weight",
        names: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> WeightMap:
        """Where the tensors of a `CausalLM` of this config are in a checkpoint of Hugging Face's usual layout.

        Args:
            prefix: what stands before `layers`, `embed_tokens` and `norm`.
            head: name of the language-model head.
            names: a family's own names of parts of a layer; `NAMES` of the layers' configs has the parts and the usual
                names.
            ignored: patterns of tensors of the checkpoint to skip.
        """
        embedding = f"{prefix}.embed_tokens.weight"
        entries: list[WeightMapping] = [rename("decoder.embed.weight", embedding)]
        unused: list[str] = []
        if self.per_layer_inputs is not None:
            entries += self.per_layer_inputs.weight_mappings("decoder.per_layer_inputs", prefix)
        for layer, block in enumerate(self.blocks):
            here, there = f"decoder.blocks.{layer}", f"{prefix}.layers.{layer}"
            entries += block.weight_mappings(self.hidden_size, here, there, names or {})
            unused += block.mixer.unused(there, names or {})
        for kind in ("weight", "bias") if self.norm.bias else ("weight",):
            entries.append(rename(f"decoder.norm.{kind}", f"{prefix}.norm.{kind}"))
        if not self.head.tied:
            entries.append(rename("head.weight", head))
        if self.head.bias:
            entries.append(rename("head.bias", f"{head.removesuffix('.weight')}.bias"))
        aliases = {head: embedding} if self.head.tied else {}
        first = len(self.blocks)
        mtp = [rf"^{re.escape(prefix)}\.layers\.{layer}\." for layer in range(first, first + self.num_mtp_layers)]
        return WeightMap(entries, ignored=[r"rotary_emb\.inv_freq$", *mtp, *unused, *ignored], aliases=aliases)


class Decoder(nn.Module):
    """Embedding, blocks and final norm. `activation_checkpointing` may be changed at any time: see `CausalLM`."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}
    _tensor_ranks = 1  # that `parallel.tensor` divides it over
    _token_mesh: Any = None  # of those of them that divide the tokens too, see `layers.token_parts`
    _context_mesh: Any = None  # of the ranks that divide each sequence, see `layers.context_parallel`

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not config.blocks:
            raise ConfigError("blocks: a decoder needs at least one block")
        self.config = config
        self._activation_checkpointing: ActivationCheckpointing = "none"
        self.embed = Embedding(config.vocab_size, config.hidden_size, config.embed_scale, config.padding_idx)
        per_layer = config.per_layer_inputs
        self.per_layer_inputs = None if per_layer is None else PerLayerInputs(config.hidden_size, per_layer)
        self.blocks = nn.ModuleList(Block(config.hidden_size, block) for block in config.blocks)
        self.norm = config.norm.build(config.hidden_size)
        ropes = dict.fromkeys(rope for block in config.blocks for rope in (*block.mixer.ropes, *block.mlp.ropes))
        self.ropes = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """ "none", "selective" or "full"."""
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        if mode not in get_args(ActivationCheckpointing):
            known = ", ".join(get_args(ActivationCheckpointing))
            raise InputError(f"activation_checkpointing: must be one of {known}, got {mode!r}")
        self._activation_checkpointing = mode

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: DecodingState | None = None,
        seq_lens: Tensor | None = None,
        tree: TreeTokens | None = None,
        token_indices: Tensor | Targets | None = None,
        router_outputs: list[RouterOutput] | None = None,
        per_layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, H) after the final norm. Values of the inputs are not checked: `CausalLM` does that.

        Args:
            input_ids: (B, T) long; or `inputs_embeds` (B, T, H) in its place.
            position_ids: (B, T) long; by default they count from what `state` holds, or within each document.
            cu_seqlens: int32 (n + 1,), bounds of documents over the flattened B * T tokens.
            state: keys, values and the like of earlier tokens; those of the new ones are added: see `DecodingState`.
            seq_lens: long (B,), in a prefill: the tokens of each sequence; the rest of its row is padding.
            tree: the new tokens are a tree of candidates.
            token_indices: long (n,), indices of the flattened B * T: the states of these tokens alone are computed as
                far as that is possible, and returned, (1, n, H). `Targets` stand for the tokens that have one. With a
                `shard`, what is returned is of its tokens.
            router_outputs: gets the `RouterOutput` of every mixture of experts.
            per_layer_inputs: (B, T, layers, P), of a model whose layers have inputs of their own: what stands, beside
                `inputs_embeds`, for the embedding by layer of `input_ids`.
        """
        inputs = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        batch, length = inputs.shape[:2]
        if state is not None:
            state.check(batch, length)
        cache_seqlens = None if state is None else state.cache_seqlens
        if cu_seqlens is not None:
            position_ids = None if position_ids is None else position_ids.reshape(1, -1)
        if position_ids is None:
            position_ids = _positions(length, inputs.device, cu_seqlens, cache_seqlens, seq_lens, tree)
        given, shard = getattr(token_indices, "shard", None), None
        if state is None:
            shard = shard_of(self, batch, length, packed=cu_seqlens is not None) if given is None else given
        if shard is not None:
            input_ids = None if input_ids is None else shard.take(input_ids)
            inputs_embeds = None if inputs_embeds is None else shard.take(inputs_embeds)
            per_layer_inputs = None if per_layer_inputs is None else shard.take(per_layer_inputs)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.per_layer_inputs is not None:
            if input_ids is None and per_layer_inputs is None:
                raise InputError("inputs_embeds: this model has inputs for each layer by token too; give input_ids")
            per_layer_inputs = cast(PerLayerInputs, self.per_layer_inputs)(input_ids, x, per_layer_inputs)
        x = x if self.config.input_scale == 1.0 else x * self.config.input_scale
        if cu_seqlens is not None:
            x = x.reshape(1, -1, x.shape[-1])
            per_layer_inputs = None if per_layer_inputs is None else per_layer_inputs.flatten(0, 1)[None]
        ropes = cast(Iterable[RotaryEmbedding], self.ropes)
        tables = {rope.config: rope(position_ids, x.dtype) for rope in ropes}
        if shard is not None:  # scalings may go by the highest position of a row, which other ranks may have
            position_ids = shard.take(position_ids)
            tables = {rope: (shard.take(cos), shard.take(sin)) for rope, (cos, sin) in tables.items()}
        wanted = token_indices
        token_indices = None if shard is not None and given is None else token_indices
        keys_values: dict[int, KeysValues] = {}
        context = ForwardContext(
            tables, cu_seqlens, seq_lens, cache_seqlens, tree, position_ids, keys_values, per_layer_inputs, shard=shard
        )
        last = None if token_indices is None else _last_block_of_all_tokens(self.blocks)
        parts, context_of_parts = None if state is not None else parts_of(self, *x.shape[:2]), context
        if parts is not None:
            x = parts.take(x)
            if per_layer_inputs is not None:
                context_of_parts = replace(context, per_layer_inputs=parts.take(per_layer_inputs))
        for i, block in enumerate(self.blocks):
            if i == last and isinstance(token_indices, Targets):
                token_indices = token_indices.token_indices  # synchronises, with all blocks before it queued
            indices = cast("Tensor | None", token_indices) if i == last else None
            if parts is not None and indices is not None:
                x, parts = parts.whole(x), None
            shape = x.shape[:2]
            own = None if state is None else state.layers[i]
            arguments = (x, context if parts is None else context_of_parts, own, indices)
            output = run(self._activation_checkpointing, block, *arguments, parts=parts)
            x, *more = output if isinstance(output, tuple) else (output,)
            for each in more:
                if isinstance(each, KeysValues):
                    keys_values[i] = each
                elif router_outputs is not None:
                    router_outputs.append(each)
            if indices is not None:
                context = context.of_tokens(indices, *shape)
        x = x if parts is None else parts.whole(x)
        if state is not None:
            state.after(length, seq_lens, tree)
        if cu_seqlens is not None and token_indices is None and shard is None:
            x = x.view(batch, length, -1)
        x = self.norm(x)
        if shard is None or given is not None:
            return x
        x = shard.gather(x)
        wanted = wanted.token_indices if isinstance(wanted, Targets) else wanted
        return x if wanted is None else take_tokens(x, wanted)

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state for `batch_size` sequences of up to `max_length` tokens."""
        ranks = self._tensor_ranks
        mixers = [block.mixer if ranks == 1 else block.mixer.tensor_shard(ranks) for block in self.config.blocks]
        weight = next(self.parameters())
        sizes: dict[str, Any] = {"hidden_size": self.config.hidden_size, "dtype": weight.dtype, "device": weight.device}
        return DecodingState(mixers, batch_size, max_length, **sizes)


def _last_block_of_all_tokens(blocks: Iterable[nn.Module]) -> int:
    """Number of the last block that has to be given all tokens; later ones need only those whose states are needed."""
    needs = [
        not all(getattr(getattr(block, name, None), "token_wise", False) for name in ("mixer", "mlp"))
        for block in blocks
    ]
    last = len(needs) - 1
    return next((i for i in range(last, -1, -1) if needs[i]), last)


def _positions(
    length: int,
    device: torch.device,
    cu_seqlens: Tensor | None,
    cache_seqlens: Tensor | None,
    seq_lens: Tensor | None,
    tree: TreeTokens | None,
) -> Tensor:
    """The positions (B or 1, T) of tokens that come without any."""
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, length)
    if cache_seqlens is not None and length == 1:  # a step of plain decoding; the root of a tree alone has depth 0
        return cache_seqlens[:, None]
    places = torch.arange(length, device=device)[None] if tree is None else tree.depth[None]
    if cache_seqlens is not None:
        return places + cache_seqlens[:, None]
    # The highest position of a row, which some rotary scalings go by, is that of its last token, not of padding.
    return places if seq_lens is None else torch.minimum(places, seq_lens[:, None] - 1)
