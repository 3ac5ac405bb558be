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
from ligermodels.layers import IGNORE_INDEX, HeadConfig, HeadLoss, LMHead
from ligermodels.layers.initialization import whole_parameters
from ligermodels.layers.lm_head import loss_or_log_probs
from ligermodels.layers.quantized import dense_state
from ligermodels.layers.sharding import call_gathered, gathered, is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.loss.divergences import Divergence
from ligermodels.speculative.block_loss import BlockLosses, SlotLoss, Teacher, block_losses, capped
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.head_files import allocated

Result = TypeVar("Result")


class DraftLoss(NamedTuple):
    """The divergence of a step of a head, with its ranks without gradients.

    sums: float (3,), summed over the targets: the acceptance, the agreement (see `MultiHeadOutput`), and 1.
    """

    loss: HeadLoss
    sums: Tensor


class WholeVocabulary(NamedTuple):
    """The model's distributions over all its tokens, where a head can propose some of them.

    lse: float (...), log-sum-exp of the model's logits.
    likeliest_is_draft: bool (...), whether the head can propose the model's likeliest token.
    """

    lse: Tensor
    likeliest_is_draft: Tensor


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

    def ranks(self, normed: Tensor, targets: Tensor) -> Tensor:
        """The ranks of targets: see `DraftVocabulary.ranks`.

        Args:
            normed: states (..., H) after the head's final norm.
            targets: long (...), ids of the model's vocabulary, -100 without a target.
        """
        return self.vocabulary.ranks(targets, lambda own: self._gathered(self._ranked, normed, own))

    def _ranked(self, normed: Tensor, targets: Tensor) -> HeadLoss:
        if self.lm_head is not None:
            return cast(HeadLoss, self.lm_head(normed, targets, return_rank=True))
        return loss_or_log_probs(HeadConfig(), normed, self._rows(normed.dtype), targets, None, return_rank=True)

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
    def whole_vocabulary(self, last: Tensor, mask: Tensor, memory_budget: int = 2**30) -> WholeVocabulary | None:
        """The model's distributions over all its tokens, without materialised logits: one more product with its head.

        Args:
            last: the model's states after its final norm, (..., H).
            mask: bool (...), the tokens that count.
            memory_budget: bytes of a chunk of logits.

        Returns:
            None if the head can propose all tokens.
        """
        if self.vocabulary.is_whole:
            return None
        head, targets = self.base.head, torch.where(mask, 0, IGNORE_INDEX)

        def statistics() -> Any:
            with head.loss_weight(last.dtype) as weight:
                return ops.linear_log_probs(
                    last,
                    weight,
                    targets,
                    head.bias,
                    softcap=head.config.softcap,
                    logit_scale=head.config.logit_scale,
                    return_lse=True,
                    return_predicted=True,
                    memory_budget=memory_budget,
                )

        found = self._gathered(statistics)
        return WholeVocabulary(found.lse, self.vocabulary.own_ids(found.predicted) != IGNORE_INDEX)

    def divergence(
        self,
        teacher: Tensor,
        normed: Tensor,
        targets: Tensor,
        whole: WholeVocabulary | None = None,
        *,
        divergence: Divergence,
        reduction: str,
        num_targets: int | None = None,
        return_rank: bool = False,
        **options: Any,
    ) -> DraftLoss:
        """The divergence of the head's distribution from the model's, both over the draft vocabulary.

        Args:
            teacher: the model's states after its final norm, of the tokens before the targets, (..., H).
            normed: the head's states after its final norm, (..., H).
            targets: long (...), -100 without a target.
            whole: the model's distributions over all its tokens, for acceptance and agreement: `whole_vocabulary` of
                `teacher`.
            divergence: name of a divergence of `ops.linear_distillation`.
            reduction: "mean" or "sum".
            num_targets: number of targets, if the host knows it.
            return_rank: also compute the ranks of the targets, if no gradients are recorded.
            options: other options of `ops.linear_distillation`.

        Returns:
            The divergence, and sums for metrics.
        """
        valid = targets != IGNORE_INDEX
        options |= {"divergence": divergence, "reduction": reduction, "num_tokens": num_targets}
        options["teacher_lse"] = None if whole is None else whole.lse
        loss, accepted, agreed = self._gathered(self._distilled, teacher, normed, valid, options)
        agreed = agreed if whole is None else agreed & whole.likeliest_is_draft
        sums = torch.stack([x.sum(dtype=loss.dtype) for x in (accepted, agreed, valid)])
        ranks = self.ranks(normed, targets) if return_rank and not torch.is_grad_enabled() else None
        return DraftLoss(HeadLoss(loss=loss, ranks=ranks), sums)

    def _distilled(self, teacher: Tensor, normed: Tensor, mask: Tensor, options: dict[str, Any]) -> Any:
        """Loss, acceptance and agreement, towards the model's head, whose parameters are gathered."""
        head = self.base.head
        with self._model_rows(teacher.dtype) as weight:
            return ops.linear_distillation(
                normed,
                weight.to(normed.dtype) if self.lm_head is None else self.lm_head.weight,
                teacher,
                weight,
                mask,
                teacher_bias=self.vocabulary.rows(head.bias),
                teacher_softcap=head.config.softcap,
                teacher_logit_scale=head.config.logit_scale,
                return_acceptance=True,
                return_agreement=True,
                **options,
            )

    def block_losses(
        self,
        teacher: Tensor,
        hidden: Tensor,
        codes: Tensor | None,
        code_weight: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        options: SlotLoss,
    ) -> BlockLosses:
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
