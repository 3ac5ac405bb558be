"""From a draft head's states to its vocabulary: logits, ranks, and the divergence from the model's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.arguments import Divergence
from ligermodels.layers import IGNORE_INDEX, HeadConfig, HeadLoss, LMHead
from ligermodels.layers.initialization import whole_parameters
from ligermodels.layers.lm_head import loss_or_log_probs
from ligermodels.layers.quantized import dense_state
from ligermodels.layers.sharding import call_gathered, gathered, is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.block_loss import BlockLosses, SlotLoss, Teacher, block_losses, capped
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.head_files import allocated

Result = TypeVar("Result")


COMPARED = 2048
"""About as many tokens of a pass with gradients, evenly spaced, are compared with the model's distribution over all its
tokens, if the draft vocabulary is reduced. All 4 x 4096 tokens of Llama-3-8B would take 17 TFLOP, 3 % of a step."""


class StepsLoss(NamedTuple):
    """The divergences of K steps of a head; only `total` has gradients.

    total: scalar, the sum of weights * losses.
    losses: (B, T, K), the divergences.
    acceptance: (B, T, K), sum_v min(p, q) with p over all tokens of the model, 0 where it is not compared.
    agreement: bool (B, T, K), whether the head's likeliest token is the model's, False where it is not compared.
    compared: bool (B, T), the tokens for which acceptance and agreement are measured.
    """

    total: Tensor
    losses: Tensor
    acceptance: Tensor
    agreement: Tensor
    compared: Tensor


@dataclass(frozen=True)
class DraftProjection:
    """The projection of a draft head to its vocabulary.

    Args:
        base: the model that the head belongs to.
        vocabulary: the tokens that the head can propose.
        lm_head: the head's own projection; None for the rows of the model's.
        softcap: of the head's logits, or None.
    """

    base: CausalLM
    vocabulary: DraftVocabulary
    lm_head: LMHead | None
    softcap: float | None = None
    _taken: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)
    """The model's rows for a reduced vocabulary, by the dtype of the weight: all steps of a pass use the same copy."""

    def logits(self, normed: Tensor) -> Tensor:
        """Logits (..., V_d) of states (..., H) after the head's final norm."""
        if self.lm_head is not None:
            return capped(cast(Tensor, self.lm_head(normed)), self.softcap)
        return capped(self._gathered(lambda: F.linear(normed, self._rows(normed.dtype))), self.softcap)

    def ranks(self, normed: Tensor, targets: Tensor, memory_budget: int) -> Tensor:
        """The ranks of targets: see `DraftVocabulary.ranks`.

        Args:
            normed: states (..., H) after the head's final norm.
            targets: long (...), ids of the model's vocabulary, -100 without a target.
            memory_budget: bytes of a chunk of logits.
        """
        options: dict[str, Any] = {"return_rank": True, "memory_budget": memory_budget}
        return self.vocabulary.ranks(targets, lambda own: self._gathered(self._ranked, normed, own, options))

    def _ranked(self, normed: Tensor, targets: Tensor, options: dict[str, Any]) -> HeadLoss:
        if self.lm_head is not None:
            return cast(HeadLoss, self.lm_head(normed, targets, **options))
        return loss_or_log_probs(HeadConfig(), normed, self._rows(normed.dtype), targets, None, **options)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The weight (V_d, H) of the model's lm_head for the draft vocabulary, in a dtype, also if it is sharded."""
        copy = is_sharded(self.base.head)  # FSDP2 frees what it has gathered
        return self._gathered(lambda: self._rows(dtype).clone() if copy else self._rows(dtype))

    def _gathered(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function for which FSDP2 gathers the model's head and the head's own, each a group of its own."""
        for module in (self.base, self.base.head, self.lm_head):
            if module is not None:
                function = partial(call_gathered, module, function)
        return function(*arguments)

    def _rows(self, dtype: torch.dtype) -> Tensor:
        with self._model_rows(self.base.dtype) as rows:
            return rows.to(dtype)

    @contextmanager
    def _model_rows(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The weight (V_d, H) of the model's head for the draft vocabulary, whose parameters are gathered. A quantised
        weight is dequantised to `dtype`."""
        if dtype in self._taken:
            yield self._taken[dtype]
            return
        with self.base.head.loss_weight(dtype) as whole:
            rows = self.vocabulary.rows(whole)
            if not self.vocabulary.is_whole:
                self._taken[dtype] = rows
            yield rows

    @torch.no_grad()
    def _over_all_tokens(
        self, last: Tensor, mask: Tensor, every: int, num_tokens: int | None, memory_budget: int
    ) -> tuple[Tensor, Tensor]:
        """Of the model's distributions over all its tokens, of every `every`-th token: the log-sum-exp (B, T), infinite
        for the others; and whether the likeliest token is one that the head can propose, bool (B, T)."""
        head, chosen = self.base.head, last.flatten(0, 1)[::every]
        targets = torch.where(mask.flatten()[::every], 0, IGNORE_INDEX)

        def statistics() -> Any:
            with head.loss_weight(last.dtype) as weight:
                return ops.linear_log_probs(
                    chosen, weight, targets, head.bias, softcap=head.config.softcap,
                    logit_scale=head.config.logit_scale, return_lse=True, return_predicted=True,
                    memory_budget=memory_budget, num_targets=num_tokens if every == 1 else None,
                )  # fmt: skip

        found = self._gathered(statistics)
        lse, is_draft = found.lse.new_full((mask.numel(),), torch.inf), torch.zeros_like(mask.flatten())
        lse[::every], is_draft[::every] = found.lse, self.vocabulary.own_ids(found.predicted) != IGNORE_INDEX
        return lse.view_as(mask), is_draft.view_as(mask)

    def divergence(
        self, teacher: Tensor, normed: Tensor, mask: Tensor, weights: Tensor, divergence: Divergence,
        num_tokens: int | None, memory_budget: int,
    ) -> StepsLoss:  # fmt: skip
        """The divergences of K distributions of the head from each of the model's, over the draft vocabulary.

        Args:
            teacher: (B, T, H), the model's states after its final norm.
            normed: (B, T, K, H), the head's states after its final norm, to be compared with them.
            mask: bool (B, T, K), the states that count.
            weights: (B, T, K), their weights in the sum.
            divergence: name of a divergence of `ops.linear_distillation`.
            num_tokens: number of the model's states with which any is compared, if the host knows it.
            memory_budget: bytes of a chunk of logits.

        Returns:
            The divergences, and numbers for metrics.
        """
        head, any_mask = self.base.head, mask.any(-1)
        lse, is_draft, compared = None, torch.ones_like(any_mask), torch.ones_like(any_mask)
        if not self.vocabulary.is_whole:
            every = max(1, mask[..., 0].numel() // COMPARED) if torch.is_grad_enabled() else 1
            lse, is_draft = self._over_all_tokens(teacher, any_mask, every, num_tokens, memory_budget)
            compared = lse.isfinite()

        def distilled() -> Any:
            with self._model_rows(teacher.dtype) as weight:
                own = weight.to(normed.dtype) if self.lm_head is None else self.lm_head.weight
                return ops.linear_distillation(
                    normed, own, teacher, weight, mask, teacher_bias=self.vocabulary.rows(head.bias),
                    divergence=divergence, reduction="sum", token_weights=weights, teacher_lse=lse,
                    teacher_softcap=head.config.softcap, teacher_logit_scale=head.config.logit_scale,
                    return_acceptance=True, return_agreement=True, return_losses=True, memory_budget=memory_budget,
                    num_tokens=num_tokens,
                )  # fmt: skip

        total, acceptance, agreement, losses = self._gathered(distilled)
        return StepsLoss(total, losses, acceptance, agreement & is_draft[..., None], compared)

    @torch.compiler.disable(
        reason="the loss computes its gradients in place, chunk by chunk; compile without fullgraph"
    )
    def block_losses(
        self, teacher: Tensor, hidden: Tensor, codes: Tensor | None, code_weight: Tensor | None, targets: Tensor,
        weights: Tensor, options: SlotLoss,
    ) -> BlockLosses:  # fmt: skip
        """The losses of the slots of N blocks, towards the text and the model's head.

        Args:
            teacher: (N, K, H), the model's states after its final norm, of the tokens before the targets.
            hidden: (N, K, H), the head's states after its final norm.
            codes: (N, K, r), of the Markov head, or None.
            code_weight: (V_d, r), of the Markov head, or None.
            targets: long (N, K), ids of the model's vocabulary, -100 without a target.
            weights: (N, K), the weights of the slots.
            options: how the losses are made.
        """

        head, vocabulary = self.base.head, self.vocabulary

        def losses() -> BlockLosses:
            with head.loss_weight(teacher.dtype) as whole:
                own = vocabulary.rows(whole).to(hidden.dtype) if self.lm_head is None else self.lm_head.weight
                tokens = None if vocabulary.is_whole else vocabulary.ids(torch.arange(len(own), device=hidden.device))
                truth = Teacher(teacher, whole, head.bias, head.config.softcap, head.config.logit_scale, tokens)
                own_targets, mask = vocabulary.own_ids(targets), targets != IGNORE_INDEX
                return block_losses(hidden, own, codes, code_weight, truth, own_targets, mask, weights, options)

        return self._gathered(losses)


def own_lm_head(base: CausalLM, vocabulary: DraftVocabulary) -> LMHead:
    """A head's own lm_head, with the rows of the model's lm_head for the draft vocabulary."""
    new = partial(LMHead, base.config.hidden_size, len(vocabulary), HeadConfig())
    lm_head: LMHead = allocated(new, base.dtype, base.device)
    copy_rows(base, vocabulary, lm_head)
    return lm_head


def repeats_rows(base: CausalLM, vocabulary: DraftVocabulary, lm_head: Tensor) -> bool:
    """Whether a stored lm_head (V_d, H) equals the rows of the model's lm_head for the draft vocabulary, in its dtype.
    True for a model on the meta device, which has no values."""
    if base.device.type == "meta":
        return True
    rows = DraftProjection(base, vocabulary, None).rows(base.dtype)
    return lm_head.shape == rows.shape and torch.equal(lm_head.to(rows), rows)


@torch.no_grad()
def copy_rows(base: CausalLM, vocabulary: DraftVocabulary, lm_head: LMHead) -> None:
    """Copy the rows of the model's lm_head for the draft vocabulary into `lm_head`, also if the two are sharded.

    Args:
        base: the base model.
        vocabulary: the draft vocabulary, of V_d tokens.
        lm_head: (V_d, H), gets the rows.
    """
    rows = vocabulary.rows(gathered(dense_state(base.head, base.dtype)["weight"]))
    with whole_parameters(lm_head, ["weight"]):
        lm_head.weight.copy_(rows)
