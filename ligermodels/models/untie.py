"""Untie the LM head from the embedding, in a model's config and in the checkpoint that it is written as."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ligermodels.convert.config_json import joined, nested_configs
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.mappings import rename
from ligermodels.convert.weight_map import WeightMap

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

HEAD, EMBEDDING = "head.weight", "decoder.embed.weight"
"""Native names of the LM head and the embedding; a tied weight has both."""

TIED = "tie_word_embeddings"


def untie(model: CausalLM) -> None:
    """Mark the LM head of `model` as untied, in its config and in its export spec.

    The caller replaces the head's weight. From then on the model is saved with both tensors and
    `"tie_word_embeddings": false`.
    """
    head = replace(model.config.head, tied=False)
    model.config = model.decoder.config = replace(model.config, head=head)
    model.head.config = head
    if model.export_spec is not None:
        model.export_spec = _with_untied_head(model.export_spec)


def _with_untied_head(spec: ExportSpec) -> ExportSpec:
    source = spec.source
    if source is not None:
        # Some classes of transformers read the flag in the text model's config, others in the outer config.
        levels = nested_configs(source.hf_config) if source.nested else {"": source.hf_config}
        config = joined({name: {**level, TIED: False} for name, level in levels.items()})
        source = replace(source, hf_config=config, weight_map=_with_head_mapping(source.weight_map))
    return replace(
        spec, hf_config={**spec.hf_config, TIED: False}, weight_map=_with_head_mapping(spec.weight_map), source=source
    )


def _with_head_mapping(weights: WeightMap) -> WeightMap:
    """The weight map with the head as a tensor of its own, under the name that was an alias of the embedding."""
    head = [rename(HEAD, alias) for alias in weights.aliases]
    return replace(weights, mappings=[*weights.mappings, *head], aliases={})
