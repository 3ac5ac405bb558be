"""On-disk formats of Medusa heads, as data: tensor names, and the config.json that each loader expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ligermodels.convert.weight_map import WeightMap, rename
from ligermodels.errors import CheckpointError, InputError


@dataclass(frozen=True)
class HeadsShape:
    """`num_heads` heads of `num_layers` ResBlocks over `hidden_size` channels and `vocab_size` tokens."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Profile:
    """`linear` names part "weight" or "bias" of layer {layer} of head {head}; `lm_head` the projection of head {head}.

    With `shared_lm_head` the file holds one projection, under head 0's name, for all heads.
    """

    name: str
    linear: str
    lm_head: str
    shared_lm_head: bool
    config: Callable[[HeadsShape], dict[str, Any]]

    def weight_map(self, shape: HeadsShape) -> WeightMap:
        """From native names (`heads.{i}.layers.{l}.linear.weight`, `heads.{i}.lm_head.weight`) to this format's."""
        entries = [
            rename(f"heads.{i}.layers.{j}.linear.{part}", self.linear.format(head=i, layer=j, part=part))
            for i in range(shape.num_heads)
            for j in range(shape.num_layers)
            for part in ("weight", "bias")
        ]
        own = range(1 if self.shared_lm_head else shape.num_heads)
        return WeightMap(entries + [rename(f"heads.{i}.lm_head.weight", self.lm_head.format(head=i)) for i in own])

    def count(self, names: Iterable[str]) -> tuple[int, int]:
        """Heads and layers among tensor `names`: the tensors are right where a config is not."""
        pattern = re.escape(self.linear).replace(r"\{head\}", r"(\d+)").replace(r"\{layer\}", r"(\d+)")
        pattern = pattern.replace(r"\{part\}", "weight")
        found = [tuple(map(int, match.groups())) for name in names if (match := re.fullmatch(pattern, name))]
        if not found:
            raise CheckpointError(f"no Medusa heads: no tensor is named like {self.linear.format_map(_EXAMPLE)!r}")
        return max(head for head, _ in found) + 1, max(layer for _, layer in found) + 1


_EXAMPLE = {"head": 0, "layer": 0, "part": "weight"}


def _vllm(shape: HeadsShape, **extra: Any) -> dict[str, Any]:
    # The base model's config must not be merged in: vLLM renames any key that contains "num" and "heads".
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "truncated_vocab_size": None,
        "medusa_fc_bias": True,
        **extra,
    }


_BLOCKS = ("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("vllm", *_BLOCKS, shared_lm_head=False, config=_vllm),
        Profile("vllm-shared", *_BLOCKS, shared_lm_head=True, config=lambda shape: _vllm(shape, original_lm_head=True)),
    )
}


def profile_named(name: str) -> Profile:
    """The profile called `name`; InputError lists those there are."""
    if name not in PROFILES:
        raise InputError(f"Medusa profile {name!r} is unknown; there are: {', '.join(PROFILES)}")
    return PROFILES[name]
