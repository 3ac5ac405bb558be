"""The config of a model, and the checkpoint it is written as, once its head is not the embedding any more."""

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
"""The two names of a tied weight."""

TIED = "tie_word_embeddings"


def untie(model: CausalLM) -> None:
    """Have the config of `model` say that its head is not the embedding, and its config.json too, where it has one.

    The head is left to the caller. The model is then written with both tensors, and "tie_word_embeddings": false.
    """
    head = replace(model.config.head, tied=False)
    model.config = model.decoder.config = replace(model.config, head=head)
    model.head.config = head
    if model.export_spec is not None:
        model.export_spec = _with_head(model.export_spec)


def _with_head(spec: ExportSpec) -> ExportSpec:
    source = spec.source
    if source is not None:
        # Classes of transformers differ in whether they ask the text model's config or the one around it.
        levels = nested_configs(source.hf_config) if source.nested else {"": source.hf_config}
        config = joined({name: {**level, TIED: False} for name, level in levels.items()})
        source = replace(source, hf_config=config, weight_map=_stored(source.weight_map))
    return replace(spec, hf_config={**spec.hf_config, TIED: False}, weight_map=_stored(spec.weight_map), source=source)


def _stored(weights: WeightMap) -> WeightMap:
    """With the head as a tensor, under the name that repeated the embedding."""
    head = [rename(HEAD, alias) for alias in weights.aliases]
    return replace(weights, mappings=[*weights.mappings, *head], aliases={})
