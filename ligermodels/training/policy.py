"""A model trained by policy optimisation on sampled completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.losses.policy import LOSS_TYPES, GRPOLoss, grpo_loss
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.objective_evaluation import Metrics, ObjectiveModel, ObjectiveOutput
from ligermodels.training.policy_recipe import LOSS_SETTINGS
from ligermodels.training.preference import by_sequence
from ligermodels.training.reports import LossUnit

CLIPPED = {"low": "clip_ratio_low", "high": "clip_ratio_high", "region": "clip_ratio"}
"""Metrics "clip_ratio/NAME_mean", as TRL's -> fields of `GRPOLoss`."""


def loss_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `grpo_loss` in the settings of a recipe, by name."""
    options = {name: settings[name] for name in LOSS_SETTINGS if settings[name] is not None}
    if not settings["beta"]:
        del options["use_bias_correction_kl"]
    (options["loss_type"],) = settings["loss_type"] or ("dapo",)
    if "max_completion_length" in _used(options):
        options["max_completion_length"] = settings["max_completion_length"]
    return options


def check_loss(settings: Mapping[str, Any]) -> None:
    """Compute the loss of a completion of one token, so that a wrong setting is an error before training.

    Raises:
        InputError: a setting is out of range, or has no effect.
    """
    log_probs, mask = torch.full((1, 1), -1.0), torch.ones(1, 1, dtype=torch.bool)
    grpo_loss(log_probs, torch.ones(1), mask, ref_log_probs=log_probs, **loss_options(settings))


def _used(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options that the loss type uses; none of an unknown one, which `grpo_loss` refuses."""
    found = LOSS_TYPES.get(options["loss_type"])
    return {} if found is None else found.options


class PolicyModel(ObjectiveModel):
    """A model whose forward computes `grpo_loss` on batches of `Rollouts`.

    The loss of a completion does not depend on how a batch is divided over micro-batches, except with loss_type "bnpo",
    whose mean is over the tokens of a micro-batch, as in TRL.

    Args:
        model: the model.
        temperature: divides its logits.
        weight_max: upper bound of the weights by which truncated importance sampling corrects for a sampler with other
            weights than the model's; see `forward`.
        metric_names: names of the metrics in `sampled`.
        options: arguments of `grpo_loss`.
    """

    unrecordable = "completions have other lengths in each batch"

    def __init__(
        self,
        model: CausalLM,
        temperature: float,
        weight_max: float,
        metric_names: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(model)
        self._weight_max = weight_max
        self._sampling: dict[str, Any] = {} if temperature == 1 else {"temperature": temperature}
        self.metric_names, self._options = tuple(metric_names), dict(options)
        self._is_of_tokens = "num_items_in_batch" in _used(options)
        self.loss_unit = LossUnit(index=1) if self._is_of_tokens else LossUnit("completions", 0)

    def token_log_probs(
        self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        """Log-probabilities of the completions' tokens at the temperature.

        Args:
            input_ids: (1, n).
            labels: (1, n).
            cu_seqlens: (S + 1,).
            targets: (S, T); see `forward` for all four.

        Returns:
            Log-probabilities (S, T), 0 where there is no label; their mask, bool (S, T); and the model's output.
        """
        out = self.model.log_probs(input_ids, labels, cu_seqlens=cu_seqlens, **self._sampling)
        return *by_sequence(out.log_probs, labels, targets), out

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        targets: Tensor,
        advantages: Tensor,
        sampled: Tensor,
        old_log_probs: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        sampler_log_probs: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The loss of a batch.

        A sampler with other weights, such as quantised ones, draws tokens with other probabilities than the policy.
        Truncated importance sampling (Yao et al., 2025, https://fengyao.notion.site/off-policy-rl) corrects for it: the
        loss of each token, without the KL divergence, is multiplied by min(exp(old_log_probs - sampler_log_probs),
        `weight_max`), without a gradient. This is TRL's `vllm_importance_sampling_mode` "token_truncate".

        Args:
            input_ids: (1, n), prompts with completions in one row.
            labels: (1, n), -100 on prompts, and on completions that are left out of the loss.
            cu_seqlens: (S + 1,), bounds of the sequences.
            targets: (S, T), for each label of a sequence the position in the row of the token before it; -1 is padding.
            advantages: (S,).
            sampled: (metrics, 2), the sum and the number of terms of each metric of the sampled completions.
            old_log_probs: (S, T), of the policy that sampled. Default: the log-probabilities of this pass, so that the
                ratios are 1.
            ref_log_probs: (S, T), of the reference; needed for beta above 0.
            sampler_log_probs: (S, T), by which the sampler drew the tokens. Default: None, it has the policy's weights.
            num_items_in_batch: the sum of `num_targets` over all micro-batches. Default: of this one.
        """
        if num_items_in_batch is None:
            num_items_in_batch = self.num_targets(labels, cu_seqlens=cu_seqlens).clamp(min=1)
        log_probs, mask, out = self.token_log_probs(input_ids, labels, cu_seqlens, targets)
        old, ref = (None if x is None else x.to(log_probs.dtype) for x in (old_log_probs, ref_log_probs))
        options, share = self._options, len(advantages) / num_items_in_batch[0]
        if self._is_of_tokens:
            options = {**options, "num_items_in_batch": num_items_in_batch[1]}
        advantages, of_sampler = advantages.to(log_probs.dtype), Metrics()
        if sampler_log_probs is not None:
            sampled_as = log_probs.detach() if old is None else old
            weights, of_sampler = self._importance_weights(sampled_as, sampler_log_probs.to(log_probs.dtype), mask)
            advantages = advantages[:, None] * weights  # of each token
        result = grpo_loss(log_probs, advantages, mask, old, ref, **options)
        loss = result.loss if self._is_of_tokens else result.loss * share
        metrics = dict(zip(self.metric_names, sampled.to(log_probs.dtype).unbind(), strict=True))
        sums: Metrics = {name: (value[0], value[1]) for name, value in metrics.items()}
        by_completion = advantages.ndim == 1 and self._options.get("importance_sampling_level") == "sequence"
        clipped = mask.any(1) if by_completion else mask
        return ObjectiveOutput.of(
            self.model, loss, share, out, {**sums, **self._metrics(result, mask, clipped), **of_sampler}
        )

    def _importance_weights(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
        """The weights (S, T) of tokens that a sampler with other weights drew, and metrics by TRL's names."""
        difference = torch.where(mask, old - sampler, 0.0)
        weights, tokens = difference.exp().clamp(max=self._weight_max), mask.sum().float()
        return weights, {
            "sampling/sampling_logp_difference/mean": (difference.abs().sum(), tokens),
            "sampling/importance_sampling_ratio/mean": (torch.where(mask, weights, 0.0).sum(), tokens),
        }

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Number of completions of a batch, and of their tokens in the loss: int64 (2,).

        Args:
            labels: (1, n).
            position_ids: not used.
            cu_seqlens: (S + 1,).
            attention_mask: not used.
        """
        tokens = self.model.num_targets(labels, cu_seqlens=cu_seqlens)
        return torch.stack([torch.full_like(tokens, len(cu_seqlens) - 1), tokens])  # type: ignore[arg-type]

    def _metrics(self, result: GRPOLoss, mask: Tensor, clipped: Tensor) -> Metrics:
        """The metrics of the loss by TRL's names, as sums over the tokens of the mask, or over `clipped`, the tokens or
        completions that have a ratio."""
        count = clipped.sum().float()
        values = {f"clip_ratio/{name}_mean": (getattr(result, field), count) for name, field in CLIPPED.items()}
        values["kl"] = (result.kl, mask.sum().float())
        return {name: (mean * count, count) for name, (mean, count) in values.items() if mean is not None}
