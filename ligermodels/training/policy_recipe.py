"""Settings of objectives that sample completions and learn from their rewards, under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from ligermodels.arguments import Condition
from ligermodels.errors import ConfigError
from ligermodels.training.settings import ImportPaths, Numbers

LOSS_SETTINGS = ("beta", "use_bias_correction_kl", "epsilon", "epsilon_high", "delta", "importance_sampling_level")
"""Settings that are arguments of `grpo_loss`, beside `loss_type`."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Settings that are arguments of `generate`."""
POLICY = (
    "reward", "reward_weights", "scale_rewards", "num_generations", "max_completion_length",
    "mask_truncated_completions", "num_iterations", "loss_type", *LOSS_SETTINGS, *SAMPLING,
    "sampling_quantize", "importance_sampling_clip_max",
)  # fmt: skip
"""Settings of the objective grpo."""


class PolicySettings(BaseModel):
    """Settings of the objective grpo."""

    reward: ImportPaths = Field((), description="grpo: functions that rate completions, MODULE:FUNCTION.")
    reward_weights: Numbers = Field((), description="grpo: weight of each reward.  [default: 1]")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="grpo: divide advantages by the standard deviation of a prompt's rewards, of all, or not."
    )
    num_generations: int = Field(8, ge=2, le=65536, description="grpo: completions of each prompt.")
    max_completion_length: int = Field(512, ge=1, description="grpo: most tokens of a completion.")
    mask_truncated_completions: bool = Field(
        False, description="grpo: leave completions without an end out of the loss."
    )
    num_iterations: int = Field(1, ge=1, le=65536, description="grpo: optimizer steps on each batch of completions.")
    use_bias_correction_kl: bool = Field(
        True, description="grpo: multiply the KL to the reference by the ratio, so that its gradient is unbiased."
    )
    epsilon: float | None = Field(None, gt=0, description="grpo: lower clip range of ratios.  [default: 0.2]")
    epsilon_high: float | None = Field(None, gt=0, description="grpo: upper clip range.  [default: epsilon]")
    delta: float | None = Field(None, gt=0, description="grpo: upper bound of ratios.  [default: none]")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="grpo: ratios of tokens, or of sequences (GSPO)."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="grpo: sample from the tokens with this total probability.")
    top_k: int = Field(0, ge=0, description="grpo: sample from this many tokens; 0: from all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="grpo: drop tokens below this share of the highest probability.  [default: none]"
    )
    sampling_quantize: Literal["int4", "float8"] | None = Field(
        None,
        description="grpo: sample from a copy of the weights in 4 or 8 bits, made anew after each update.  [default: "
        "from the trained weights]",
    )
    importance_sampling_clip_max: float = Field(
        3.0,
        gt=0,
        description="grpo, sampling_quantize: upper bound of the importance weights of tokens (truncated importance "
        "sampling).",
    )


POLICY_CONDITIONS: tuple[Condition, ...] = (
    (
        ("sampling_quantize",),
        lambda settings: settings.get("quantize") is None,
        "is for plain weights, and `quantize` keeps them quantised: completions are sampled from these",
    ),
    (
        ("importance_sampling_clip_max",),
        lambda settings: settings["sampling_quantize"] is not None,
        "is for samples of quantised weights; give sampling_quantize too",
    ),
    (("use_bias_correction_kl",), lambda settings: bool(settings["beta"]), "is for the KL to a reference; give beta"),
)


def check_policy(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if settings of the objective grpo contradict one another."""
    length, seq_len = settings["max_completion_length"], settings["seq_len"]
    if length >= seq_len:
        raise ConfigError(
            f"max_completion_length: is {length:,}, which leaves no room for a prompt within seq_len ({seq_len:,} "
            "tokens of a prompt with a completion); lower it, or raise seq_len"
        )
    if not settings["reward"]:
        raise ConfigError("reward: the objective grpo needs a function that rates completions; give module:function")
    rewards, weights = len(settings["reward"]), len(settings["reward_weights"])
    if weights not in (0, rewards):
        raise ConfigError(f"reward_weights: has {weights} numbers for {rewards} reward")
    if len(settings["loss_type"]) > 1:
        raise ConfigError(f"loss_type: the objective grpo has one, got {', '.join(settings['loss_type'])}")
    if settings["cuda_graph"] == "on":
        raise ConfigError(
            "cuda_graph: steps of the objective grpo are not recorded, because completions have other lengths in each; "
            "sampling has a graph of its own; leave it out"
        )
