"""A base model with a draft head that proposes a block of tokens at once: what DFlash and DSpark share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arguments import check_number
from ligermodels.errors import InputError
from ligermodels.layers import IGNORE_INDEX, KeysValues
from ligermodels.layers.lm_head import check_loss_options
from ligermodels.layers.packing import check_plain, packed_positions
from ligermodels.layers.targets import per_item, shift_labels
from ligermodels.layers.tokens import token_layout
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch, prepare_batch
from ligermodels.ops import block_context_attention
from ligermodels.speculative.block_anchors import Blocks, sample_blocks
from ligermodels.speculative.block_drafter import BlockDrafter
from ligermodels.speculative.block_head import BlockDraftConfig, BlockHead, Drafted
from ligermodels.speculative.block_loss import BlockLosses, SlotLoss
from ligermodels.speculative.block_training import BlockTraining
from ligermodels.speculative.draft_head import DraftHeadModel, check_draft_options
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.output import MultiHeadOutput
from ligermodels.speculative.tree import DynamicTree, Tree, chain, require_fixed


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

    Attributes:
        training_options: how the head is trained.
        confidence_threshold: of DSpark: in a step the model checks drafts while the product of the confidences up to
            them is at least this, for some sequence of the batch. 0, the default, for all drafts.
    """

    confidence_threshold: float = 0.0

    from_anchor: ClassVar[bool]
    """`BlockDraftConfig.sample_from_anchor` of these heads."""
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
        super().__init__()
        check_native(base, "base")
        if config.sample_from_anchor != self.from_anchor:
            raise InputError(f"sample_from_anchor: must be {self.from_anchor} for {self.kind}")
        if wrong := training.keys() - {field.name for field in fields(BlockTraining)}:
            raise InputError(f"{min(wrong)}: no such argument")
        self.base, self.config = base, config
        self.training_options = BlockTraining(**{**self.training_defaults, **training})
        how = self.training_options
        if not (how.ce_weight or how.divergence_weight or (config.enable_confidence_head and how.confidence_weight)):
            raise InputError("ce_weight, divergence_weight: both are 0, so nothing trains the head; give one above 0")
        self.vocabulary = DraftVocabulary.whole(base.config.vocab_size) if vocabulary is None else vocabulary
        self.num_heads, self.embed, self.lm_head = config.num_drafts, None, None
        self._check_config()
        self.head = self._build(BlockHead, self.kind)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head. Its lm_head is never trained."""
        yield from self.head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """The weights of the slots in the loss, (K,); with D-PACE ones."""
        return self.training_options.slot_weights(self.num_heads)

    # -- loss ----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **loss_options: Any,
    ) -> MultiHeadOutput:
        """The loss of the slots of sampled blocks; without labels, the logits of a block from every token.

        The anchors are tokens whose label, and whose next token's label, is not -100. A block is trained up to the
        first token without a label. The loss is the mean over the slots, with the weights of `loss_weights`. Anchors
        of a sequence depend on its labels and `seed` alone: they are the same in every pass over it.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids`; -100 is ignored.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.
            position_ids: (B, T) long. Positions that restart mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1).
            inputs_embeds: (B, T, H) in place of `input_ids`, for the base model. The blocks' tokens are then the
                labels.
            num_items_in_batch: the number of targets of each slot in all micro-batches, (K,), in place of this batch's:
                see `num_targets`. One number stands for all slots.
            loss_options: token_weights (B, T), reduction ("mean" or "sum"), memory_budget in bytes.

        Returns:
            With labels, the loss, and for each slot its loss, acceptance and agreement, given that the slots before it
            are accepted; without gradients also ranks. Without labels, the logits (K, B, T, draft vocabulary).

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, or another option.
        """
        check_draft_options(loss_options)
        check_loss_options({"num_items_in_batch": num_items_in_batch, **loss_options}, labels, of_heads=True)
        if labels is None and input_ids is None:
            raise InputError("input_ids: are needed where there are no labels")
        batch = prepare_batch(
            self.base,
            range(1, 1 + self.num_heads),
            input_ids=input_ids,
            labels=labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds,
            token_weights=loss_options.get("token_weights"),
            every_token=True,
        )
        if labels is None:
            return self._logits(batch)
        own = batch.layout.packing.take(labels, IGNORE_INDEX).flatten()
        row, options = self._row(batch, own), self.training_options
        following = cast(Any, batch.targets).values
        blocks = sample_blocks(labels, following, batch.layout.packing, options.num_anchors, options.seed)
        weights = loss_options.pop("token_weights", None)
        if weights is not None:
            weights = blocks.after(batch.layout.packing.take(weights).flatten(), 1)
        return self._loss(row, blocks, weights, num_items_in_batch, **loss_options)

    def _row(self, batch: PreparedBatch, own: Tensor | None) -> _Row:
        """The batch as one row, with the states of the base model. `own`: its labels (T,), in place of its ids."""
        inputs = batch.inputs
        with torch.no_grad():
            out = self.base(**inputs, return_hidden_states=self.config.boundaries)
        states = torch.cat(cast("tuple[Tensor, ...]", out.hidden_states), dim=-1).flatten(0, 1)[None]
        last, ids, bounds = cast(Tensor, out.last_hidden_state), inputs["input_ids"], inputs["cu_seqlens"]
        rows, length = last.shape[:2]
        if bounds is None and rows > 1:
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=last.device)
        positions = inputs["position_ids"]
        if positions is None:
            count = rows * length
            counted = torch.arange(count, device=last.device)[None]
            positions = counted if bounds is None else packed_positions(bounds, count)
        ids = cast(Tensor, own).clamp(min=0) if ids is None else ids.flatten()
        return _Row(states, last.flatten(0, 1), ids, positions.flatten(), bounds)

    def _drafted(self, row: _Row, blocks: Blocks) -> Drafted:
        """Run the head over blocks, with the text's tokens as the ones before each slot."""
        anchors, size = blocks.anchors, self.config.block_size
        mask = torch.full((1, 1), self.config.mask_token_id, device=anchors.device)
        with torch.no_grad():
            roots, masks = self.embeddings(row.ids[anchors][:, None]), self.embeddings(mask)
        embeds = torch.cat([roots, masks.expand(len(anchors), size - 1, -1)], dim=1)
        positions = row.positions[anchors][:, None] + torch.arange(size, device=anchors.device)
        contexts: list[KeysValues] = self.head.context(row.states, row.positions[None])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            bounds, starts = row.cu_seqlens, anchors[None]
            out = block_context_attention(q[None], k[None], v[None], *contexts[layer], starts, cu_seqlens=bounds)
            return out[0]

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
        row: _Row,
        blocks: Blocks,
        token_weights: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        *,
        reduction: str = "mean",
        memory_budget: int = 2**30,
    ) -> MultiHeadOutput:
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction: must be 'mean' or 'sum' for heads, got {reduction!r}")
        options, drafted = self.training_options, self._drafted(row, blocks)
        mask, wide = blocks.targets != IGNORE_INDEX, torch.promote_types(row.last.dtype, torch.float32)
        factors = mask.to(wide) if token_weights is None else mask * token_weights.to(wide)
        slots = self.loss_weights()
        weights = torch.stack([column * weight for column, weight in zip(factors.unbind(1), slots, strict=True)], dim=1)
        code_weight = None if self.head.markov is None else self.head.markov.w2.weight
        found = self.projection.block_losses(
            blocks.after(row.last),
            drafted.hidden,
            drafted.codes,
            code_weight,
            blocks.targets,
            weights,
            SlotLoss(
                options.ce_weight, options.divergence, options.divergence_weight, options.dpace_alpha, memory_budget
            ),
        )
        total, confidence = found.total, None
        if drafted.confidence is not None:
            wrong = F.binary_cross_entropy_with_logits(drafted.confidence.to(wide), found.overlap, reduction="none")
            confidence = (wrong * found.weights).sum()
            total = total + options.confidence_weight * confidence
        counts, items = factors.sum(0), None
        if num_items_in_batch is not None:
            items = torch.as_tensor(num_items_in_batch, device=counts.device).flatten()
            if len(items) not in (1, self.num_heads):
                raise InputError(f"num_items_in_batch: must be 1 or {self.num_heads} numbers, got {len(items)}")
            items = items.expand(self.num_heads).to(wide)
        numbers = counts if items is None else items
        whole = torch.stack([number * weight for number, weight in zip(numbers.unbind(), slots, strict=True)]).sum()
        losses = (found.losses * factors).sum(0)
        if reduction == "mean" or items is not None:
            total, losses = per_item(total, whole), losses / numbers.masked_fill(numbers == 0, 1)
            confidence = None if confidence is None else per_item(confidence.detach(), whole)
        fields: dict[str, Any] = {
            "loss": total,
            "head_losses": losses,
            "confidence_loss": confidence,
            "counts": blocks.counts,
        }
        fields |= _accepted(found, mask)
        if torch.is_grad_enabled():
            return MultiHeadOutput(**fields)
        del fields["counts"]
        return MultiHeadOutput.of_ranks(found.ranks.T[:, None], **fields)

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        first: int = 2,
    ) -> Tensor:
        """Count the targets of each slot, of the blocks that `forward` samples for these labels.

        Args:
            labels: (B, T) long, -100 where ignored.
            position_ids: (B, T) long. Positions that restart mark packed documents.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row.
            attention_mask: (B, T), 1 on tokens and 0 on padding.
            first: not used.

        Returns:
            Long (K,).

        Raises:
            InputError: a tensor of a wrong dtype or shape.
        """
        check_plain("labels", labels, torch.int64)
        if labels.ndim != 2:
            raise InputError(f"labels: must be (batch, tokens), got shape {tuple(labels.shape)}")
        shape = (labels.shape[0], labels.shape[1])
        layout = token_layout(shape, attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
        rows, ahead = layout.packing.take(labels, IGNORE_INDEX), range(1, 1 + self.num_heads)
        following = torch.stack([shift_labels(rows, each, layout.cu_seqlens) for each in ahead])
        options = self.training_options
        return sample_blocks(labels, following, layout.packing, options.num_anchors, options.seed).counts

    # -- decoding ------------------------------------------------------------------------------------------------------

    def default_tree(self) -> Tree:
        """A chain of the K tokens of a block."""
        return chain(self.num_heads)

    def drafter(self, tree: Tree | DynamicTree) -> BlockDrafter:
        """A drafter that runs the head once per step."""
        require_fixed(tree, self.kind)
        project = cast("Callable[[Tensor], Tensor] | None", self.lm_head)
        if project is None:  # the rows are taken once
            project = partial(F.linear, weight=self.projection.rows(self.head.dtype))
        threshold = check_number("confidence_threshold", self.confidence_threshold)
        if threshold and self.head.confidence is None:
            raise InputError("confidence_threshold: this head has no confidence head; leave it 0")
        return BlockDrafter(self.head, self.embeddings, project, self.vocabulary.ids, threshold)


def _accepted(found: BlockLosses, mask: Tensor) -> dict[str, Any]:
    """Acceptance and agreement of each slot, (K,), given that the slots before it are accepted; and their numbers."""
    shares, trials = dict[str, Tensor](), dict[str, Tensor]()
    for name, accepted in (("acceptance", found.acceptance), ("agreement", found.agreement.to(found.acceptance))):
        reached = F.pad(accepted.cumprod(1)[:, :-1], (1, 0), value=1.0) * mask
        trials[name] = reached.sum(0)
        shares[name] = (reached * accepted).sum(0) / trials[name].clamp(min=1e-9)
    return {**shares, "trials": trials}
