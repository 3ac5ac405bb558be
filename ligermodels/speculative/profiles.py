"""File formats of Medusa heads, as data: files, tensor names, config.json and limits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ligermodels.convert.files import SINGLE
from ligermodels.convert.mappings import rename
from ligermodels.convert.weight_map import LISTED, WeightMap
from ligermodels.errors import InputError, short
from ligermodels.models.extra_heads import MEDUSA_COUNTS, MEDUSA_PREFIX

FC_BIAS = "medusa_fc_bias"
"""Field of config.json by which vLLM reads biases of ResBlocks."""


@dataclass(frozen=True)
class HeadsShape:
    """`num_heads` heads of `num_layers` ResBlocks over `hidden_size` channels and `vocab_size` tokens."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


class Fill(Enum):
    """A value of config.json that depends on the heads: a field of `HeadsShape`, or the base model's name."""

    num_heads = "num_heads"
    num_layers = "num_layers"
    hidden_size = "hidden_size"
    vocab_size = "vocab_size"
    base_model = "base_model"


@dataclass(frozen=True)
class Profile:
    """A file format of Medusa heads.

    Args:
        name: name of the format, the `profile` of `MedusaModel.export`.
        file: name of the file with the tensors. A model's checkpoint may have shards instead.
        linear: name of a ResBlock's tensor, with the placeholders {head}, {layer} and {part}, "weight" or "bias".
        lm_head: name of a head's lm_head, with the placeholders {head} and {layers}, the number of ResBlocks.
        lm_heads: "each": every head has an lm_head. "one": all heads use the lm_head stored for head 0. "none": all
            heads use the base model's lm_head.
        config: the fields of config.json, or fields that are added to the base model's config.json.
        biases_optional: whether ResBlocks may have no biases.
        max_layers: largest number of ResBlocks per head; None for no limit.
        prefix: prefix of the heads' tensors in the base model's checkpoint; empty for heads in files of their own.
    """

    name: str
    file: str
    linear: str
    lm_head: str
    lm_heads: Literal["each", "one", "none"]
    config: Mapping[str, Any]
    biases_optional: bool = False
    max_layers: int | None = None
    prefix: str = field(default="")

    def projections(self, shape: HeadsShape) -> int:
        """Number of heads with an lm_head, counted from head 0."""
        return {"each": shape.num_heads, "one": 1, "none": 0}[self.lm_heads]

    def lm_head_names(self, shape: HeadsShape) -> list[str]:
        """Names of the lm_heads, from head 0 on."""
        return [self.lm_head.format(head=i, layers=shape.num_layers) for i in range(self.projections(shape))]

    def weight_map(self, shape: HeadsShape, *, biases: bool = True, lm_heads: bool = True) -> WeightMap:
        """The mapping from native names to names in this format.

        Native names are `heads.{i}.layers.{j}.linear.weight`, `heads.{i}.layers.{j}.linear.bias` and
        `heads.{i}.lm_head.weight`.

        Args:
            shape: numbers and sizes of the heads.
            biases: map the biases of the ResBlocks.
            lm_heads: map the lm_heads; otherwise stored lm_heads are ignored.

        Returns:
            The mapping.
        """
        projections = self.lm_head_names(shape)
        mappings = [
            rename(f"heads.{i}.layers.{j}.linear.{part}", self.linear.format(head=i, layer=j, part=part))
            for i in range(shape.num_heads)
            for j in range(shape.num_layers)
            for part in (("weight", "bias") if biases else ("weight",))
        ]
        ignored = [f"^(?!{re.escape(self.prefix)})"]
        if lm_heads:
            mappings += [rename(f"heads.{i}.lm_head.weight", name) for i, name in enumerate(projections)]
        else:
            ignored += [f"^{re.escape(name)}$" for name in projections]
        return WeightMap(mappings, ignored=ignored)

    @property
    def names_base(self) -> bool:
        """Whether config.json names the base model."""
        return Fill.base_model in self.config.values()

    def sizes(self, shape: HeadsShape) -> dict[str, int]:
        """The fields of config.json that are sizes of the heads."""
        fills = {key: value.value for key, value in self.config.items() if isinstance(value, Fill)}
        return {key: vars(shape)[name] for key, name in fills.items() if name in vars(shape)}

    def filled(self, shape: HeadsShape, base_model: str | None) -> dict[str, Any]:
        """config.json for heads of this shape; InputError if it names the base model and `base_model` is None."""
        if base_model is None and self.names_base:
            raise InputError(f"profile {self.name!r} names the base model in config.json; give base_model")
        values = {**vars(shape), Fill.base_model.value: base_model}
        return {key: values[value.value] if isinstance(value, Fill) else value for key, value in self.config.items()}

    def has_biases(self, names: Collection[str]) -> bool:
        """Whether heads with tensors `names` have biases, or the format requires biases."""
        return not self.biases_optional or any(name.endswith(".bias") and self._is_of_heads(name) for name in names)

    def count(self, names: Collection[str]) -> tuple[int, int] | None:
        """(number of heads, ResBlocks per head) according to tensor `names`; None without heads."""
        pattern = re.escape(self.linear).replace(r"\{head\}", r"(\d{1,3})").replace(r"\{layer\}", r"(\d{1,3})")
        pattern = pattern.replace(r"\{part\}", "weight")
        indices = [tuple(map(int, match.groups())) for name in names if (match := re.fullmatch(pattern, name))]
        return (max(head for head, _ in indices) + 1, max(layer for _, layer in indices) + 1) if indices else None

    def missing(self, counts: tuple[int, int], names: Collection[str]) -> list[str]:
        """The first few weights of ResBlocks that are not among `names`, where `counts` is the result of `count`."""
        pairs = itertools.product(*map(range, counts))
        weights = (self.linear.format(head=head, layer=layer, part="weight") for head, layer in pairs)
        return list(itertools.islice((weight for weight in weights if weight not in names), LISTED))

    def distance(
        self, counts: tuple[int, int], names: Collection[str], config: Mapping[str, Any]
    ) -> tuple[int, int, int]:
        """How much a file differs from this format; the format with the smallest tuple fits best.

        Args:
            counts: the result of `count`.
            names: names of the file's tensors.
            config: the file's config.json.

        Returns:
            Number of missing and superfluous tensors; number of differing fields of config.json; and minus the number
            of equal fields.
        """
        weights = self.weight_map(HeadsShape(*counts, 0, 0), biases=self.has_biases(names))
        unmatched = weights.sources() ^ {name for name in names if self._is_of_heads(name)}
        equal = sum(
            key in config and (isinstance(value, Fill) or config[key] == value) for key, value in self.config.items()
        )
        return len(unmatched), len(self.config) - equal, -equal

    def _is_of_heads(self, name: str) -> bool:
        return name.startswith(self.prefix)


# vLLM reads any key that contains "num" and "heads" (or "layers"): never merge a base model's config into it.
_VLLM: dict[str, Any] = {
    "file": SINGLE,
    "linear": "blocks.{head}.layers.{layer}.{part}",
    "lm_head": "lm_heads.{head}.weight",
    "biases_optional": True,
}
_VLLM_CONFIG: dict[str, Any] = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": Fill.hidden_size,
    "vocab_size": Fill.vocab_size,
    "num_heads": Fill.num_heads,
    "num_hidden_layers": Fill.num_layers,
    "truncated_vocab_size": None,
    FC_BIAS: True,
}
# TGI silently disables Medusa if the config has "architectures".
_NUMBERED: dict[str, Any] = {"linear": "{head}.{layer}.linear.{part}", "lm_head": "{head}.{layers}.weight"}
_COUNTS: dict[str, Any] = dict(zip(MEDUSA_COUNTS, (Fill.num_heads, Fill.num_layers), strict=True))
_NUMBERED_CONFIG: dict[str, Any] = {"base_model_name_or_path": Fill.base_model, **_COUNTS}
_SAFETENSORS, _PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("vllm", lm_heads="each", config=_VLLM_CONFIG, **_VLLM),
        Profile("vllm-shared", lm_heads="one", config={**_VLLM_CONFIG, "original_lm_head": True}, **_VLLM),
        Profile("tgi", _SAFETENSORS, lm_heads="each", config=_NUMBERED_CONFIG, **_NUMBERED),
        Profile(
            "tgi-v2",
            _SAFETENSORS,
            lm_heads="none",
            config={**_NUMBERED_CONFIG, "version": "2"},
            max_layers=1,
            **_NUMBERED,
        ),
        Profile(
            "tensorrt-llm",
            _SAFETENSORS,
            lm_heads="each",
            config={**_NUMBERED_CONFIG, "num_medusa_heads": Fill.num_heads},
            **_NUMBERED,
        ),
        Profile("fasterdecoding", _PICKLE, lm_heads="each", config=_NUMBERED_CONFIG, **_NUMBERED),
        Profile(
            "full-hf",
            SINGLE,
            linear=MEDUSA_PREFIX + "{head}.{layer}.linear.{part}",
            lm_head=MEDUSA_PREFIX + "{head}.{layers}.weight",
            lm_heads="each",
            config=_COUNTS,
            prefix=MEDUSA_PREFIX,
        ),
    )
}


def profile_named(name: str) -> Profile:
    """The profile called `name`; InputError if there is none."""
    if not isinstance(name, str) or name not in PROFILES:
        raise InputError(f"Medusa profile {short(name)} is unknown; give one of {', '.join(PROFILES)}")
    return PROFILES[name]
