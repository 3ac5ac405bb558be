"""EAGLE-3: a draft head of one layer, trained towards the model's own distributions (arXiv 2503.01840)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.arguments import MOST_HEADS, check_count
from ligermodels.errors import InputError, short
from ligermodels.layers import IGNORE_INDEX, HeadConfig, HeadLoss, KeysValues, LMHead
from ligermodels.layers.initialization import allocate, initialize, skip_init
from ligermodels.layers.lm_head import loss_or_log_probs
from ligermodels.layers.packing import packed_positions
from ligermodels.layers.quantized import dense_state
from ligermodels.layers.sharding import call_gathered, gathered
from ligermodels.models.capture import default_boundaries
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.eagle3_head import DraftStates, Eagle3Config, Eagle3Head, layer_like
from ligermodels.speculative.multi_head import MultiHeadModel, check_decay
from ligermodels.speculative.output import MultiHeadOutput
from ligermodels.speculative.step_drafter import StepDrafter
from ligermodels.speculative.tree import Tree, chain

STEPS = 7
DECAY = 0.8


class Eagle3Model(MultiHeadModel):
    """A base model with an EAGLE-3 head (`Eagle3Head`), which is applied K times.

    Step k (from 0) at position t reads token t + 1 + k and, in step 0, the model's states at t, later the result of
    step k - 1 at t. It proposes token t + 2 + k. In training the tokens come from the text, and each step is trained
    towards the model's distribution of that token ("training-time test"): see `forward`.
    """

    kind = "EAGLE-3"
    reads_every_token = True

    def __init__(
        self,
        base: CausalLM,
        config: Eagle3Config,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_steps: int = STEPS,
        decay: float = DECAY,
        divergence: str = "forward_kl",
        lm_head: Literal["own", "shared"] = "own",
    ) -> None:
        """A head with random weights on `base`. `from_base` and `from_pretrained` also freeze the base model.

        Args:
            base: the base model.
            config: the head's config.
            vocabulary: the tokens that the head can propose; None for all.
            num_steps: K, steps of training.
            decay: step k has the weight decay ** k in the loss.
            divergence: from the model's distribution: a name of `ops.linear_distillation`.
            lm_head: "own", a trained projection to the draft vocabulary; or "shared", the rows of the base model's.

        Raises:
            InputError: an argument is out of range, or the config does not fit the base model.
        """
        super().__init__()
        check_native(base, "base")
        if lm_head not in ("own", "shared"):
            raise InputError(f"lm_head: must be 'own' or 'shared', got {short(lm_head)}")
        self.base, self.config, self.divergence = base, config, divergence
        self.num_heads, self.decay = check_count("num_steps", num_steps, most=MOST_HEADS), check_decay(decay)
        self.vocabulary = DraftVocabulary.whole(base.config.vocab_size) if vocabulary is None else vocabulary
        self._check_config()
        with torch.device("meta"), skip_init():
            self.head = Eagle3Head(config)
            self.lm_head = LMHead(config.decoder.hidden_size, len(self.vocabulary), HeadConfig())
        allocate(self.head, base.dtype, base.device)
        initialize(self.head, base.config.initializer_range, "eagle3")
        if lm_head == "shared":
            self.lm_head: LMHead | None = None
        else:
            allocate(cast(nn.Module, self.lm_head), base.dtype, base.device)
            self._copy_lm_head()

    def _check_config(self) -> None:
        config, base = self.config, self.base.config
        for name, ours, theirs in (
            ("target_hidden_size", config.target_hidden_size, base.hidden_size),
            ("hidden_size", config.decoder.hidden_size, base.hidden_size),
            ("vocab_size", config.decoder.vocab_size, base.vocab_size),
            ("draft_vocab_size", config.draft_vocab_size, len(self.vocabulary)),
        ):
            if ours != theirs:
                raise InputError(f"{name}: of the head is {ours}, where the model and its draft tokens need {theirs}")
        if config.boundaries[-1] > len(base.blocks):
            raise InputError(f"boundaries: the model has {len(base.blocks)} layers, got {config.boundaries}")

    @torch.no_grad()
    def _copy_lm_head(self) -> None:
        weight = gathered(dense_state(self.base.head, self.base.dtype)["weight"])
        cast(LMHead, self.lm_head).weight.copy_(weight[self.vocabulary.tokens.to(weight.device)])

    @classmethod
    def from_base(
        cls,
        base: CausalLM,
        num_steps: int = STEPS,
        *,
        boundaries: Sequence[int] | None = None,
        vocabulary: DraftVocabulary | None = None,
        layer: Literal["llama", "qwen3"] | Mapping[str, Any] = "llama",
        decay: float = DECAY,
        divergence: str = "forward_kl",
        lm_head: Literal["own", "shared"] = "own",
        **flags: bool,
    ) -> Eagle3Model:
        """A new head on `base`, and freeze the base model's parameters.

        Args:
            base: the base model.
            num_steps: K, steps of training, and tokens proposed by default.
            boundaries: the states that the head reads: L is the residual stream after L layers. By default after 2,
                half, and all but 3 of the layers.
            vocabulary: the tokens that the head can propose, such as `DraftVocabulary.counted(...)`; None for all.
            layer: kind of the head's layer, with the sizes of the model's layers; or a Hugging Face config of a Llama
                or Qwen3 model with one layer.
            decay: step k has the weight decay ** k in the loss.
            divergence: from the model's distribution: a name of `ops.linear_distillation`.
            lm_head: "own", a trained projection to the draft vocabulary; or "shared", the rows of the base model's.
            flags: `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`: see `Eagle3Config`.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, or does not fit the base model, which is then not frozen.
            ConfigError: the layer's config has a bad value.

        Examples:
            >>> eagle = lm.Eagle3Model.from_base(model, num_steps=3)
            >>> eagle(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
        """
        check_native(base, "base")
        config = Eagle3Config(
            layer_like(base.config, layer) if isinstance(layer, str) else layer,
            default_boundaries(len(base.config.blocks)) if boundaries is None else tuple(boundaries),
            base.config.hidden_size,
            base.config.vocab_size if vocabulary is None else len(vocabulary),
            **flags,
        )
        model = cls(
            base, config, vocabulary, num_steps=num_steps, decay=decay, divergence=divergence, lm_head=lm_head
        )  # fmt: skip
        base.requires_grad_(False)
        return model

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head, and of its lm_head unless it is the base model's."""
        yield from self.head.parameters()
        if self.lm_head is not None:
            yield from self.lm_head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** k for each step."""
        return [self.decay**step for step in range(self.num_heads)]

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
        """The loss of K steps, sum_k decay^k * D_k; without labels, the logits of the draft vocabulary.

        D_k is the divergence of the head's distribution in step k at t from the model's distribution at t + 1 + k, both
        over the draft vocabulary, for each t for which the label of token t + 2 + k is not -100. Logits are never
        materialised. Without gradients, also the ranks and accuracy of the labels, as other heads give them.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); only whether they are -100 counts.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.
            position_ids: (B, T) long. Positions that restart mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1).
            inputs_embeds: (B, T, H) in place of `input_ids`.
            num_items_in_batch: divides the summed losses, in place of the numbers of targets in this batch; one
                number, or (K,), one number for each step: see `num_targets`.
            loss_options: token_weights (B, T), reduction ("mean" or "sum"), memory_budget: see
                `ops.linear_distillation`.

        Returns:
            With labels, the loss, and the losses, the acceptance and the agreement of the steps; without, the logits
            (K, B, T, draft vocabulary).

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), or shapes that do not fit.
        """
        batch = self.prepare(
            2,
            input_ids,
            labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds,
            num_items_in_batch=num_items_in_batch,
            **loss_options,
        )
        inputs, targets = batch.inputs, batch.targets
        with torch.no_grad():
            out = self.base(**inputs, return_hidden_states=self.config.boundaries)
            embeds = self._embed(inputs["input_ids"]) if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
        drafted = self._steps(torch.cat(out.hidden_states, dim=-1), embeds, inputs["position_ids"], inputs["cu_seqlens"])
        if targets is None:
            logits = [batch.layout.packing.restore(self._through_lm_head(normed)) for normed in drafted]
            return MultiHeadOutput(logits=torch.stack(logits))
        needed, sums = targets.wait_for_needed(), list[Tensor]()

        def head(step: int, hidden: Tensor, values: Tensor, **options: Any) -> HeadLoss:
            teacher = F.pad(out.last_hidden_state[:, step + 1 :], (0, 0, 0, min(step + 1, embeds.shape[1])))
            teacher = teacher if needed is None else needed.take(teacher)
            result, found = self._divergence_from(teacher, hidden, values, **options)
            sums.append(found)
            return result

        taken = (each if needed is None else needed.take(each) for each in drafted)
        output = self._heads_loss(taken, targets, head, num_items_in_batch=num_items_in_batch, **loss_options)
        accepted, agreed, output.counts = torch.stack(sums, dim=1)
        count = output.counts.clamp(min=1)
        output.acceptance, output.agreement = accepted / count, agreed / count
        return output

    def _steps(
        self, states: Tensor, embeds: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> Iterator[Tensor]:
        """The results of each step, for the lm_head.

        Args:
            states: (rows, length, n H), the model's states at the boundaries.
            embeds: (rows, length, H), embeddings of the tokens.
            position_ids: long (rows, length), or None.
            cu_seqlens: int32 (n + 1,), bounds of documents in a single row, or None.

        Returns:
            K tensors (rows, length, H).
        """
        length = embeds.shape[1]
        if position_ids is None:
            counted = torch.arange(length, device=embeds.device)[None]
            position_ids = counted if cu_seqlens is None else packed_positions(cu_seqlens, length)
        hidden, earlier = states, list[KeysValues]()
        for step in range(self.num_heads):
            # In the last step + 1 positions of a document the next token is wrong. This changes no loss: they have no
            # target, and no position with a target attends to them.
            following = F.pad(embeds[:, step + 1 :], (0, 0, 0, min(step + 1, length)))
            hidden, normed = self.head(
                following,
                hidden,
                reads_states=step == 0,
                position_ids=position_ids + step,
                cu_seqlens=cu_seqlens,
                steps=earlier,
            )
            yield normed

    def _divergence_from(
        self,
        teacher: Tensor,
        hidden: Tensor,
        targets: Tensor,
        *,
        reduction: str,
        num_targets: int | None = None,
        return_rank: bool = False,
        **options: Any,
    ) -> tuple[HeadLoss, Tensor]:
        """The loss of a step.

        Args:
            teacher: the model's states after its final norm, for the targets, (..., H).
            hidden: the head's states for its lm_head, (..., H).
            targets: long (...), -100 without a target.
            reduction: "mean" or "sum".
            num_targets: number of targets, if the host knows it.
            return_rank: the ranks of the targets, if no gradients are recorded.
            options: other options of `ops.linear_distillation`.

        Returns:
            The loss; and float (3,), summed over the targets: the acceptance, the agreement, and 1.
        """
        valid = targets != IGNORE_INDEX
        loss, acceptance, agreement = call_gathered(
            self.base, self._distilled, teacher, hidden, valid, reduction=reduction, num_tokens=num_targets, **options
        )  # fmt: skip
        ranks = None
        if return_rank and not torch.is_grad_enabled():
            ranks = self.vocabulary.ranks(targets, lambda own: self._through_lm_head(hidden, own))
        return HeadLoss(loss=loss, ranks=ranks), torch.stack([acceptance, agreement.float(), valid.float()]).flatten(1).sum(1)

    def _distilled(self, teacher: Tensor, hidden: Tensor, mask: Tensor, **options: Any) -> Any:
        """`ops.linear_distillation` towards the base model's head. The base model's parameters are gathered."""
        head = self.base.head
        with head.loss_weight(teacher.dtype) as whole:
            weight, bias = self.vocabulary.rows(whole), self.vocabulary.rows(head.bias)
            own = weight.to(hidden.dtype) if self.lm_head is None else self.lm_head.weight
            return ops.linear_distillation(
                hidden, own, teacher, weight, mask, teacher_bias=bias, divergence=self.divergence,
                teacher_softcap=head.config.softcap, teacher_logit_scale=head.config.logit_scale,
                return_acceptance=True, **options,
            )  # fmt: skip

    def _through_lm_head(self, normed: Tensor, targets: Tensor | None = None) -> Any:
        """Logits (..., V_d) of the draft vocabulary; with targets, ids of it, a `HeadLoss` with ranks."""
        if self.lm_head is not None:
            return self.lm_head(normed) if targets is None else self.lm_head(normed, targets, return_rank=True)
        return call_gathered(self.base, self._through_shared_rows, normed, targets)

    def _through_shared_rows(self, normed: Tensor, targets: Tensor | None) -> Any:
        with self.base.head.loss_weight(self.base.dtype) as whole:
            weight = self.vocabulary.rows(whole).to(normed.dtype)
        if targets is None:
            return F.linear(normed, weight)
        return loss_or_log_probs(HeadConfig(), normed, weight, targets, None, return_rank=True)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of token ids (B, T), also if FSDP2 shards the base model."""
        return cast(Tensor, call_gathered(self.base, lambda ids: self.base.decoder.embed(ids), input_ids))

    # -- decoding ------------------------------------------------------------------------------------------------------

    def default_tree(self) -> Tree:
        """A chain of `num_steps` tokens."""
        return chain(self.num_heads)

    def drafter(self, tree: Tree) -> StepDrafter:
        """A drafter that applies the head once per level of `tree`, whatever `num_steps` is."""
        head = self.head

        def lm_head(hidden: Tensor) -> Tensor:
            return cast(Tensor, self._through_lm_head(hidden if self.config.norm_output else head.norm(hidden)))

        def step(embeds: Tensor, hidden: Tensor, *, layer: int, **options: Any) -> Tensor:
            return cast(DraftStates, head(embeds, hidden, **options)).next

        return StepDrafter(
            self._embed,
            step,
            lm_head,
            lambda batch_size, max_length: head.new_state(batch_size, max_length, self.base.device),
            read=lambda states: head.reader(states.to(head.reader.fc.weight.dtype)),
            token_ids=self.vocabulary.ids,
            boundaries=self.config.boundaries,
        )
