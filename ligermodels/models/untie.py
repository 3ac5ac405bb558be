"""Untie the LM head from the embedding, in a model's config and in the checkpoint that it is written as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ligermodels.convert.config_json import joined, nested_configs
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.mappings import rename
from ligermodels.convert.weight_map import WeightMap

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.models.decoder import DecoderConfig

HEAD, EMBEDDING = "head.weight", "decoder.embed.weight"
"""Native names of the LM head and the embedding; a tied weight has both."""

TIED = "tie_word_embeddings"
ALSO_TIED = "tie_embedding"
"""Another name of the field, which some configs have beside it."""


def untie(model: CausalLM) -> None:
    """Mark the LM head of `model` as untied, in its config and in its export spec.

    The caller replaces the head's weight. From then on the model is saved with both tensors and
    `"tie_word_embeddings": false`.
    """
    model.config = model.decoder.config = with_own_head(model.config)
    model.head.config = model.config.head
    if model.export_spec is not None:
        model.export_spec = _with_untied_head(model.export_spec)


def with_own_head(config: DecoderConfig) -> DecoderConfig:
    """The config with an LM head of its own."""
    return replace(config, head=replace(config.head, tied=False))


def _with_untied_head(spec: ExportSpec) -> ExportSpec:
    source = spec.source
    if source is not None:
        config = untied(source.hf_config, nested=source.nested)
        source = replace(source, hf_config=config, weight_map=_with_head_mapping(source.weight_map))
    hf_config = untied(spec.hf_config, nested=False)
    return replace(spec, hf_config=hf_config, weight_map=_with_head_mapping(spec.weight_map), source=source)


def untied(hf_config: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """The config with an LM head of its own. `nested`: whether the text model's config is in it; then on all levels,
    since some classes of transformers read the field there, and others in the outer config."""
    levels = nested_configs(hf_config) if nested else {"": hf_config}
    flags = {name: {TIED, *({ALSO_TIED} & level.keys())} for name, level in levels.items()}
    return joined({name: {**level, **dict.fromkeys(flags[name], False)} for name, level in levels.items()})


def _with_head_mapping(weights: WeightMap) -> WeightMap:
    """The weight map with the head as a tensor of its own, under the name that was an alias of the embedding."""
    head = [rename(HEAD, alias) for alias in weights.aliases]
    return replace(weights, mappings=[*weights.mappings, *head], aliases={})
