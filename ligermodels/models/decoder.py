"""Decoder: from tokens to hidden states, composed from configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError, InputError
from ligermodels.generation.state import DecodingState
from ligermodels.layers import (
    Block,
    BlockConfig,
    BlockOutput,
    Embedding,
    ForwardContext,
    PerLayerInputs,
    RotaryEmbedding,
    RouterConfig,
    RouterOutput,
    TreeTokens,
)
from ligermodels.layers.checkpointing import ActivationCheckpointing, run
from ligermodels.layers.modules import modules_of
from ligermodels.layers.sequence_parallel import SequenceParts, parts_of
from ligermodels.layers.sharding import TensorSharding
from ligermodels.layers.targets import TokensWithTarget
from ligermodels.layers.tokens import SelectedTokens, TokenLayout, layout_without_padding
from ligermodels.models.batch_invariant import check_batch_invariant
from ligermodels.models.decoder_config import DecoderConfig as DecoderConfig
from ligermodels.ops import set_batch_invariant

if TYPE_CHECKING:
    from typing_extensions import Self


class RefusesDropout(nn.Module):
    """A module that contains a `Decoder`, or is one, whose `train()` refuses configs with dropout."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules, as `nn.Module.train` does.

        Raises InputError, before any mode changes, for training a decoder whose config has dropout, which is not
        implemented, unless all its parameters are frozen.
        """
        for decoder in modules_of(self, Decoder) if mode else ():
            dropout = ", ".join(decoder.config.dropout)
            if dropout and any(parameter.requires_grad for parameter in decoder.parameters()):
                raise InputError(
                    f"model.train: config.json has {dropout}, and dropout is not implemented; to train without it, set "
                    "it to 0 in the checkpoint's config.json"
                )
        return super().train(mode)


class Decoder(RefusesDropout):
    """Embedding, blocks and final norm. `activation_checkpointing` may be changed at any time: see `CausalLM`."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}
    _ends_token_wise = True  # whether the last block mixed no tokens when it was built
    _tensor_ranks = 1  # number of tensor-parallel ranks
    _sequence_mesh: Any = None  # mesh of the ranks of sequence parallelism, see `layers.sequence_parallel`
    _context_mesh: Any = None  # mesh of the ranks of context parallelism, see `layers.context_parallel`
    has_routers = False  # whether a feed-forward layer returns the output of a router, or takes given experts

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not config.blocks:
            raise ConfigError("blocks: a decoder needs at least one block")
        self.config = config
        self._activation_checkpointing: ActivationCheckpointing = "none"
        self.embed = Embedding(
            config.vocab_size, config.hidden_size, config.embed_scale, config.padding_idx, config.embed_norm_eps
        )
        per_layer = config.per_layer_inputs
        self.per_layer_inputs = None if per_layer is None else PerLayerInputs(config.hidden_size, per_layer)
        self.blocks = nn.ModuleList(Block(config.hidden_size, block) for block in config.blocks)
        self._ends_token_wise = cast(Block, self.blocks[-1]).token_wise
        self.norm = config.norm.build(config.hidden_size)
        ropes = dict.fromkeys(rope for block in config.blocks for rope in block.ropes)
        self.ropes = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
        self.has_routers = bool(self.expert_routers) or any(cast(Block, b).mlp_has_extra_output for b in self.blocks)
        if config.dropout:
            self.eval()

    @property
    def narrows(self) -> bool:
        """Whether the last blocks mix no tokens (Gemma 4), so that passes with `token_indices` save their work."""
        return self._ends_token_wise and first_token_wise(self.blocks) < len(self.blocks)

    @property
    def expert_routers(self) -> Mapping[int, RouterConfig]:
        """Configs of the routers of mixtures of experts, by the number of the block; empty on a transformers model."""
        known = len(self.config.blocks)  # a user's own modules beyond them have no config
        numbers = [i for i, block in enumerate(self.blocks) if i < known or isinstance(block, Block)]
        routers = [(i, self._config_of(i).expert_router) for i in numbers]
        return {i: router for i, router in routers if router is not None}

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """ "none", "selective", "full" or "offload"."""
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
        token_indices: Tensor | TokensWithTarget | None = None,
        router_outputs: list[RouterOutput] | None = None,
        per_layer_inputs: Tensor | None = None,
        layout: TokenLayout | None = None,
        hidden_states: dict[int, Tensor] | None = None,
        routing: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Compute hidden states after the final norm. Values of the inputs are not checked: `CausalLM` does that.

        Args:
            input_ids: (B, T) long.
            inputs_embeds: (B, T, H), in place of `input_ids`.
            position_ids: (B, T) long; by default they count from the tokens in `state`, or within each document.
            cu_seqlens: int32 (n + 1,), bounds of documents over the flattened B * T tokens.
            state: decoding state of earlier tokens, to which the new tokens are added.
            seq_lens: long (B,), in a prefill: the number of tokens in each sequence; the rest of its row is padding.
            tree: the new tokens are a tree of candidates.
            token_indices: long (n,), indices of the flattened B * T tokens: only the states of these tokens are
                returned; blocks that mix no tokens compute only these. Or `Targets.tokens`.
            router_outputs: list to which the `RouterOutput` of every mixture of experts is appended.
            per_layer_inputs: (B, T, layers, P), for a model whose layers have inputs of their own: beside
                `inputs_embeds`, in place of the embedding by layer of `input_ids`.
            layout: layout of the tokens, in place of `cu_seqlens`. The states are returned in this layout, and
                `token_indices` are indices in it.
            hidden_states: its keys are boundaries between blocks, 0 to the number of blocks. Each value is replaced by
                the residual stream after that many blocks: at 0 the scaled embeddings, at the last boundary the states
                before the final norm. Always of all tokens: (B, T, H), with a `layout` (rows, length, H).
            routing: the experts of each token, by the number of the block: (rows, length, top_k), this rank's tokens
                in the layout. With the last boundary in `hidden_states` only, so that blocks are given all tokens.

        Returns:
            (B, T, H); with `token_indices` (1, n, H); with a `layout` its tokens, (rows, length, H).
        """
        if set_batch_invariant.value:
            check_batch_invariant(self)
        if layout is None:
            return self._in_own_layout(
                input_ids, inputs_embeds, cu_seqlens, state, seq_lens, tree, token_indices, hidden_states,
                position_ids=position_ids, router_outputs=router_outputs, per_layer_inputs=per_layer_inputs,
                routing=routing,
            )  # fmt: skip
        ids = None if input_ids is None else layout.take(input_ids)
        x = self.embed(ids) if inputs_embeds is None else layout.take(inputs_embeds)
        fields: dict[str, Any] = {"seq_lens": seq_lens, "tree": tree, "routing": routing or {}}
        if self.per_layer_inputs is not None:
            fields["per_layer_inputs"] = self._inputs_of_layers(layout, ids, x, per_layer_inputs)
        scale = self.config.input_scale * (self.config.token_scale if inputs_embeds is None else 1.0)
        x = x if scale == 1.0 else x * scale
        context = self._context(layout, x, position_ids, state, **fields)
        if hidden_states is not None or token_indices is not None:
            return self.norm(self._run_in_steps(hidden_states, token_indices, x, context, state, router_outputs))
        return self.norm(self._run(range(len(self.blocks)), x, context, state, router_outputs))

    def _context(
        self, layout: TokenLayout, x: Tensor, position_ids: Tensor | None, state: DecodingState | None, **fields: Any
    ) -> ForwardContext:
        """Positions, rotary tables and the layout, for the blocks; `fields` are further fields of the context."""
        cache_seqlens = None if state is None else state.cache_seqlens
        if position_ids is None and state is None:
            positions = layout.positions(x)
        elif position_ids is not None:
            positions = layout.packing.take(position_ids)
        else:
            positions = _new_positions(x, cache_seqlens, fields["seq_lens"], fields["tree"])
        tables = {rope.config: rope(positions, x.dtype) for rope in cast(Iterable[RotaryEmbedding], self.ropes)}
        context = ForwardContext(tables, layout.cu_seqlens, positions, cache_seqlens=cache_seqlens, **fields)
        # Scalings may depend on a row's highest position, and another rank may hold it: tables are divided last.
        return context if layout.shard is None else context.of_shard(layout.shard)

    def _run(
        self,
        blocks: range,
        x: Tensor,
        context: ForwardContext,
        state: DecodingState | None,
        router_outputs: list[RouterOutput] | None,
    ) -> Tensor:
        """Run the blocks of these numbers."""
        if self._sequence_mesh is not None and blocks and state is None and context.needed is None:
            return self._run_in_parts(blocks, x, context, router_outputs)
        if state is not None:
            return self._run_with_state(blocks, x, context, state, router_outputs)
        for i in blocks:
            x = self._block(i, x, context, None, router_outputs).hidden
        return x

    def _block(
        self,
        i: int,
        x: Tensor,
        context: ForwardContext,
        state: DecodingState | None,
        router_outputs: list[RouterOutput] | None,
        *more: Any,
        parts: SequenceParts | None = None,
    ) -> BlockOutput:
        """The result of block i, to which `more` arguments are passed. Keys and values go to the context, the router's
        output to `router_outputs`."""
        own = context.of_block(i) if context.routing else context
        arguments = x, own, None if state is None else state.layers[i], *more
        if self._activation_checkpointing == "none" and parts is None:
            output = self.blocks[i](*arguments)
        else:
            output = run(self._activation_checkpointing, self.blocks[i], *arguments, parts=parts)
        if output.keys_values is not None:
            context.keys_values[i] = output.keys_values
        if output.router is not None and router_outputs is not None:
            router_outputs.append(output.router)
        return cast(BlockOutput, output)

    # -- modes of a pass -----------------------------------------------------------------------------------------------

    def _run_with_state(
        self,
        blocks: range,
        x: Tensor,
        context: ForwardContext,
        state: DecodingState,
        router_outputs: list[RouterOutput] | None,
    ) -> Tensor:
        """`_run` of a decoding pass: the last addition of a block is left to the first norm of the next, because each
        kernel counts there. In training both summands would be kept for the backward pass."""
        pending: Tensor | None = None
        for i in blocks:
            defer = i + 1 < blocks.stop and all(_takes_additions(self.blocks[each]) for each in (i, i + 1))
            more = (pending, defer) if defer or pending is not None else ()
            output = self._block(i, x, context, state, router_outputs, *more)
            x, pending = output.hidden, output.pending
        return x

    def _inputs_of_layers(self, layout: TokenLayout, ids: Tensor | None, x: Tensor, per_layer: Tensor | None) -> Tensor:
        """The inputs of each layer (rows, length, layers, P), by token ids in the layout or the `per_layer` given."""
        if ids is None and per_layer is None:
            raise InputError("inputs_embeds: this model has inputs for each layer by token too; give input_ids")
        per_layer = None if per_layer is None else layout.take(per_layer)
        inputs: Tensor = cast(PerLayerInputs, self.per_layer_inputs)(ids, x, per_layer)
        return inputs

    def _run_in_parts(
        self, blocks: range, x: Tensor, context: ForwardContext, router_outputs: list[RouterOutput] | None
    ) -> Tensor:
        """`_run` under sequence parallelism: each rank computes its part of the tokens."""
        parts = parts_of(self, x.shape[0], x.shape[1])
        if parts is not None:
            x, context = parts.take(x), context.of_parts(parts)
        for i in blocks:
            x = self._block(i, x, context, None, router_outputs, parts=parts).hidden
        return x if parts is None else parts.restore(x)

    def _in_own_layout(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        state: DecodingState | None,
        seq_lens: Tensor | None,
        tree: TreeTokens | None,
        token_indices: Tensor | TokensWithTarget | None,
        hidden_states: dict[int, Tensor] | None,
        **options: Any,
    ) -> Tensor:
        """`forward` without a layout, as for all passes with a decoding state: (B, T, H), or (1, n, H)."""
        inputs = cast(Tensor, input_ids if inputs_embeds is None else inputs_embeds)
        shape, mesh = (inputs.shape[0], inputs.shape[1]), self._context_mesh
        if state is not None:  # each rank computes all tokens
            state.check(*shape, self.config)
            mesh = None
        layout = layout_without_padding(shape, cu_seqlens, mesh)
        # The `token_indices` number the tokens before context parallelism divides them.
        early = token_indices if layout.shard is None else None
        options |= {"state": state, "seq_lens": seq_lens, "tree": tree, "hidden_states": hidden_states}
        # Not `self.forward`: a subclass may extend it, and its part is done.
        x = Decoder.forward(self, input_ids, inputs_embeds=inputs_embeds, token_indices=early, layout=layout, **options)
        if state is not None:
            state.after(shape[1], seq_lens, tree)
        if hidden_states is not None:
            hidden_states.update({boundary: layout.restore(states) for boundary, states in hidden_states.items()})
        x = x if layout.shard is None else layout.shard.restore(x)
        if token_indices is None or (selected := _selected(token_indices, x)) is None:
            return layout.packing.restore(x)
        return x if early is not None else selected.take(x)

    def _run_in_steps(
        self,
        hidden_states: dict[int, Tensor] | None,
        token_indices: Tensor | TokensWithTarget | None,
        x: Tensor,
        context: ForwardContext,
        *args: Any,
    ) -> Tensor:
        """Run all blocks; between them, fill in `hidden_states`, and select the tokens of `token_indices`."""
        blocks = range(len(self.blocks))
        if hidden_states is not None:
            x, blocks = self._fill_hidden_states(hidden_states, blocks, x, context, *args)
        if token_indices is not None:
            x, blocks, context = self._narrowed(token_indices, blocks, x, context, *args)
        return self._run(blocks, x, context, *args)

    def _fill_hidden_states(
        self, hidden_states: dict[int, Tensor], blocks: range, x: Tensor, *args: Any
    ) -> tuple[Tensor, range]:
        """Run the blocks up to the last boundary of `hidden_states`, and fill it in.

        Returns:
            The residual stream after them, and the blocks left.
        """
        for boundary in sorted(hidden_states):
            x, blocks = self._run(range(blocks.start, boundary), x, *args), range(boundary, blocks.stop)
            hidden_states[boundary] = x
        return x, blocks

    def _narrowed(
        self, token_indices: Tensor | TokensWithTarget, blocks: range, x: Tensor, context: ForwardContext, *args: Any
    ) -> tuple[Tensor, range, ForwardContext]:
        """Run the blocks up to the last block that mixes tokens, then select the needed tokens.

        Returns:
            The states of these tokens, (1, n, H); the blocks left; and their context.
        """
        first = max(blocks.start, first_token_wise(self.blocks))
        x, blocks = self._run(range(blocks.start, first), x, context, *args), range(first, blocks.stop)
        selected = _selected(token_indices, x)
        if selected is None:
            return x, blocks, context
        return selected.take(x), blocks, context.of_tokens(selected) if blocks else context

    def _config_of(self, number: int) -> BlockConfig:
        """Config of a block that is there: a user may have removed, repeated or moved blocks."""
        config = getattr(self.blocks[number], "config", None)
        return config if isinstance(config, BlockConfig) else self.config.blocks[number]

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state for `batch_size` sequences of up to `max_length` tokens."""
        ranks = self._tensor_ranks
        blocks = [self._config_of(number) for number in range(len(self.blocks))]
        blocks = blocks if ranks == 1 else [block.tensor_shard(ranks) for block in blocks]
        weight = next(self.parameters())
        sizes: dict[str, Any] = {"hidden_size": self.config.hidden_size, "dtype": weight.dtype, "device": weight.device}
        return DecodingState([block.mixer for block in blocks], batch_size, max_length, config=self.config, **sizes)


def _selected(token_indices: Tensor | TokensWithTarget, x: Tensor) -> SelectedTokens | None:
    """The tokens of x (rows, length, H) whose states are needed, as `Decoder.forward` takes them; None for all.

    For the tokens with a target it waits for their number, which the GPU has counted before the queued blocks."""
    if isinstance(token_indices, Tensor):
        return SelectedTokens(token_indices.long(), x.shape[0], x.shape[1], distinct=False)
    selected = token_indices.selected
    return None if selected is None else SelectedTokens(selected.indices, x.shape[0], x.shape[1])


def _takes_additions(block: nn.Module) -> bool:
    """Whether a block has the arguments `pending` and `defer`, and may be called with them."""
    return isinstance(block, Block) and block.may_defer


def first_token_wise(blocks: Any) -> int:
    """Number of the first block from which on all blocks are `token_wise`: these may be given only the needed tokens.

    In most models it is the number of blocks. In Gemma 4 the last blocks only attend to keys and values of earlier
    ones; at 4096 tokens, of which a quarter has a label, this saves a third to a half of a step's linear FLOPs.
    """
    first = len(blocks)
    while first and blocks[first - 1].token_wise:
        first -= 1
    return first


def _new_positions(x: Tensor, cache_seqlens: Tensor | None, seq_lens: Tensor | None, tree: TreeTokens | None) -> Tensor:
    """Positions (B or 1, T) of tokens x (B, T, H) that are added to a decoding state."""
    length = x.shape[1]
    if cache_seqlens is not None and length == 1:  # a step of plain decoding; the root of a tree alone has depth 0
        return cache_seqlens[:, None]
    index = torch.arange(length, device=x.device)[None] if tree is None else tree.depth.view(-1, length)
    if cache_seqlens is not None:
        return index + cache_seqlens[:, None]
    # Some rotary scalings depend on the highest position of a row: the position of its last token, not of padding.
    return index if seq_lens is None else torch.minimum(index, seq_lens[:, None] - 1)
