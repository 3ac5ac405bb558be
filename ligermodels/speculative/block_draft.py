"""A base model with a draft head that proposes a block of tokens at once: what DFlash and DSpark share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arguments import (
    BLOCK_LOSS,
    CONFIDENCE,
    MARKOV,
    MOST_HEADS,
    check_count,
    check_effect,
    check_names,
    check_number,
    parameter_names,
)
from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX, KeysValues
from ligermodels.layers.packing import packed_positions
from ligermodels.layers.tokens import Tokens
from ligermodels.losses.sequences import per_item
from ligermodels.models.capture import boundaries_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.inputs import check_boundaries
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.ops import block_context_attention
from ligermodels.ops.attention.block_context import context_starts
from ligermodels.ops.loss.token_losses import check_mean_weights
from ligermodels.speculative import block_formats as formats
from ligermodels.speculative.block_drafter import BlockDrafter
from ligermodels.speculative.block_head import KINDS, BlockDraftConfig, BlockHead, Drafted
from ligermodels.speculative.block_loss import BlockLosses, SlotLoss
from ligermodels.speculative.block_training import Blocks, BlockTraining, default_layer_ids, sample_blocks, shifted
from ligermodels.speculative.draft_head import DraftHeadModel
from ligermodels.speculative.draft_layer import check_layers, layer_like
from ligermodels.speculative.draft_projection import own_lm_head, repeats_rows
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.output import ACCEPTED, MultiHeadOutput
from ligermodels.speculative.tree import DynamicTree, Tree, require_candidates, require_fixed

Model = TypeVar("Model", bound="BlockDraftModel")

NUM_LAYERS = 5
"""Default number of layers of a head."""


class _Row(NamedTuple):
    """A batch as one packed row of T tokens.

    states: (1, T, n H) at the boundaries. last: (T, H), after the final norm. ids: long (T,). positions: long (T,).
    cu_seqlens: int32, bounds of documents, or None.
    """

    states: Tensor
    last: Tensor
    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None


class BlockDraftModel(DraftHeadModel):
    """A base model with a `BlockHead`. From the last verified token, the anchor, at position a, it proposes the K
    tokens after it at once. Draft k (from 0) is token a + 1 + k.

    The loss is of the slots of sampled blocks. The anchors are tokens whose label, and whose next token's label, is not
    -100. A block is trained up to the first token without a label. The loss is the mean over the slots, with the
    weights of `loss_weights`. Anchors of a sequence depend on its labels and `seed` alone: they are the same in every
    pass over it. Acceptance and agreement of a slot are given that the slots before it are accepted.

    Attributes:
        training_options: how the head is trained.
        confidence_threshold: of DSpark: a step accepts drafts of a sequence only while the product of the confidences
            up to them is at least this, from 0 to 1. 0, the default, for all drafts.
    """

    reads_every_token, first_ahead = True, 1
    loss_options = (*DraftHeadModel.loss_options, "num_anchors")
    every_token: ClassVar[Mapping[str, Any]] = {"num_anchors": 2**31 - 1}
    formats: ClassVar[ModuleType] = formats
    training_names = tuple(field.name for field in fields(BlockTraining))
    confidence_threshold: float = 0.0

    from_anchor: ClassVar[bool]
    """`BlockDraftConfig.sample_from_anchor` of these heads."""
    block_size: ClassVar[int]
    """Slots of a block by default."""
    head_defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments of `from_base` that describe the network of these heads alone, and their defaults."""
    training_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of `BlockTraining` that differ."""

    def __init__(
        self, base: CausalLM, config: BlockDraftConfig, vocabulary: DraftVocabulary | None = None, **training: Any
    ) -> None:
        """A head with random weights on `base`. `from_base` and `from_pretrained` also freeze the base model.

        Args:
            base: the base model.
            config: the head's config.
            vocabulary: the tokens that the head can propose; None for all.
            training: fields of `BlockTraining`.

        Raises:
            InputError: an argument is out of range, or the config does not fit the base model.
        """
        if config.sample_from_anchor != self.from_anchor:
            raise InputError(f"sample_from_anchor: must be {self.from_anchor} for {self.kind}")
        check_names(type(self).__name__, training, (*parameter_names(BlockDraftModel.__init__), *self.training_names))
        how, defaults = self._training(training), self._training({})
        check_effect(
            (*BLOCK_LOSS, *CONFIDENCE), {**asdict(how), "confidence": config.enable_confidence_head}, asdict(defaults)
        )
        if not (how.ce_weight or how.divergence_weight or (config.enable_confidence_head and how.confidence_weight)):
            raise InputError("ce_weight, divergence_weight: both are 0, so nothing trains the head; give one above 0")
        super().__init__(base, config, vocabulary, BlockHead)
        self.training_options, self.num_heads = how, config.num_drafts

    @classmethod
    def from_base(
        cls: type[Model],
        base: CausalLM,
        block_size: int | None = None,
        *,
        num_layers: int | None = None,
        boundaries: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        vocabulary: DraftVocabulary | None = None,
        layers: Mapping[str, Any] | None = None,
        causal: bool | None = None,
        **options: Any,
    ) -> Model:
        """A new head on `base`, and freeze the base model's parameters.

        Args:
            base: the base model.
            block_size: B, slots of a block, the anchor's included. DFlash proposes B - 1 tokens, by default 15; DSpark
                proposes B tokens, by default 7.
            num_layers: layers of the head, by default 5; not beside `layers`, which have their own number.
            boundaries: the states that the head reads: L is the residual stream after L layers. By default one for each
                layer of the head, spread over the model: see `default_layer_ids`.
            mask_token_id: token of the slots after the anchor, one that texts do not have. Default: the last id.
            vocabulary: the tokens that the head can propose; None for all.
            layers: Hugging Face config of a Qwen3 model with the head's layers, which may have sliding windows
                (`layer_types`, `sliding_window`, `use_sliding_window`); or of Gemma 4's text model, with layers of full
                attention. Default: Qwen3's kind, with the sizes of the base model's layers.
            causal: whether slots see no later slot of their block, in all layers. Default: in layers with a sliding
                window, as in published heads.
            options: fields of `BlockTraining`, such as num_anchors, gamma and ce_weight. DSpark: also `markov_rank`,
                rank of the Markov head, by default 256, 0 for none; `markov_head_type`, "vanilla" (default), "gated" or
                "rnn": see `MarkovHead`; `confidence`, whether there is a confidence head, by default True; and
                `confidence_with_markov`, whether it reads the Markov head's embeddings, by default True.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, has no effect beside the others, or does not fit the base model,
                which is then not frozen.
            ConfigError: the layers' config has a bad value.

        Examples:
            >>> dspark = lm.DSparkModel.from_base(model, block_size=7, num_layers=2)
            >>> dspark(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
        """
        check_native(base, "base")
        names = (*parameter_names(BlockDraftModel.from_base), *cls.head_defaults, *cls.training_names)
        check_names(f"{cls.__name__}.from_base", options, names)
        target, network = base.config, dict(cls.head_defaults)
        network |= {name: options.pop(name) for name in network if name in options}
        if cls.head_defaults:
            check_effect(MARKOV, network, cls.head_defaults)
        if layers is None:
            count = NUM_LAYERS if num_layers is None else num_layers
            layers = layer_like(target, "qwen3", check_count("num_layers", count, most=MOST_HEADS))
        elif num_layers is not None:
            raise InputError("num_layers: has no effect beside layers, whose num_hidden_layers counts; leave it out")
        check_layers("layers", layers, KINDS)
        if boundaries is None:
            count = len(family_of(layers).decoder_config(layers).blocks)
            boundaries = boundaries_of(default_layer_ids(count, len(target.blocks)))
        else:
            boundaries = check_boundaries("boundaries", boundaries, len(target.blocks))
        config = BlockDraftConfig(
            layers=layers,
            boundaries=tuple(boundaries),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
            block_size=cls.block_size if block_size is None else block_size,
            mask_token_id=target.vocab_size - 1 if mask_token_id is None else mask_token_id,
            sample_from_anchor=cls.from_anchor,
            causal=causal,
            **cls._network_fields(**network),
        )
        model = cls(base, config, vocabulary, **options)
        base.requires_grad_(False)
        return model

    @classmethod
    def _network_fields(cls, **network: Any) -> dict[str, Any]:
        """Fields of `BlockDraftConfig` from the arguments of `head_defaults`."""
        return {}

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head. Its lm_head is never trained."""
        yield from self.head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """The weights of the slots in the loss, (K,); with D-PACE ones."""
        return self.training_options.slot_weights(self.num_heads)

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _check_loss_options(self, options: Mapping[str, Any], labels: Tensor | None) -> None:
        others = dict(options)
        if others.pop("num_anchors", None) is not None and labels is None:
            raise InputError("num_anchors: is an option of a loss, which needs labels")
        super()._check_loss_options(others, labels)

    def _output(
        self,
        batch: PreparedBatch,
        labels: Tensor | None,
        num_items_in_batch: Any = None,
        num_anchors: int | None = None,
        **loss_options: Any,
    ) -> MultiHeadOutput:
        if labels is None:
            if batch.inputs["input_ids"] is None:
                raise InputError("input_ids: are needed where there are no labels")
            return self._logits(batch)
        own = batch.layout.packing.take(labels, IGNORE_INDEX).flatten()
        blocks = self._sampled(labels, cast(Any, batch.targets).values, batch.layout.packing, num_anchors)
        row = self._row(batch, own)
        weights = loss_options.pop("token_weights", None)
        if weights is not None:
            weights = blocks.after(batch.layout.packing.take(weights).flatten(), 1)
        return self._loss(batch, row, blocks, weights, num_items_in_batch, **loss_options)

    def _sampled(self, labels: Tensor, following: Tensor, packing: Tokens, num_anchors: int | None) -> Blocks:
        """The blocks of labels (B, T): see `sample_blocks`. `num_anchors`: None for that of the training options."""
        options = self.training_options
        most = options.num_anchors if num_anchors is None else check_count("num_anchors", num_anchors)
        return sample_blocks(labels, following, packing, most, options.seed)

    def _row(self, batch: PreparedBatch, own: Tensor | None) -> _Row:
        """The batch as one row, with the states of the base model. `own`: its labels (T,), in place of its ids."""
        inputs = batch.inputs
        states, last = self._captured(inputs)
        ids, bounds = inputs["input_ids"], inputs["cu_seqlens"]
        rows, length = last.shape[:2]
        if bounds is None and rows > 1:
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=last.device)
        positions = inputs["position_ids"]
        if positions is None:
            count = rows * length
            counted = torch.arange(count, device=last.device)[None]
            positions = counted if bounds is None else packed_positions(bounds, count)
        ids = cast(Tensor, own).clamp(min=0) if ids is None else ids.flatten()
        return _Row(states.flatten(0, 1)[None], last.flatten(0, 1), ids, positions.flatten(), bounds)

    def _drafted(self, row: _Row, blocks: Blocks) -> Drafted:
        """Run the head over blocks, with the text's tokens as the ones before each slot."""
        anchors, size = blocks.anchors, self.config.block_size
        mask = torch.full((1, 1), self.config.mask_token_id, device=anchors.device)
        with torch.no_grad():
            roots, masks = self.embeddings(row.ids[anchors][:, None]), self.embeddings(mask)
        embeds = torch.cat([roots, masks.expand(len(anchors), size - 1, -1)], dim=1)
        positions = row.positions[anchors][:, None] + torch.arange(size, device=anchors.device)
        contexts: list[KeysValues] = self.head.context(row.states, row.positions[None])
        starts = context_starts(anchors[None], row.cu_seqlens, len(row.ids))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = {"starts": starts, **self.config.sees(layer)}
            return block_context_attention(q[None], k[None], v[None], *contexts[layer], anchors[None], **options)[0]

        return cast(Drafted, self.head.drafted(self.head(embeds, positions, attend), blocks.after(row.ids)))

    def _logits(self, batch: PreparedBatch) -> MultiHeadOutput:
        row = self._row(batch, None)
        anchors = torch.arange(len(row.ids), device=row.ids.device)
        drafted = self._drafted(row, Blocks(anchors, anchors[:, None].expand(-1, self.num_heads)))
        logits = self.projection.logits(drafted.hidden)
        logits = logits if drafted.codes is None else logits + self.head.markov.w2(drafted.codes)
        shape = cast(Tensor, batch.inputs["input_ids"]).shape
        return MultiHeadOutput(
            logits=torch.stack([batch.layout.packing.restore(x.unflatten(0, shape)) for x in logits.unbind(1)])
        )

    def _loss(
        self,
        batch: PreparedBatch,
        row: _Row,
        blocks: Blocks,
        token_weights: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        *,
        reduction: str = "mean",
        memory_budget: int = 2**30,
    ) -> MultiHeadOutput:
        items = self._items(num_items_in_batch, reduction, self.num_heads)
        options, drafted = self.training_options, self._drafted(row, blocks)
        mask, wide = blocks.targets != IGNORE_INDEX, torch.promote_types(row.last.dtype, torch.float32)
        factors = mask.to(wide) if token_weights is None else torch.where(mask, token_weights.to(wide), 0.0)
        if token_weights is not None and reduction == "mean" and items is None:
            check_mean_weights(factors)
        slots = options.slot_weights_on(mask.device, wide, self.num_heads)
        weights = factors * slots
        code_weight = None if self.head.markov is None else self.head.markov.w2.weight
        terms = options.ce_weight, options.divergence, options.divergence_weight, options.dpace_alpha
        found = self.projection.block_losses(
            blocks.after(row.last), drafted.hidden, drafted.codes, code_weight, blocks.targets, weights,
            SlotLoss(*terms, memory_budget, self.projection.softcap),
        )  # fmt: skip
        total, confidence = found.total, None
        if drafted.confidence is not None:
            wrong = F.binary_cross_entropy_with_logits(drafted.confidence.to(wide), found.overlap, reduction="none")
            confidence = (wrong * found.weights).sum()
            total = total + options.confidence_weight * confidence
        counts = factors.sum(0)
        numbers = counts if items is None else items.to(wide)
        whole = (numbers * slots).sum()
        losses = (found.losses * factors).sum(0)
        if reduction == "mean" or items is not None:
            total, losses = per_item(total, whole), losses / numbers.masked_fill(numbers == 0, 1)
            confidence = None if confidence is None else per_item(confidence.detach(), whole)
        fields = {"loss": total, "head_losses": losses, "confidence_loss": confidence, **_accepted(found, mask)}
        if torch.is_grad_enabled():
            return MultiHeadOutput(counts=blocks.counts, **fields)
        ranks = blocks.at_anchors(found.ranks, len(row.ids)).unflatten(1, cast(Any, batch.targets).values.shape[1:])
        return MultiHeadOutput.of_ranks(torch.stack([batch.layout.packing.restore(x, -1) for x in ranks]), **fields)

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None, *, first: int = 2, num_anchors: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The numbers of targets of each slot, long (K,), of the blocks that `forward` samples. See
        `MultiHeadModel.num_targets` for labels, position_ids, cu_seqlens and attention_mask; `first` is not used;
        `num_anchors` is that of `forward`."""
        following, packing = shifted(labels, self.num_heads, (position_ids, cu_seqlens, attention_mask))
        return self._sampled(labels, following, packing, num_anchors).counts

    # -- decoding ------------------------------------------------------------------------------------------------------

    def drafter(self, tree: Tree | DynamicTree) -> BlockDrafter:
        """A drafter that runs the head once per step."""
        require_fixed(tree, self.kind)
        require_candidates(tree, self.head.config.draft_vocab_size)
        threshold = check_number("confidence_threshold", self.confidence_threshold, most=1)
        if threshold and self.head.confidence is None:
            raise InputError("confidence_threshold: this head has no confidence head; leave it 0")
        project = self.project_with(self.head.dtype)
        return BlockDrafter(self.head, self.embeddings, project, self.vocabulary.ids, threshold)

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def _training(cls, options: Mapping[str, Any]) -> BlockTraining:
        return BlockTraining(**{**cls.training_defaults, **options})

    @classmethod
    def check_training(cls, options: Mapping[str, Any]) -> None:
        """See `DraftHeadModel.check_training`."""
        cls._training(options)

    def stored_settings(self) -> dict[str, Any]:
        return {"num_anchors": self.training_options.num_anchors}

    @classmethod
    def of_file(
        cls: type[Model], base: CausalLM, config: Any, vocabulary: DraftVocabulary | None, stored: Mapping[str, Any],
        lm_head: Tensor | None, options: Mapping[str, Any],
    ) -> Model:  # fmt: skip
        """See `DraftHeadModel.of_file` for base, config, vocabulary, stored, lm_head and options. An lm_head that
        equals the base model's rows is the base model's."""
        model = cls(base, config, vocabulary, **options)
        if lm_head is not None and not repeats_rows(base, model.vocabulary, lm_head):
            model.lm_head = own_lm_head(base, model.vocabulary).requires_grad_(False)
        return model


def _accepted(found: BlockLosses, mask: Tensor) -> dict[str, Any]:
    """Acceptance and agreement of each slot, (K,), given that the slots before it are accepted; and their numbers."""
    accepted = torch.stack([found.acceptance, found.agreement.to(found.acceptance)])
    reached = F.pad(accepted.cumprod(2)[:, :, :-1], (1, 0), value=1.0) * mask
    trials = reached.sum(1)
    shares = (reached * accepted).sum(1) / trials.clamp(min=1e-9)
    return {**dict(zip(ACCEPTED, shares, strict=True)), "trials": dict(zip(ACCEPTED, trials, strict=True))}
