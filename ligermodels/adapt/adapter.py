"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, under transformers' names."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.adapt.adapter_config import adapter_config
from ligermodels.adapt.adapter_layers import adapted_paths, adapter_of_file
from ligermodels.adapt.expert_files import check_expert_format, converted, expert_mappings
from ligermodels.adapt.lora import AnyLoRA, Model, check_adaptable, insert, require_lora
from ligermodels.adapt.saved_modules import (
    module_paths,
    saved_values,
    set_modules,
    stored_vocab_size,
    whole_tensors,
    written_modules,
)
from ligermodels.adapt.targets import expert_targets, layouts_of, targets, transformers_layout
from ligermodels.adapt.token_rows import NAME as TOKEN_ROWS
from ligermodels.adapt.token_rows import distinct, fold_rows, vocab_size_with_rows
from ligermodels.arguments import ExpertFormat, check_flag
from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.export_spec import as_json
from ligermodels.convert.files import ADAPTER, ADAPTER_CONFIG, CHAT_TEMPLATES, TOKENIZER, Companions
from ligermodels.convert.input_files import folder_to_write, is_present
from ligermodels.convert.mappings import WeightMapping
from ligermodels.convert.placement import DtypeLike, resolve_dtype
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import CheckpointError
from ligermodels.layers.expert_lora import ExpertLoRA
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.untie import EMBEDDING, HEAD
from ligermodels.models.vocabulary import grow_vocabulary

ONE_FILE = 2**63 - 1
"""PEFT reads one file, so the adapter is written without shards."""
GENERATION_CONFIG = "generation_config.json"
BESIDE = (*TOKENIZER, CHAT_TEMPLATES, GENERATION_CONFIG)
"""Names of the files of the base checkpoint that an adapter's folder may contain too, changed."""


_COPY = re.compile(r"\.(modules_to_save|original_module)(?=\.\w+$)")
"""In a name in PEFT's file: a further copy of a whole module. PEFT writes them if embeddings were resized, and does not
read them."""


def save_adapter(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    expert_format: ExpertFormat = "target_parameters",
    overwrite: bool = False,
) -> None:
    """Write the LoRA of a model, its modules that are trained whole, and its trained rows of tokens, in PEFT's format.

    `peft.PeftModel.from_pretrained` loads it on transformers' model. Tensors are written exactly, in their dtype. The
    tokenizer and chat template are written too if they differ from the files of the base checkpoint. If the model is
    sharded, all ranks must call this; rank 0 writes.

    Args:
        model: a model with LoRA, from `add_lora` or `load_adapter`.
        folder: created if it does not exist.
        expert_format: names of the LoRA of experts. "target_parameters" are PEFT's, which vLLM reads for families with
            stacked experts (gpt-oss, Qwen3.5). "per_expert" has a layer for each expert, for vLLM's other mixtures and
            SGLang. "shared_outer" has three tensors for each mixture, for the option `experts_shared_outer_loras` of
            SGLang and `enable_moe_shared_loras` of vLLM. The formats compute the same. Default: "target_parameters".
        overwrite: replace an adapter in `folder`, and a tokenizer, chat template and generation_config.json that are
            there without a model; other files stay. Default: False.

    Raises:
        InputError: the model has no LoRA; or `expert_format` does not fit the family or the adapter.
        CheckpointError: the folder is in use, or the disk is full. No incomplete adapter is left behind.

    Examples:
        >>> lm.add_lora(model, r=16)  # doctest: +SKIP
        >>> lm.save_adapter(model, "adapter/")  # after training  # doctest: +SKIP
    """
    updates = require_lora(model, "save_adapter")
    reshard(model)
    tensors = {**lora_tensors(updates), **whole_tensors(model)}
    options: dict[str, Any] = {"expert_format": expert_format, "overwrite": overwrite}
    write_adapter(model, updates, tensors, folder, modules=model.modules_to_save, **options)


def write_adapter(
    model: CausalLM,
    updates: Mapping[str, AnyLoRA],
    tensors: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    modules: Sequence[WeightMapping] = (),
    expert_format: ExpertFormat = "target_parameters",
    overwrite: bool = False,
) -> None:
    """Write an adapter in PEFT's format.

    Args:
        model: the adapted model.
        updates: the LoRA of its layers, also on the meta device.
        tensors: A and B to write, under the names of `lora_tensors`, and the parameters of `modules`. A tied weight may
            have the embedding's name alone.
        folder: created if it does not exist.
        modules: parameters that are written whole, as `CausalLM.modules_to_save`. Default: none.
        expert_format: see `save_adapter`.
        overwrite: replace an adapter in `folder`; other files stay. Default: False.
    """
    check_expert_format(expert_format)
    whole = {each.target: tensors[EMBEDDING if each.target == HEAD not in tensors else each.target] for each in modules}
    tensors = {name: tensors[name] for name in lora_tensors(updates)}
    ranks = Ranks([*tensors.values(), *whole.values()])  # before conversions, which gather
    updates, tensors = _in_format(updates, tensors, expert_format)
    spec = model.require_export_spec()
    source = spec.source
    # Layers of a vision tower have the same names as layers of the text model.
    adaptable: list[str] | None = None
    if source is None or not source.nested:
        layout, layouts = transformers_layout(model), layouts_of(model)
        adaptable = [*targets(model, layout, layouts), *expert_targets(model, layout, layouts)]
    own: dict[str, Path | str] = {
        name: path for name, path in spec.files.items() if source and path.absolute() != source.folder / name
    }
    # In the folder of a checkpoint, the tokenizer belongs to the checkpoint.
    folder = folder_to_write(folder)
    replaced = () if (folder / "config.json").is_file() else BESIDE
    generation = spec.generation_config  # training on chats may have added an EOS token
    if replaced and source and generation not in (None, Companions.of(source.folder).generation_config):
        own[GENERATION_CONFIG] = as_json(generation)
    config = adapter_config(updates, adaptable, spec.base_name, expert_format, module_paths(modules))
    if model.config.head.tied and {HEAD, EMBEDDING} <= whole.keys() and _are_equal(whole[HEAD], whole[EMBEDDING]):
        config["ensure_weight_tying"] = True  # PEFT would otherwise train two copies
    save_checkpoint(
        folder,
        adapter_map(updates, expert_format, written_modules(modules)).export({**tensors, **whole}),
        name=ADAPTER.removesuffix(".safetensors"),
        max_shard_size=ONE_FILE,
        files={**own, ADAPTER_CONFIG: as_json(config)},
        overwrite=overwrite,
        replaced=(ADAPTER, ADAPTER_CONFIG, "adapter_model.bin", *replaced),
        ranks=ranks,
    )


def load_adapter(
    model: Model,
    name_or_path: str | os.PathLike[str],
    *,
    is_trainable: bool = False,
    dtype: DtypeLike | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Model:
    """Freeze a model and add an adapter in PEFT's format to it, in place: LoRA, modules that were trained whole, and
    rows of tokens.

    Whole modules replace those of the model. If it ties its head to the embedding and they differ in the adapter, it is
    untied, and `save_pretrained` after `merge_lora` writes both. If the adapter has embedding and head with rows for
    more tokens, or the rows of more tokens in both, the model's vocabulary grows. Rows beside a whole module, as PEFT
    writes them for a resized vocabulary, become part of it.

    Args:
        model: a model without LoRA, not sharded.
        name_or_path: a local folder or a hub repo id.
        is_trainable: whether A and B can be trained. Default: False, they are frozen too, as in PEFT, and
            have no dropout.
        dtype: dtype of A and B; stored tensors are cast. Default: the dtype of the adapted weights.
        revision: branch, tag or commit on the hub. Default: the main branch.
        token: access token for the hub. Default: the token of `huggingface-cli login`.
        cache_dir: the hub's cache. Default: the cache of huggingface_hub.
        local_files_only: use the cache only, without network access. Default: False.

    Returns:
        `model`.

    Raises (before the model is changed):
        HubError: the repository cannot be found or reached.
        ConfigError: adapter_config.json is missing, or a field has a value that native LoRA does not support; the
            message names it: another `peft_type`, DoRA, biases, ... Or the adapter's base model is of another family.
        CheckpointError: tensors are missing, damaged, of other layers or of the wrong shape; the message names them.
        InputError: the model has LoRA already, or is sharded; an argument has the wrong type; or the adapter has new
            tokens and the head is quantised.

    Examples:
        >>> model = lm.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16)  # doctest: +SKIP
        >>> lm.load_adapter(model, "adapter/", is_trainable=True)  # doctest: +SKIP
    """
    check_adaptable(model, "load_adapter")
    check_flag("is_trainable", is_trainable)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    folder = hub.resolve_adapter(name_or_path, revision=revision, **options)
    with open_adapter(folder) as (config, checkpoint):
        updates, form, modules = adapter_of_file(model, config, checkpoint, dtype)
        vocab_size = stored_vocab_size(model, modules, checkpoint.headers)
        values, tensors = saved_values(model, modules, vocab_size), lora_tensors(updates)
        _load(checkpoint, adapter_map(updates, form, modules), {**tensors, **values})
        fold_rows(model, updates, tensors, values)
        vocab_size = vocab_size_with_rows(model, updates, vocab_size)
    if vocab_size > model.config.vocab_size:
        grow_vocabulary(model, vocab_size)
    insert(model, updates, trainable=is_trainable)
    set_modules(model, modules, values, is_trainable)
    return model


def rewrite_adapter(
    model: CausalLM,
    adapter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: DtypeLike | None = None,
    expert_format: ExpertFormat | None = None,
    overwrite: bool = False,
) -> None:
    """Check that an adapter in PEFT's format fits a model, and write it as `save_adapter` does.

    Args:
        model: a model without LoRA, also on the meta device; it is not changed.
        adapter: a local folder or a hub repo id.
        folder: created if it does not exist.
        dtype: dtype of the written tensors. Default: the stored dtype, so that all tensors keep their bits.
        expert_format: see `save_adapter`. Default: the format of the adapter.
        overwrite: replace an adapter in `folder`; other files stay. Default: False.

    Raises the errors of `load_adapter` and `save_adapter`.
    """
    check_adaptable(model, "rewrite_adapter")
    with open_adapter(hub.resolve_adapter(adapter)) as (config, checkpoint):
        headers = checkpoint.headers
        adapted_paths(headers)  # raises an error without A and B
        adapted = (header.dtype for name, header in headers.items() if ".lora_" in name or TOKEN_ROWS.fullmatch(name))
        stored = functools.reduce(torch.promote_types, adapted)
        updates, form, modules = adapter_of_file(model, config, checkpoint, dtype or stored)
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in lora_tensors(updates).items()}
        vocab_size, given = stored_vocab_size(model, modules, headers), resolve_dtype(dtype, None)
        values = saved_values(model, modules, vocab_size, "cpu")
        for each in modules:
            values[each.target] = values[each.target].to(given or headers[each.views[0].source].dtype)
        _load(checkpoint, adapter_map(updates, form, modules), {**tensors, **values})
        fold_rows(model, updates, tensors, values)
        tensors |= values
        vocab_size_with_rows(model, updates, vocab_size)
    options: dict[str, Any] = {"expert_format": expert_format or form, "overwrite": overwrite}
    write_adapter(model, updates, tensors, folder, modules=modules, **options)


@contextmanager
def open_adapter(folder: Path) -> Iterator[tuple[dict[str, Any], Checkpoint]]:
    """Context manager: the fields of adapter_config.json and the tensors of an adapter in PEFT's format.

    Raises ConfigError without a config, and CheckpointError without safetensors or if they are damaged.
    """

    def open_both(opened: ExitStack) -> tuple[dict[str, Any], Checkpoint]:
        config = read_json(folder / ADAPTER_CONFIG)
        if not is_present(folder / ADAPTER, CheckpointError):
            raise CheckpointError(
                f"{folder}: no {ADAPTER}; pickles (adapter_model.bin) are not loaded: save it by PEFT anew"
            )
        checkpoint = opened.enter_context(Checkpoint(folder, single=ADAPTER))
        names = checkpoint.headers.keys()
        copies = [name for name in names if (module := _COPY.sub("", name)) != name and module in names]
        for name in copies:
            del checkpoint.headers[name]
        return config, checkpoint

    with reading(folder, open_both) as adapter:
        yield adapter


def adapter_map(
    updates: Mapping[str, AnyLoRA],
    expert_format: ExpertFormat = "target_parameters",
    modules: Sequence[WeightMapping] = (),
) -> WeightMap:
    """The weight map from native names of A and B, and of whole parameters, to their names in PEFT's files.

    Args:
        updates: native name of the layer -> its update. LoRA of experts has the parts that the format needs.
        expert_format: see `save_adapter`.
        modules: the whole parameters. Default: none.
    """
    mappings: list[WeightMapping] = [*modules]
    for name, update in distinct(updates).items():
        if isinstance(update, ExpertLoRA):
            mappings += expert_mappings(f"{name}.update", update, expert_format)
        else:
            mappings += update.weight_mappings(f"{name}.update")
    return WeightMap(mappings)


def lora_tensors(updates: Mapping[str, AnyLoRA]) -> dict[str, Tensor]:
    """A, B and rows of tokens by the names of the model's parameters."""
    return {
        f"{name}.update.{own}": tensor
        for name, update in distinct(updates).items()
        for own, tensor in update.lora_parameters().items()
    }


def _load(checkpoint: Checkpoint, weight_map: WeightMap, state: Mapping[str, Tensor]) -> None:
    """Fill `state` from an adapter. CheckpointError, naming its file, if its tensors do not fit, or exceed the range of
    a smaller dtype (float16 ends at 65,504)."""
    file = checkpoint.folder / ADAPTER
    weight_map.load(checkpoint, state, what=f"{file}: the adapter")
    views = (each for mapping in weight_map.mappings for each in mapping.split(state[mapping.target].detach()))
    for view, part in views:
        stored = checkpoint.headers[view.source].dtype
        is_smaller = stored.is_floating_point and torch.finfo(stored).max > torch.finfo(part.dtype).max
        if is_smaller and not part.isfinite().all():
            raise CheckpointError(
                f"{file}: {view.source}: is stored in {stored}, and has values that are infinite in {part.dtype}; load "
                "the model, or write the adapter, in bfloat16 or float32"
            )


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _in_format(
    updates: Mapping[str, AnyLoRA], tensors: Mapping[str, Tensor], form: ExpertFormat
) -> tuple[dict[str, AnyLoRA], dict[str, Tensor]]:
    """The updates, and their tensors, with the LoRA of experts `converted` for a format."""
    changed, written = dict(updates), dict(tensors)
    for name, update in updates.items():
        if isinstance(update, ExpertLoRA):
            own = {key: written.pop(f"{name}.update.{key}") for key in update.lora_parameters()}
            changed[name], parameters = converted(update, own, form)
            written |= {f"{name}.update.{key}": tensor for key, tensor in parameters.items()}
    return changed, written
