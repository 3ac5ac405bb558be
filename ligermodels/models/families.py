"""Families of models and their registry by `model_type`: the package's own, plugins, and those that users register."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import cycle
from typing import Any

from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, ConfigWarning, short, warn_caller
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import require_model
from ligermodels.models.mtp_format import MTPFormat

ENDS = "decoder."
"""Prefix of the parts in a layout's `names` that are outside the layers."""


@dataclass(frozen=True)
class Family:
    """A `model_type` of config.json: how its config composes to a decoder, and how its checkpoints name tensors.

    Args:
        model_type: the `model_type` in config.json.
        decoder_config: function from config.json, a dict, to a `DecoderConfig`. It raises ConfigError for a field that
            is missing, bad or not implemented.
        layouts: for each way in which checkpoints of this type are stored, the keyword arguments of
            `DecoderConfig.weight_map`; the usual layout first. The default is one layout with Hugging Face's usual
            names.
        default_theta: rotary base of a config that names none. Or a dict: a base or settings for each layer type, or
            all rope settings of a config that has none; see `convert.config_json.rope_parameters`.
        text: for checkpoints that hold more than a language model (a vision tower): function from config.json to the
            config of the language model alone, with its own `model_type`. `save_pretrained` writes this config.
        attribute_map: field name in older checkpoints -> its name in newer checkpoints. None instead of a newer name
            means that no release of transformers reads the field for this family; exports leave it out.
        mtp: how checkpoints of this family store layers of multi-token prediction.
        architecture: class of transformers that opens the language model alone, for exports of a config that names no
            `architectures`. By default the `model_type` as the name of a class: "Qwen3MoeForCausalLM".
        module_layout: the layout with the names of transformers' modules, for families whose checkpoints have other
            names, and whose expert tensors do not show which layout has them.
        added_fields: fields of published checkpoints that servers need, though transformers does not. Exports of a
            config without them add them.

    Examples:
        >>> from ligermodels.archs import Family, register
        >>> from ligermodels.archs.llama import decoder_config
        >>> register(Family("my_llama", decoder_config))  # loads "model_type": "my_llama" as a Llama
    """

    model_type: str
    decoder_config: Callable[[Mapping[str, Any]], DecoderConfig]
    layouts: Sequence[Mapping[str, Any]] = ({},)
    default_theta: float | Mapping[str, Any] = 10_000.0
    text: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    attribute_map: Mapping[str, str | None] = field(default_factory=dict)
    mtp: MTPFormat = field(default_factory=MTPFormat)
    architecture: str | None = None
    module_layout: Mapping[str, Any] | None = None
    added_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def causal_lm(self) -> str:
        """`architecture`, or its default."""
        words = re.sub(r"_(?=\d)", "-", self.model_type.removesuffix("_text")).split("_")
        name = "".join(word[:1].upper() + word[1:] for word in words).replace("-", "_")
        return self.architecture or f"{name}ForCausalLM"

    @property
    def stacked_layouts(self) -> list[Mapping[str, Any]]:
        """The layouts with the names of transformers' modules, in which one parameter has all experts of a layer;
        published checkpoints of Granite 4 have it as the `weight` of a module."""
        if self.module_layout is not None:
            return [self.module_layout]
        named = ((layout, layout.get("names", {}).get("experts.gate_up", ".weight")) for layout in self.layouts)
        return [layout for layout, name in named if not name.endswith(".weight")]

    def layouts_for(self, stored: Collection[str] = ()) -> list[Mapping[str, Any]]:
        """The `layouts` that a checkpoint may have.

        Args:
            stored: names of the checkpoint's tensors. If none has the prefix of a layout, as in checkpoints of a base
                model such as Qwen3-Embedding ("layers.0..." instead of "model.layers.0..."), the layouts without it
                follow, in the same order; and, if a layout has names of its own for the embedding, the list of layers
                or the final norm, once more without these: AutoModel of transformers writes its modules' names there.
                Default: the usual names only.
        """
        prefixes = tuple([f"{layout.get('prefix', 'model')}." for layout in self.layouts])
        is_base = stored and self.text is None and not any(name.startswith(prefixes) for name in stored)
        if not is_base:
            return [*self.layouts]
        bare = [{"names": {}, **layout, "prefix": ""} for layout in self.layouts]
        ends = [
            {**layout, "names": {part: name for part, name in layout["names"].items() if not part.startswith(ENDS)}}
            for layout in bare
        ]
        return [*self.layouts, *bare, *(ends if ends != bare else ())]

    def weight_maps(self, config: DecoderConfig, stored: Collection[str] = ()) -> list[WeightMap]:
        """The weight map of `config` in each of the layouts of `layouts_for(stored)`."""
        return [config.weight_map(**layout) for layout in self.layouts_for(stored)]

    def can_tie(self, hf_config: Mapping[str, Any]) -> bool:
        """Whether a config of this family may tie the LM head to the embedding; transformers never does in some."""
        try:
            self.decoder_config({**hf_config, "tie_word_embeddings": True})
        except ConfigError:
            return False
        return True

    def written_map(self, config: DecoderConfig, weight_map: WeightMap) -> WeightMap:
        """The weight map by which a model is written that was loaded by `weight_map`: the same one; or, if that is of
        a base model's checkpoint without prefix, the map of the same layout with the usual names."""
        maps = self.weight_maps(config, weight_map.sources())
        usual, bare = maps[: len(self.layouts)], maps[len(self.layouts) :]
        pairs = zip(cycle(usual), bare, strict=False)
        return next((named for named, other in pairs if other.sources() == weight_map.sources()), weight_map)


FAMILIES: dict[str, Family] = {}
"""Registered families by `model_type`."""

OWN_FAMILIES = "ligermodels.archs.registry"
"""Module of this package that registers its families when it is imported."""
ENTRY_POINTS = "ligermodels.families"
"""Group of entry points of installed packages; each names a module that registers families when it is imported."""


def register(family: Family) -> None:
    """Make checkpoints of `family.model_type` loadable. A family registered before under this name is replaced.

    Examples:
        >>> from ligermodels.archs import FAMILIES, Family, register
        >>> from ligermodels.archs.llama import decoder_config
        >>> register(Family("my_llama", decoder_config))
        >>> "my_llama" in FAMILIES
        True
    """
    FAMILIES[family.model_type] = family


def family_of(config: Mapping[str, Any]) -> Family:
    """The registered family of a Hugging Face config, by its `model_type`.

    Modules that register families are imported on demand: this package's own, then the entry points.

    Raises:
        ConfigError: `model_type` is missing or not registered, or the config describes draft heads without a model.
    """
    require_model(config)
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError("config.json: field 'model_type' is missing")
    if not isinstance(model_type, str):
        raise ConfigError(f"config.json: field 'model_type' must be a string, got {short(model_type)}")
    if model_type not in FAMILIES:
        importlib.import_module(OWN_FAMILIES)
    if model_type not in FAMILIES:
        for plugin in entry_points(group=ENTRY_POINTS):
            plugin.load()
    if model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {short(model_type)} is not implemented; implemented: "
            f"{', '.join(sorted(FAMILIES))}. To add your own, call ligermodels.archs.register in a module that "
            "--import or an entry point names"
        )
    return FAMILIES[model_type]


def composed(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Hugging Face config composes to, without the warnings, which were shown when it was read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return family_of(config).decoder_config(config)


def warn_of_other_family(config: Mapping[str, Any]) -> None:
    """ConfigWarning if the first of a config's `architectures` ("LlamaForCausalLM") is of another registered family.

    The two families may name their tensors alike, and a wrong `model_type` would load without an error.
    """
    model_type, architectures = config["model_type"], config.get("architectures")
    if not architectures or not isinstance(architectures, list):
        return
    if model_type in FAMILIES and architectures[0] == FAMILIES[model_type].causal_lm:
        return  # a family with the layers, and the class, of another one
    family = _normalized(str(architectures[0]).partition("For")[0])
    if family != _normalized(model_type) and family in map(_normalized, FAMILIES):
        warn_caller(
            f"config.json: architectures names {short(architectures[0])}, but model_type is {model_type!r}, and "
            "model_type decides; correct the one that is wrong",
            ConfigWarning,
        )


def _normalized(name: str) -> str:
    """A class name or a `model_type` in one form: both "Qwen3Moe" and "qwen3_moe_text" become "qwen3moe"."""
    return name.lower().removesuffix("_text").replace("_", "")
