"""Completions sampled from the model that is trained, their rewards and advantages, and batches of them."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.convert.ranks import Ranks
from ligermodels.data.batches import Batch, on_device
from ligermodels.data.encoding import Tokens
from ligermodels.data.examples import pack_sequences
from ligermodels.data.packing import Prefetcher
from ligermodels.data.prompt_batches import PromptBatch
from ligermodels.generation.eval_mode import evaluating
from ligermodels.generation.generate import as_eos_ids, generate, until_eos
from ligermodels.generation.sampled_log_probs import sample_with_log_probs
from ligermodels.layers import IGNORE_INDEX
from ligermodels.losses.advantages import group_advantages, nan_std
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.policy import PolicyModel
from ligermodels.training.policy_recipe import SAMPLING
from ligermodels.training.rewards import Rewards
from ligermodels.training.sampling_model import SamplingModel


class Sample(NamedTuple):
    """A completion, as JSON types.

    name: file and line of the prompt.
    prompt, completion: token ids.
    is_ended: whether the completion ends with EOS, and was not cut.
    advantage: its advantage.
    old_log_probs, ref_log_probs, sampler_log_probs: of the completion's tokens in the loss, by the policy before its
        first step on the completion, by the reference, and by the sampler whose weights are not the policy's; empty if
        they are not used.
    """

    name: str
    prompt: list[int]
    completion: list[int]
    is_ended: bool
    advantage: float = 0.0
    old_log_probs: Sequence[float] = ()
    ref_log_probs: Sequence[float] = ()
    sampler_log_probs: Sequence[float] = ()


class Sampled(NamedTuple):
    """Sampled completions.

    samples: the completions of this rank, adjacent for each prompt.
    results: float32 (B, functions + 2), of the completions of all ranks: their rewards by each function, NaN for none,
        their lengths, and 1 for those without an end.
    """

    samples: list[Sample]
    results: Tensor


class Sampler:
    """Samples completions of prompts, and rates them. On several ranks, each has prompts of its own.

    Args:
        sampling: gives the model that samples.
        rewards: the reward functions.
        settings: settings of the objective, by name.
        seed: samples depend on it, and on the name of the batch.
        rank, size: number of this rank, and of ranks.
    """

    def __init__(
        self, sampling: SamplingModel, rewards: Rewards, settings: Mapping[str, Any], seed: int, rank: int, size: int
    ) -> None:
        self._sampling, self._rewards, self._settings, self._seed = sampling, rewards, settings, seed
        self.rank, self.size, self.ranks = rank, size, Ranks.of_group()
        given = {name: settings[name] for name in SAMPLING}
        self._options = {**given, "temperature": given["temperature"] or 1.0}

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics, TRL's."""
        each = [f"rewards/{name}/{kind}" for name in self._rewards.names for kind in ("mean", "std")]
        lengths = [f"completions/{name}" for name in ("mean_length", "min_length", "max_length", "clipped_ratio")]
        return ["reward", "reward_std", "frac_reward_zero_std", *each, *lengths]

    def __call__(self, batches: Sequence[PromptBatch], name: str) -> Sampled:
        """Sample and rate completions. All ranks call this together.

        Args:
            batches: the prompts of this rank; there may be none.
            name: name of the batch, which determines the random numbers.

        Raises:
            InputError: a reward function failed, or returned something else than rewards.
            CheckpointError: another rank failed.
        """
        documents, prompts = batches[0].documents, [prompt for batch in batches for prompt in batch.prompts]
        count = self._settings["num_generations"]
        ends = list(dict.fromkeys([*self._ends, *documents.end_ids]))
        with self._sampling() as model, self.ranks.step("sampling", ""):
            drawn = self._completions(model, [prompt.ids for prompt in prompts], ends, name) if prompts else []
        repeated, new = [prompt for prompt in prompts for _ in range(count)], [ids for ids, _ in drawn]
        samples, skips = list[Sample](), self._settings["mask_truncated_completions"]
        for prompt, (ids, log_probs) in zip(repeated, drawn, strict=True):
            is_ended = ids[-1] in ends
            known = () if skips and not is_ended else log_probs  # of tokens in the loss
            samples.append(Sample(prompt.name, prompt.ids, ids, is_ended, sampler_log_probs=known))
        given = {"completions": [documents.completion(ids) for ids in new], "completion_ids": new}
        with self.ranks.step("reward", ""):
            own = self._results(samples, given, [prompt.fields for prompt in repeated])
        by_rank = self.ranks.gather(own)
        results = torch.cat(by_rank)
        total = self._rewards.total(results[:, : len(self._rewards.functions)])
        first = sum(len(each) for each in by_rank[: self.rank])
        advantages = group_advantages(total, count, self._settings["scale_rewards"])[first : first + len(own)].tolist()
        return Sampled([sample._replace(advantage=x) for sample, x in zip(samples, advantages, strict=True)], results)

    def _completions(
        self, model: CausalLM, prompts: Sequence[list[int]], ends: Sequence[int], name: str
    ) -> list[tuple[list[int], list[float]]]:
        """The new tokens of completions of each prompt, up to an end; and the log-probabilities with which they were
        drawn, or none if the weights are the policy's."""
        generator = torch.Generator(model.device)
        generator.manual_seed(random.Random(f"{self._seed} {name}").getrandbits(63))
        length, log_probs = self._settings["max_completion_length"], None
        options = {
            "num_return_sequences": self._settings["num_generations"], "eos_token_id": list(ends) or None,
            "pad_token_id": ends[0] if ends else 0, "generator": generator, **self._options,
        }  # fmt: skip
        if self._settings["sampling_quantize"] is None:
            rows = generate(model, prompts, length, do_sample=True, **options)
        else:
            rows, log_probs = sample_with_log_probs(model, prompts, length, **options)
        new = [until_eos(row, ends) for row in rows[:, max(map(len, prompts)) :].tolist()]
        recorded = [[] for _ in new] if log_probs is None else log_probs.tolist()
        return [(ids, values[: len(ids)]) for ids, values in zip(new, recorded, strict=True)]

    def _results(
        self, samples: Sequence[Sample], completions: dict[str, list[Any]], fields: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        """The results of this rank's completions: see `Sampled`."""
        if not samples:
            return torch.empty(0, len(self._rewards.functions) + 2)
        lengths = [[float(len(sample.completion)), float(not sample.is_ended)] for sample in samples]
        ids = [list(each) for each in completions["completion_ids"]]  # the function may change them
        given = {"prompts": [each["prompt"] for each in fields], **completions, "completion_ids": ids}
        return torch.cat([self._rewards(given, fields), torch.tensor(lengths)], 1)

    @property
    def _ends(self) -> list[int]:
        return as_eos_ids(self._sampling.model.generation_defaults().get("eos_token_id"))

    def values(self, sampled: Sequence[Sampled]) -> list[float]:
        """The values of `metric_names` over all completions of all ranks, NaN for a metric of rewards that no
        completion has."""
        *by_function, lengths, cut = torch.cat([each.results for each in sampled]).T.contiguous()
        total = self._rewards.total(torch.stack(by_function).T)
        is_batch = self._settings["scale_rewards"] == "batch"
        groups = total.view(1 if is_batch else -1, len(total) if is_batch else self._settings["num_generations"])
        has_no_spread = nan_std(groups, 1).isclose(torch.zeros(())).float()
        each = chain.from_iterable((rewards.nanmean(), nan_std(rewards, 0)) for rewards in by_function)
        of_lengths = (lengths.mean(), lengths.min(), lengths.max(), cut.mean())
        return [float(x) for x in (total.nanmean(), nan_std(total, 0), has_no_spread.mean(), *each, *of_lengths)]


@dataclass(frozen=True)
class RewardEvaluation:
    """The metrics of completions that were sampled for the prompts of the validation split."""

    values: Mapping[str, float]

    def metrics(self) -> Mapping[str, float]:
        return self.values


def evaluate_rewards(sampler: Sampler, batches: Iterable[Batch]) -> RewardEvaluation:
    """Sample completions of all prompts in `batches`, each of which is a `PromptBatch`, and rate them. Every call draws
    the same random numbers, on any number of ranks with batches of the same size."""
    given = cast("Iterable[PromptBatch]", batches)
    sampled = [
        sampler([batch], f"validation {number * sampler.size + sampler.rank}") for number, batch in enumerate(given)
    ]
    values = zip(sampler.metric_names, sampler.values(sampled), strict=True)
    return RewardEvaluation({name: value for name, value in values if not math.isnan(value)})


class Rollouts:
    """Micro-batches of sampled completions, for `PolicyModel`. Each batch of prompts is sampled when its first step is
    taken, and its completions are used for `num_iterations` steps. The state can be saved and loaded, by any number of
    ranks. All ranks take batches, and save the state, together.

    Args:
        prompts: batches of this rank's prompts, one for each micro-batch.
        sampler: samples and rates completions.
        policy: the model with its objective.
        settings: settings of the objective, by name.
        micro_batches: micro-batches of an optimizer step, of this rank.
        reference: the frozen reference, or None for `policy` itself.
        as_reference: makes a context in which that model is the reference.
    """

    def __init__(
        self,
        prompts: Prefetcher,
        sampler: Sampler,
        policy: PolicyModel,
        settings: Mapping[str, Any],
        micro_batches: int,
        reference: PolicyModel | None = None,
        as_reference: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._prompts, self._sampler, self._policy, self._settings = prompts, sampler, policy, settings
        self._micro_batches, self._reference, self._as_reference = micro_batches, reference or policy, as_reference
        used = {
            "old_log_probs": settings["num_iterations"] > 1,
            "ref_log_probs": bool(settings["beta"]),
            "sampler_log_probs": settings["sampling_quantize"] is not None,
        }
        self._log_probs = [name for name, is_used in used.items() if is_used]
        self._samples, self._number, self._uses = list[Sample](), 0, 0
        self._pending = deque[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._pending:
            self._pending.extend(self._step())
        return self._pending.popleft()

    def _step(self) -> list[Batch]:
        """The micro-batches of the next optimizer step."""
        values = [math.nan] * len(self._sampler.metric_names)
        if not self._samples:
            batches = cast("list[PromptBatch]", list(islice(self._prompts, self._micro_batches)))
            rank = f" rank {self._sampler.rank}" if self._sampler.rank else ""
            sampled = self._sampler(batches, f"batch {self._number}{rank}")
            self._samples, values = sampled.samples, self._sampler.values([sampled])
            self._number, self._uses = self._number + 1, 0
            if self._settings["num_iterations"] > 1:
                self._samples = self._scored("old_log_probs", self._policy)
            if self._settings["beta"]:
                with self._as_reference(), evaluating(self._reference.model):
                    self._samples = self._scored("ref_log_probs", self._reference)
        parts = [
            self._packed(samples, self._log_probs) for samples in self._divided(self._samples, self._micro_batches)
        ]
        for part in parts:  # metrics of the samples count once
            known = torch.tensor(values, dtype=torch.float64)
            part["sampled"] = torch.stack([known.nan_to_num(nan=0.0), (~known.isnan()).double()], 1)
            values = [math.nan] * len(values)
        self._uses += 1
        if self._uses == self._settings["num_iterations"]:
            self._samples = []
        return parts

    @staticmethod
    def _divided(samples: list[Sample], parts: int) -> list[list[Sample]]:
        """The samples in this many parts of equal size, in order."""
        size = len(samples) // parts
        return [samples[i * size : (i + 1) * size] for i in range(parts)]

    def _packed(self, samples: Sequence[Sample], log_probs: Sequence[str] = ()) -> Batch:
        """A micro-batch with these fields of `Sample`."""
        skips = self._settings["mask_truncated_completions"]
        rows = [
            Tokens(
                [*sample.prompt, *sample.completion],
                [
                    *[IGNORE_INDEX] * len(sample.prompt),
                    *([IGNORE_INDEX] * len(sample.completion) if skips and not sample.is_ended else sample.completion),
                ],
            )
            for sample in samples
        ]
        packed = pack_sequences(rows)
        del packed["completion_mask"]
        packed["advantages"] = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64)
        for name in log_probs:
            given = [getattr(sample, name) for sample in samples]
            values = torch.zeros(packed["targets"].shape, dtype=torch.float64)
            values[packed["targets"] >= 0] = torch.tensor([*chain(*given)], dtype=torch.float64)
            packed[name] = values
        names = dict.fromkeys(sample.name for sample in samples)
        return Batch(packed, where=lambda: ", ".join(names))

    @torch.no_grad()
    def _scored(self, field: str, policy: PolicyModel) -> list[Sample]:
        """The samples, with log-probabilities by `policy` in `field`."""
        values: list[list[float]] = []
        for samples in self._divided(self._samples, self._micro_batches):
            part = self._packed(samples)
            row = {name: part[name] for name in ("input_ids", "labels", "cu_seqlens", "targets")}
            log_probs, mask, _ = policy.token_log_probs(**on_device(row, policy.model.device))
            values += [one[own].tolist() for one, own in zip(log_probs.double(), mask, strict=True)]
        scored: list[dict[str, Any]] = [{field: x} for x in values]
        return [sample._replace(**x) for sample, x in zip(self._samples, scored, strict=True)]

    def close(self) -> None:
        """End the thread that reads the prompts."""
        self._prompts.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts, and the samples of all ranks that further steps use, as JSON types. Called
        between steps, on all ranks."""
        by_rank = self._sampler.ranks.gather(self._divided(self._samples, self._micro_batches))
        # In the order of one process: each rank has every `size`-th micro-batch.
        samples = [list(sample) for parts in zip(*by_rank, strict=True) for part in parts for sample in part]
        rollouts = {"number": self._number, "uses": self._uses, "samples": samples}
        return {**self._prompts.state_dict(), "rollouts": rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, of any number of ranks."""
        self._prompts.load_state_dict(state)
        rollouts, rank, size = state["rollouts"], self._sampler.rank, self._sampler.size
        self._number, self._uses = rollouts["number"], rollouts["uses"]
        parts = self._divided([Sample(*each) for each in rollouts["samples"]], self._micro_batches * size)
        self._samples = [*chain(*parts[rank::size])]
