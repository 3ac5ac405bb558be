"""CausalLM: embedding, decoder blocks, final norm and head, composed from configs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ligermodels.convert.origin import Keep, Origin
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import KVCache, generate
from ligermodels.layers import (
    IGNORE_INDEX,
    Block,
    BlockConfig,
    Context,
    Embedding,
    HeadConfig,
    LMHead,
    MoE,
    MoEConfig,
    NormConfig,
    RMSNorm,
    RotaryEmbedding,
    TargetRows,
    load_balancing_loss,
    shift_labels,
)
from ligermodels.layers.head import check_loss_options
from ligermodels.layers.packing import bounds_of, check_beside, check_bounds, check_token_ids, packed_positions, require
from ligermodels.layers.recompute import recomputing, watched
from ligermodels.layers.targets import take_rows

Recompute = Literal["nothing", "activations", "blocks"]


@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder as data.

    `blocks` has one entry a layer; embeddings of tokens are multiplied by `embed_scale`, rounded to their dtype, and
    whatever goes into the first block, `inputs_embeds` too, by `input_scale`;
    `router_loss` is the weight of the load-balancing loss of mixtures of experts in the whole loss;
    `initializer_range` is the standard deviation of new weights; `max_position_embeddings` the longest context the
    checkpoint was made for.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm: NormConfig
    head: HeadConfig = field(default_factory=HeadConfig)
    embed_scale: float | None = None
    input_scale: float = 1.0
    router_loss: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int | None = None


@dataclass
class CausalLMOutput:
    """`loss`: fp32 scalar, or (B, T) with reduction "none", or None without labels. `logits`: (B, T, V) or None.
    `aux_loss`: the load-balancing loss of a mixture of experts, unweighted; None without labels or without mixtures."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None


class CausalLM(nn.Module):
    """A decoder-only language model.

    `config` is the composed config. `origin` says which Hugging Face checkpoint layout the model goes back out as
    (`save_pretrained`); a model composed by hand has none until one is set.
    """

    def __init__(self, config: DecoderConfig, origin: Origin | None = None) -> None:
        super().__init__()
        self.config, self.origin = config, origin
        self._recompute: Recompute = "nothing"
        self.embed = Embedding(config.vocab_size, config.hidden_size, config.embed_scale)
        self.blocks = nn.ModuleList(Block(config.hidden_size, block, i) for i, block in enumerate(config.blocks))
        self.norm = RMSNorm(config.hidden_size, config.norm)
        self.head = LMHead(config.hidden_size, config.vocab_size, config.head)
        ropes = dict.fromkeys(block.attention.rope for block in config.blocks)
        self.ropes = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes if rope is not None)
        self._tie()
        self.reset_parameters()

    def _tie(self) -> None:
        if self.config.head.tied:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Moving between devices makes new Parameters, each module its own: tie them again.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def reset_parameters(self) -> None:
        """Fresh weights: normal(0, initializer_range), biases 0, norms 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | LMHead):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    nn.init.zeros_(bias)
            elif isinstance(module, MoE):
                module.reset_parameters(self.config.initializer_range)
            elif isinstance(module, RMSNorm):
                module.reset_parameters()

    @property
    def hf_config(self) -> dict[str, Any]:
        """The Hugging Face config this model came from, as found."""
        return self._require_origin().hf_config

    @property
    def recompute(self) -> Recompute:
        """What a backward pass computes again instead of keeping it in memory; set it to change it.

        "nothing"; "activations", what norms and gated activations give; "blocks", all but the input of each block,
        which then runs forward twice. Under torch.compile "activations" is left to the compiler.

        In bfloat16 a block of Llama-3-8B (H = 4096, I = 14336, K = V = 1024) keeps 136 KiB a token: its norms' inputs
        and results (4 H), q, k, v and what attention gives (2 H + K + V), gate, up and the gated activation (3 I). With
        "activations" these are 92 KiB, 32 % less, for 2 H + I are not kept; with "blocks" 8 KiB.
        """
        return self._recompute

    @recompute.setter
    def recompute(self, what: Recompute) -> None:
        if what not in get_args(Recompute):
            raise InputError(f"recompute: must be one of {', '.join(get_args(Recompute))}, got {what!r}")
        self._recompute = what

    def _recomputes(self, what: Recompute) -> bool:
        return (
            self._recompute == what
            and torch.is_grad_enabled()
            and not (what == "activations" and torch.compiler.is_compiling())
        )

    @property
    def device(self) -> torch.device:
        """Device of the embedding."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        return self.embed.weight.dtype

    # -- forward -------------------------------------------------------------------------------------------------------

    def hidden_states(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KVCache | None = None,
        inputs_embeds: Tensor | None = None,
        tree_mask: Tensor | None = None,
        router_logits: list[Tensor] | None = None,
        target_rows: TargetRows | None = None,
        embed_weight: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, H) after the final norm. Inputs are taken as valid: `forward` and `generate` check them.

        Args:
            input_ids: (B, T) long; or `inputs_embeds` (B, T, H) in its place.
            position_ids: (B, T) long; by default they count from the cache's length, or within each document.
            cu_seqlens: int32 (n + 1,), bounds of documents over the flattened B * T tokens.
            cache: keys and values of earlier tokens; those of the new ones are appended.
            tree_mask: bool (T, T) or (B, T, T), which new tokens a new one sees beside the cache, within `cache.rows`.
            router_logits: gets the logits (B * T, E) of each mixture's router.
            target_rows: where it leaves tokens out, the states are those of its rows alone, (1, n, H).
            embed_weight: stands for the embedding's, as `Embedding.shared` gives it.
        """
        given = {} if embed_weight is None else {"by_rows": embed_weight}
        x = self.embed(input_ids, **given) if inputs_embeds is None else inputs_embeds
        x = x if self.config.input_scale == 1.0 else x * self.config.input_scale
        batch, length = x.shape[:2]
        if cu_seqlens is not None:
            x = x.reshape(1, batch * length, -1)
            position_ids = None if position_ids is None else position_ids.reshape(1, -1)
        if position_ids is None and cu_seqlens is not None:
            position_ids = packed_positions(cu_seqlens, batch * length)
        elif position_ids is None:
            position_ids = torch.arange(length, device=x.device)[None]
            if cache is not None:
                position_ids = position_ids + (cache.length if cache.lengths is None else cache.lengths[:, None])
        tables = {rope.config: rope(position_ids, x.dtype) for rope in cast(Iterable[RotaryEmbedding], self.ropes)}
        context = Context(tables, cu_seqlens, cache, tree_mask, [] if router_logits is None else router_logits)
        whole = self._recomputes("blocks")
        with recomputing() if self._recomputes("activations") else nullcontext():
            for i, block in enumerate(self.blocks, 1):
                if target_rows is not None and i == len(self.blocks) and getattr(block, "takes_rows", False):
                    # How many there are is waited for now, with all other blocks queued.
                    context = replace(context, rows=target_rows.rows)
                x = checkpoint(block, x, context, use_reentrant=False) if whole else block(x, context)
        if cache is not None:
            cache.advance(length)
        rows = None if target_rows is None else target_rows.rows
        x = take_rows(x, rows) if context.rows is None else x
        return self.norm(x).view(batch, length, -1) if rows is None else self.norm(x)

    def document_bounds(
        self, shape: tuple[int, int], position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor | None:
        """Bounds of the packed documents that `cu_seqlens`, or positions that restart, describe; None without any.

        Raises InputError when they do not fit inputs of `shape` (B, T).
        """
        if position_ids is not None and tuple(position_ids.shape) != shape:
            raise InputError(f"position_ids: must have the inputs' shape {shape}, got {tuple(position_ids.shape)}")
        if cu_seqlens is not None:
            check_bounds(cu_seqlens, shape)
            return cu_seqlens
        return None if position_ids is None else bounds_of(position_ids)

    def check_inputs(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        labels: Tensor | None,
        loss_options: Mapping[str, Any],
    ) -> tuple[int, int]:
        """(B, T) of the inputs; InputError when they, or what comes with them, are not usable."""
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None or (inputs_embeds is not None and input_ids is not None):
            raise InputError("give either input_ids or inputs_embeds, and not both")
        if inputs_embeds is None:
            check_token_ids(inputs, self.config.vocab_size)
        elif inputs.shape[2:] != (self.config.hidden_size,):
            raise InputError(f"inputs_embeds: must be (batch, tokens, {self.config.hidden_size})")
        check_beside(inputs, labels=labels, token_weights=loss_options.get("token_weights"))
        check_loss_options(loss_options)
        return inputs.shape[0], inputs.shape[1]

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_logits: bool | None = None,
        *,
        token_weights: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **loss_options: Any,
    ) -> CausalLMOutput:
        """Logits without labels; with labels the loss, for which logits are never materialised.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            position_ids: (B, T) long. Positions that restart mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Documents neither attend to nor
                predict one another.
            inputs_embeds: (B, T, H) in place of `input_ids`.
            return_logits: by default exactly when there are no labels.
            token_weights: (B, T), a weight for each label's term in the loss.
            num_items_in_batch: divide the summed loss by this instead of the number of targets (gradient accumulation).
            loss_options: label_smoothing, z_loss, reduction, memory_budget: see `ops.linear_cross_entropy`.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.
        """
        shape = self.check_inputs(input_ids, inputs_embeds, labels, {"token_weights": token_weights, **loss_options})
        bounds = self.document_bounds(shape, position_ids, cu_seqlens)
        targets = None if labels is None else self.shift_labels(labels, 1, bounds)
        rows = None if targets is None else TargetRows(targets[None], every_token=bool(return_logits))
        router_logits: list[Tensor] = []
        embed_weight, of_head = self._tied_weight()
        hidden = self.hidden_states(
            input_ids,
            position_ids=position_ids,
            cu_seqlens=bounds,
            inputs_embeds=inputs_embeds,
            router_logits=router_logits,
            target_rows=rows,
            embed_weight=embed_weight,
        )
        output = CausalLMOutput()
        if targets is not None and rows is not None:
            if token_weights is not None:
                loss_options["token_weights"] = rows.take(shift_labels(token_weights, 1))
            if num_items_in_batch is not None:
                loss_options["reduction"] = "sum"
            num_targets = None if rows.counts is None else rows.counts[0]
            loss = self.head(hidden, rows.take(targets), num_targets=num_targets, **loss_options, **of_head)
            output.loss = rows.put_back(loss, 0.0) if loss_options.get("reduction") == "none" else loss
            if num_items_in_batch is not None:
                output.loss = output.loss / num_items_in_batch
            output.aux_loss = self.load_balancing_loss(router_logits)
            if output.aux_loss is not None and self.config.router_loss:
                output.loss = output.loss + self.config.router_loss * output.aux_loss
        if return_logits or (return_logits is None and labels is None):
            output.logits = self.head(hidden, **of_head)
        return output

    def _tied_weight(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The weight as the embedding takes it, and as an argument of the head, if they share it, are our own, and
        nobody looks on."""
        if self.head.weight is not self.embed.weight or (type(self.embed), type(self.head)) != (Embedding, LMHead):
            return None, {}
        by_rows, whole = (None, None) if watched(self.embed) or watched(self.head) else self.embed.shared()
        return by_rows, {} if whole is None else {"weight": whole}

    def shift_labels(self, labels: Tensor, ahead: int, bounds: Tensor | None) -> Tensor:
        """Targets `ahead` tokens on, checked against the vocabulary: see `layers.shift_labels`."""
        vocab = self.config.vocab_size
        require(
            (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < vocab)),
            f"labels: must lie in [0, {vocab}), or be {IGNORE_INDEX} to be ignored",
        )
        return shift_labels(labels, ahead, bounds)

    def load_balancing_loss(self, router_logits: list[Tensor]) -> Tensor | None:
        """Of the routers' logits that `hidden_states` gave, unweighted; None without mixtures of experts."""
        mixtures = [block.mlp for block in self.config.blocks if isinstance(block.mlp, MoEConfig)]
        if not mixtures:
            return None
        return load_balancing_loss(router_logits, mixtures[0].num_experts, mixtures[0].top_k)

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Labels that `forward` counts, a long scalar: summed over batches, it is their `num_items_in_batch`."""
        bounds = self.document_bounds((labels.shape[0], labels.shape[1]), position_ids, cu_seqlens)
        return (shift_labels(labels, 1, bounds) != IGNORE_INDEX).sum()

    # -- generation and export -----------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty cache for `batch_size` rows of up to `max_length` tokens."""
        heads = [(block.attention.num_kv_heads, block.attention.head_dim) for block in self.config.blocks]
        return KVCache(heads, batch_size, max_length, dtype=self.dtype, device=self.device)

    def generation_defaults(self) -> dict[str, Any]:
        """`eos_token_ids` and `pad_token_id` of the checkpoint: of its generation_config.json, else of its config.

        Whether the vocabulary has them is not asked: ids beyond it, and negative ones that mean none, occur.
        """
        if self.origin is None:
            return {}
        found = {**self.origin.hf_config, **(self.origin.generation_config or {})}
        return {"eos_token_ids": found.get("eos_token_id"), "pad_token_id": found.get("pad_token_id")}

    def generate(self, input_ids: Tensor | Sequence[Sequence[int]], max_new_tokens: int = 64, **options: Any) -> Tensor:
        """Continue each prompt, greedily unless `do_sample=True`. Options and errors: see `generation.generate`."""
        return generate(self, input_ids, max_new_tokens=max_new_tokens, **{**self.generation_defaults(), **options})

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        keep: Keep = "model",
    ) -> None:
        """Write a Hugging Face checkpoint: safetensors, config.json, tokenizer and generation files.

        With `keep` "all" it is the checkpoint that the model was loaded from, with the weights of the model in it and
        the others (a vision tower's) as they were; that must be where it was.

        Raises:
            ConfigError: the model was composed by hand and has no `origin`.
            CheckpointError: the folder is in use, or the disk is full; nothing is left half-written. Or the checkpoint
                that `keep` refers to is not there.
        """
        state = dict(self.named_parameters())
        self._require_origin().save(folder, state, max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)

    def _require_origin(self) -> Origin:
        if self.origin is None:
            raise ConfigError(
                "this model was composed by hand: set model.origin (hf_config and weight map) to export it"
            )
        return self.origin
