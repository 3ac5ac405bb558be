"""On-disk formats of Medusa heads, as data: files, tensor names, config.json, and what each cannot hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ligermodels.convert.files import SINGLE
from ligermodels.convert.mappings import rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import InputError, short
from ligermodels.models.extra_heads import MEDUSA_COUNTS, MEDUSA_PREFIX


@dataclass(frozen=True)
class HeadsShape:
    """`num_heads` heads of `num_layers` ResBlocks over `hidden_size` channels and `vocab_size` tokens."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


class Fill(Enum):
    """A value of a config that depends on the heads: a field of `HeadsShape`, or the base model's name."""

    num_heads = "num_heads"
    num_layers = "num_layers"
    hidden_size = "hidden_size"
    vocab_size = "vocab_size"
    base_model = "base_model"


@dataclass(frozen=True)
class Profile:
    """One format.

    Args:
        name: what users call it.
        file: holds the tensors. A whole checkpoint may be in shards instead.
        linear: name of a ResBlock's tensor, from {head}, {layer} and {part}, "weight" or "bias".
        lm_head: name of a head's projection, from {head} and {layers}, the number of ResBlocks.
        lm_heads: "each" head has a projection; or "one", head 0's, is for all; or "none": it is the base model's.
        config: config.json, or what is added to the base model's.
        misread: a pattern; keys of config.json in which it is found mislead the loader.
        biases_optional: whether the loader takes ResBlocks without biases.
        max_layers: most ResBlocks that a head may have.
        prefix: the heads' tensors have it, and stand among those of the base model, in its checkpoint.
    """

    name: str
    file: str
    linear: str
    lm_head: str
    lm_heads: Literal["each", "one", "none"]
    config: Mapping[str, Any]
    misread: str | None = None
    biases_optional: bool = False
    max_layers: int | None = None
    prefix: str = field(default="")

    def projections(self, shape: HeadsShape) -> int:
        """How many lm_heads there are: those of the first so many heads."""
        return {"each": shape.num_heads, "one": 1, "none": 0}[self.lm_heads]

    def lm_head_names(self, shape: HeadsShape) -> list[str]:
        """Tensors that hold lm_heads, head by head."""
        return [self.lm_head.format(head=i, layers=shape.num_layers) for i in range(self.projections(shape))]

    def weight_map(self, shape: HeadsShape, *, biases: bool = True, lm_heads: bool = True) -> WeightMap:
        """From native names (`heads.{i}.layers.{j}.linear.weight`, `heads.{i}.lm_head.weight`) to this format's.

        Without `biases` or `lm_heads` it is of the rest; a file's lm_heads are then passed over.
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

    def filled(self, shape: HeadsShape, base_model: str | None) -> dict[str, Any]:
        """`config` of such heads; InputError when it needs the base model's name and there is none."""
        if base_model is None and Fill.base_model in self.config.values():
            raise InputError(f"profile {self.name!r} names the base model in config.json: give base_model")
        values = {**vars(shape), Fill.base_model.value: base_model}
        return {key: values[value.value] if isinstance(value, Fill) else value for key, value in self.config.items()}

    def has_biases(self, names: Collection[str]) -> bool:
        """Whether heads of these tensors have biases, or would have to."""
        return not self.biases_optional or any(name.endswith(".bias") and self._heads(name) for name in names)

    def count(self, names: Collection[str]) -> tuple[int, int] | None:
        """Heads and layers among tensor `names`, None where there are none. A config may be wrong about them."""
        pattern = re.escape(self.linear).replace(r"\{head\}", r"(\d{1,3})").replace(r"\{layer\}", r"(\d{1,3})")
        pattern = pattern.replace(r"\{part\}", "weight")
        found = [tuple(map(int, match.groups())) for name in names if (match := re.fullmatch(pattern, name))]
        return (max(head for head, _ in found) + 1, max(layer for _, layer in found) + 1) if found else None

    def distance(
        self, counts: tuple[int, int], names: Collection[str], config: Mapping[str, Any]
    ) -> tuple[int, int, int]:
        """How far a file of these tensors, of which `count` gives `counts`, is from this format: tensors too many or
        too few; settings that differ; and, of formats of the same tensors, the fewer settings are alike, the farther.
        """
        weights = self.weight_map(HeadsShape(*counts, 0, 0), biases=self.has_biases(names))
        odd = weights.sources() ^ {name for name in names if self._heads(name)}
        fits = (
            key in config and (isinstance(value, Fill) or config[key] == value) for key, value in self.config.items()
        )
        differing = sum(not each for each in fits)
        return len(odd), differing, differing - len(self.config)

    def faults(
        self,
        shape: HeadsShape,
        found: Mapping[str, Sequence[int]],
        config: Mapping[str, Any],
        base_model: str | None,
        planned: Mapping[str, Sequence[int]],
    ) -> list[str]:
        """What in a file, which was `found` to hold tensors of these sizes, and in its `config`, is not as the format's
        loader needs it.

        planned: name -> shape of what was to be written: of a whole checkpoint, the base model's tensors too.
        """
        odd = [name for name in {**planned, **found} if planned.get(name) != found.get(name)]
        wanted = self.filled(shape, base_model)
        faults = [f"{name} {found.get(name)} instead of {planned.get(name)}" for name in odd]
        faults += [f"config.json: {key} = {config.get(key)!r}" for key in wanted if config.get(key) != wanted[key]]
        if not self.prefix:
            faults += [f"config.json: {key} is not of the format" for key in config if key not in wanted]
        if self.misread is not None:
            faults += [f"config.json: {key} would be misread" for key in config if re.search(self.misread, key)]
        return faults

    def _heads(self, name: str) -> bool:
        return name.startswith(self.prefix)


# vLLM takes any key with "num" and "heads" (or "layers") in it for its own: never merge a base model's config in.
_VLLM: dict[str, Any] = {
    "file": SINGLE,
    "linear": "blocks.{head}.layers.{layer}.{part}",
    "lm_head": "lm_heads.{head}.weight",
    "misread": "(?=.*num)(?=.*(heads|layers))(?!num_heads$|num_hidden_layers$)",
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
    "medusa_fc_bias": True,
}
# TGI switches Medusa off silently where the config has "architectures".
_NUMBERED: dict[str, Any] = {
    "linear": "{head}.{layer}.linear.{part}",
    "lm_head": "{head}.{layers}.weight",
    "misread": "^architectures$",
}
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
    """The profile called `name`; InputError lists those there are."""
    if not isinstance(name, str) or name not in PROFILES:
        raise InputError(f"Medusa profile {short(name)} is unknown; there are: {', '.join(PROFILES)}")
    return PROFILES[name]
