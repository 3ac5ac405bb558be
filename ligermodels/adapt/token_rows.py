"""Rows of single tokens that are trained beside LoRA, in the embedding and the LM head: PEFT's
`trainable_token_indices`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.adapt.expert_files import PREFIX
from ligermodels.adapt.saved_modules import every_mapping
from ligermodels.adapt.targets import container, transformers_layout
from ligermodels.arguments import is_sequence, is_whole
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG
from ligermodels.convert.mappings import WeightMapping
from ligermodels.convert.placement import DtypeLike, resolve_dtype
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError, ConfigError, InputError, short
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.initialization import whole_parameters
from ligermodels.layers.lm_head import LMHead
from ligermodels.layers.sharding import gathered
from ligermodels.layers.token_rows import TokenRows
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.untie import EMBEDDING, HEAD, TIED

T = TypeVar("T")
Indices = Sequence[int] | Mapping[str, Sequence[int]]
"""Ids of tokens, for the embedding; or for each of the embedding and the LM head by name."""
FIELD = "trainable_token_indices"
NAME = re.compile(rf"{re.escape(PREFIX)}(.+)\.token_adapter\.trainable_tokens_delta")
"""Names of rows in PEFT's files."""


def chosen_rows(
    model: CausalLM, indices: Indices | None, modules: Iterable[WeightMapping], dtype: DtypeLike | None
) -> dict[str, TokenRows]:
    """New rows for tokens, not yet in the model. `initialize_rows` fills them, once they are.

    Args:
        model: the model to adapt.
        indices: the argument `trainable_token_indices` of `add_lora`.
        modules: parameters that are trained whole.
        dtype: dtype of the rows; None for the dtype of the weight.

    Returns:
        Native name of the embedding or the LM head -> its rows. A tied head has the embedding's.

    Raises:
        InputError: see `add_lora`.
    """
    if indices is None:
        return {}
    known = _paths([transformers_layout(model)])
    by_path = _by_path(indices, known, _is_tied(model))
    chosen: dict[str, tuple[str, Sequence[int]]] = {}
    for path, ids in by_path.items():
        _check_range(ids, model.config.vocab_size)
        if known[path] in {mapping.target for mapping in modules}:
            raise InputError(f"{FIELD}: {path} is trained whole by modules_to_save; leave it out of one of them")
        chosen[container(known[path])] = path, ids
    return _new_rows(model, chosen, dtype)


def rows_of_file(
    model: CausalLM,
    layouts: Iterable[WeightMap],
    names: Collection[str],
    config: Mapping[str, Any],
    dtype: DtypeLike | None,
) -> dict[str, TokenRows]:
    """Empty rows for the tensors of an adapter, not yet in the model.

    Args:
        model: the model to adapt.
        layouts: weight maps of the model.
        names: tensors of rows in the file.
        config: the fields of adapter_config.json, checked.
        dtype: dtype of the rows; None for the dtype of the weight.

    Returns:
        Native name of the embedding or the LM head -> its rows. A tied head has the embedding's, unless the file has
        rows of its own for it: see `fold_rows`.

    Raises:
        CheckpointError: a tensor is of another module, or config and tensors name different modules.
        ConfigError: the config names no ids for a tensor.
    """
    stored = {match[1] for name in names if (match := NAME.fullmatch(name))}
    known = _paths(layouts)
    if unknown := sorted(stored - known.keys()):
        raise CheckpointError(f"{ADAPTER}: has rows of {unknown[0]}, which is neither the embedding nor the LM head")
    indices = config.get(FIELD) or {}
    embeddings, tied = _embeddings(known, stored), _is_tied(model)
    by_key = dict(indices) if isinstance(indices, Mapping) else dict.fromkeys(embeddings or ["embed_tokens"], indices)
    # A tied head has rows of its own in the file if the vocabulary was resized.
    places = {path: [path, *embeddings] if tied else [path] for path in sorted(stored)}
    chosen = {container(known[path]): (path, _ids_of(places[path], by_key)) for path in places}
    repeated = list(chosen["decoder.embed"][1]) if tied and "decoder.embed" in chosen else []
    for key, ids in by_key.items():
        if list(ids) not in ([], repeated) and not any(path.endswith(key) for path in stored):
            raise CheckpointError(f"{ADAPTER}: has no rows of {key}, which {FIELD} of {ADAPTER_CONFIG} names")
    return _new_rows(model, chosen, dtype)


def _ids_of(paths: Sequence[str], by_key: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """The ids of the first of `paths` that `trainable_token_indices` of adapter_config.json names by its end."""
    for path in paths:
        for key, ids in by_key.items():
            if path.endswith(key):
                return ids
    raise ConfigError(f"{ADAPTER_CONFIG}: field {FIELD!r} has no ids for {paths[0]}, whose rows {ADAPTER} has")


def initialize_rows(model: nn.Module) -> None:
    """Copy the rows of the frozen weights into the trained rows of a model, also of a sharded one (all ranks call)."""
    done: set[int] = set()
    for name, update in token_rows(model).items():
        if id(update) in done or update.rows.is_meta:
            continue
        done.add(id(update))
        layer: Any = model.get_submodule(name)
        weight = layer.compute.dense(update.rows.dtype) if layer.weight is None else layer.weight.detach()
        values = gathered(weight)[torch.tensor(update.token_indices, device=weight.device)]
        with torch.no_grad(), whole_parameters(update, ["rows"]):
            update.rows.copy_(values)


def token_rows(model: nn.Module) -> dict[str, TokenRows]:
    """Native name of the embedding or the LM head -> its trained rows; a tied head has the embedding's."""
    return rows_among({name: getattr(module, "update", None) for name, module in model.named_modules()})


def rows_among(updates: Mapping[str, Any]) -> dict[str, TokenRows]:
    """The updates that are trained rows of tokens, by name."""
    return {name: update for name, update in updates.items() if isinstance(update, TokenRows)}


def distinct(updates: Mapping[str, T]) -> dict[str, T]:
    """The updates by their first name: rows of a tied LM head are the embedding's."""
    first: dict[int, str] = {}
    return {name: update for name, update in updates.items() if first.setdefault(id(update), name) == name}


def rows_by_path(updates: Mapping[str, Any]) -> list[int] | dict[str, list[int]]:
    """`trainable_token_indices` of adapter_config.json for some updates; empty if there are no rows among them.

    The ids of the embedding alone are a list; a tied LM head has these too, and is not named.
    """
    among = rows_among(updates)
    rows = {update.path: list(update.token_indices) for update in among.values()}
    return rows[among["decoder.embed"].path] if "decoder.embed" in among and len(rows) == 1 else rows


def vocab_size_with_rows(model: CausalLM, updates: Mapping[str, Any], size: int) -> int:
    """The vocabulary of an adapter with rows: `size`, or a larger one if all its further tokens have rows.

    Args:
        model: the model.
        updates: the updates of the adapter, with rows among them.
        size: number of tokens of the model, or of whole modules of the adapter.

    Raises:
        CheckpointError: the embedding or the LM head would have rows without values.
    """
    rows = {name: update.token_indices for name, update in rows_among(updates).items()}
    larger = max((max(ids) + 1 for ids in rows.values()), default=0)
    if larger <= size:
        return size
    # The ids of a module differ, so their number tells; a set of all new ids could be huge.
    new = {name: sum(index >= size for index in ids) for name, ids in rows.items()}
    lacking = [name for name in ("decoder.embed", "head") if new.get(name, 0) < larger - size]
    if lacking or model.config.per_layer_inputs is not None:
        raise CheckpointError(
            f"{ADAPTER_CONFIG}: field {FIELD!r} has ids up to {larger - 1:,}, and the base model has {size:,} tokens; "
            "its vocabulary can grow by tokens whose rows the adapter has in the embedding and in the LM head. Give "
            "the resized model that the adapter was trained on as base"
        )
    return larger


def fold_rows(
    model: CausalLM, updates: dict[str, Any], tensors: dict[str, Tensor], whole: Mapping[str, Tensor]
) -> None:
    """Put rows into whole parameters of the same adapter, and remove them from the updates and tensors.

    PEFT writes both if the vocabulary was resized.

    Args:
        model: the model that the adapter is for.
        updates: the updates of the adapter; changed in place.
        tensors: the tensors of the updates, by native name; changed in place.
        whole: native name -> value of whole parameters; changed in place.

    Raises:
        CheckpointError: rows remain of a tied LM head that are not the embedding's.
    """
    rows = rows_among(updates)
    values = {id(update): tensors[f"{name}.update.rows"] for name, update in distinct(rows).items()}
    folded = set[int]()
    for name, update in rows.items():
        if (weight := whole.get(f"{name}.weight")) is not None:
            ids = torch.tensor(update.token_indices, device=weight.device)
            weight.index_copy_(0, ids, values[id(update)].to(weight.dtype))
            folded.add(id(update))
    for name, update in rows.items():
        if id(update) in folded:
            del updates[name]
            tensors.pop(f"{name}.update.rows", None)
    if _is_tied(model) and updates.get("head") is not updates.get("decoder.embed"):
        raise CheckpointError(
            f"{ADAPTER}: has rows of the LM head that differ from the embedding's, to which this model ties the head; "
            "untie the base model (tie_word_embeddings) and its weights first"
        )


def _new_rows(
    model: CausalLM, chosen: Mapping[str, tuple[str, Sequence[int]]], dtype: DtypeLike | None
) -> dict[str, TokenRows]:
    """Rows by native name of their module, from its path in transformers and the ids. A tied head shares them."""
    rows: dict[str, TokenRows] = {}
    for name, (path, ids) in chosen.items():
        layer: Any = model.get_submodule(name)
        _check_layer(model, name, layer)
        rows[name] = TokenRows(
            path,
            ids,
            model.config.hidden_size,
            padding_idx=model.config.padding_idx if name == "decoder.embed" else None,
            dtype=resolve_dtype(dtype, None) or (model.dtype if layer.weight is None else layer.weight.dtype),
            device=next(layer.parameters()).device,
        )
    if _is_tied(model) and "decoder.embed" in rows:
        _check_layer(model, "head", model.head)
        rows.setdefault("head", rows["decoder.embed"])
    return rows


def _is_tied(model: CausalLM) -> bool:
    """Whether the base has one weight for embedding and LM head. A head that was quantised since has a copy of it."""
    spec = model.require_export_spec()
    if model.head.weight is not None or spec.source is None or spec.hf_config.get(TIED) is not False:
        return model.config.head.tied
    return spec.source.loaded.get(TIED) is not False


def _check_layer(model: CausalLM, name: str, layer: nn.Module) -> None:
    """Raise InputError for an embedding or an LM head whose rows cannot be trained alone."""
    if not isinstance(layer, Embedding | LMHead):
        raise InputError(f"{FIELD}: {name} is a {type(layer).__name__}, and must be an Embedding or an LMHead")
    if isinstance(layer, LMHead) and layer.bias is not None:
        raise InputError(
            f"{FIELD}: the LM head of {model.hf_config['model_type']} has a bias, which PEFT leaves out if it trains "
            "rows; train the head and the embedding whole (modules_to_save)"
        )


def _paths(layouts: Iterable[WeightMap]) -> dict[str, str]:
    """Path in transformers of the embedding and of the LM head -> native name of its weight."""
    return {
        container(mapping.views[0].source): mapping.target
        for layout in layouts
        for mapping in every_mapping(layout)
        if mapping.target in (EMBEDDING, HEAD)
    }


def _embeddings(known: Mapping[str, str], paths: Collection[str]) -> list[str]:
    """The `paths` of the embedding."""
    return [path for path in paths if known[path] == EMBEDDING]


def _by_path(indices: Any, known: Mapping[str, str], tied: bool) -> dict[str, Sequence[int]]:
    """Path -> ids, without a tied head. InputError for other names, and for a tied head with ids of its own."""
    if not isinstance(indices, Mapping):
        _check_ids(indices)
        return dict.fromkeys(_embeddings(known, known), indices)
    by_path: dict[str, Sequence[int]] = {}
    for key, ids in indices.items():
        matching = [path for path in known if isinstance(key, str) and key and path.endswith(key)]
        if len(matching) != 1:
            raise InputError(f"{FIELD}: {key!r} must name one of {', '.join(known)}")
        if matching[0] in by_path:
            raise InputError(f"{FIELD}: names {matching[0]} twice; give it once")
        _check_ids(ids)
        by_path[matching[0]] = ids
    if tied:
        of_head = {path: ids for path, ids in by_path.items() if known[path] == HEAD}
        by_path = {path: ids for path, ids in by_path.items() if path not in of_head}
        others = [by_path.get(path, ()) for path in _embeddings(known, known)]
        if any(set(ids) != set(other) for ids in of_head.values() for other in others):
            raise InputError(
                f"{FIELD}: the LM head is tied to the embedding; give the embedding the same ids, or alone"
            )
    return by_path


def _check_ids(ids: Any) -> None:
    """Raise InputError unless these are different ids, at least one."""
    if not is_sequence(ids) or not ids or not all(map(is_whole, ids)) or len(set(ids)) < len(ids):
        raise InputError(f"{FIELD}: must be a list of different token ids, got {short(ids)}")


def _check_range(ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for ids that the embedding does not have."""
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(f"{FIELD}: must lie in [0, {vocab_size:,}), the rows of the embedding, got {short(ids)}")
