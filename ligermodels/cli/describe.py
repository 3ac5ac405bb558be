"""`ligermodels info`: a summary of a checkpoint, an adapter or heads, from configs and file headers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import models
from ligermodels.cli.options import AsJson
from ligermodels.console import print_json, progress, readable_bytes, show_table
from ligermodels.errors import CheckpointError, ConfigError, InputError

if TYPE_CHECKING:
    import torch

    from ligermodels.convert.loading import Spec
    from ligermodels.models.causal_lm import CausalLM

ADAMW_COPIES = 4
"""Copies of each parameter in AdamW training: weight, gradient and two moments."""


LABELS = {
    "attention": "attention in training on this machine",
    "weights_bytes": "memory: weights",
    "kv_cache_bytes_per_token": "memory: KV cache per token",
    "full_context_bytes": "memory: weights and KV cache at full context",
    "adamw_bytes": "memory: AdamW training, without activations",
}
"""Labels that differ from the key."""


def info(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, an adapter or heads: a folder or a hub id.")
    ],
    weights: Annotated[
        bool, typer.Option("--weights", help="For a hub id: download the weights and inspect them too.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the weight files with the digests in their index or header.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the architecture, sizes and memory of a checkpoint, an adapter or heads, without loading weights."""
    facts = describe(path, weights)
    if check:
        facts |= checked(path)
    if as_json:
        print_json(facts)
        return
    show_table(["", ""], list(_rows(facts)))


def describe(path: str, weights: bool = False) -> dict[str, Any]:
    """The facts that `info` shows. Facts about weight files are included if the files are on this machine.

    Raises ConfigError, CheckpointError and HubError if the checkpoint cannot be read; InputError for heads on the hub
    without `weights`.
    """
    folder = models.locate(path, weights=False)
    if models.is_adapter(folder):
        return {"adapter": str(path), **adapter_facts(folder)}
    if models.holds_only_heads(folder):
        if folder != Path(path).expanduser():
            if not weights:
                raise InputError(f"{path}: heads, described only by their weight file; --weights downloads it")
            from ligermodels.speculative.hub import heads_folder

            folder = heads_folder(path)
        if (draft := draft_facts(folder)) is not None:
            return {f"{draft[0]}_head": str(path), **draft[1]}
        return {"medusa_heads": str(path), **heads_facts(folder)}
    if weights:
        folder = models.locate(path)
    facts = {"checkpoint": str(path), **checkpoint_facts(folder)}
    if "tensors" in facts and models.holds_heads(folder):
        facts["medusa_heads"] = heads_facts(folder)
    if models.holds_adapter(folder):
        facts["adapter"] = adapter_facts(folder)
    return facts


def checked(path: str) -> dict[str, int]:
    """The number of weight files that match their digest, and of files without a digest.

    Raises CheckpointError that names the files that do not match."""
    from ligermodels.convert.digests import check_digests

    folder = models.locate(path, weights=False)
    with progress("checking", in_bytes=True) as update:
        files = check_digests(folder, update)
    weights = {file.name for pattern in ("*.safetensors", "*.pt") for file in folder.glob(pattern)}
    return {"files_as_written": len(files), "files_without_digest": len(weights - set(files))}


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Facts about the checkpoint in `folder`."""
    import torch

    from ligermodels.convert.config_json import named_dtype, read_json
    from ligermodels.convert.dequantize import dequantized, unquantized_dtype
    from ligermodels.convert.quantization import without_quantization
    from ligermodels.convert.safetensors_reader import Checkpoint as Files
    from ligermodels.layers.initialization import persistent_tensors
    from ligermodels.models.checkpoint import choose_layout
    from ligermodels.pretrained import from_config
    from ligermodels.speculative.mtp_files import head_tensors

    hf_config, quantization = without_quantization(read_json(folder / "config.json"))
    model, dtype, stored = from_config(hf_config, device="meta"), named_dtype(hf_config), dict[str, Any]()
    if any(folder.glob("*.safetensors*")):
        with Files(folder) as files:
            dtype = dtype or unquantized_dtype(dequantized(files, quantization, None))
            state, headers = persistent_tensors(model), dequantized(files, quantization, dtype).headers
            choose_layout(hf_config, model.config, headers, state).plan(headers, state)
            stored = _stored(files.headers.values())
            if mtp := [headers[name] for name in sorted(head_tensors(model, headers))]:
                stored["mtp_head"] = {**_sizes(mtp), **_stored(mtp)}
    dtype = dtype or torch.float32
    return {"model_type": hf_config["model_type"], **_sizes_and_memory(model, dtype), **stored}


def _sizes_and_memory(model: CausalLM, dtype: torch.dtype) -> dict[str, Any]:
    """Facts about the architecture, the sizes and the memory of a model in `dtype`."""
    import torch

    from ligermodels.models.attention_summary import attention_summary
    from ligermodels.parallel.ranks import rank_device_type

    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = dtype.itemsize
    device = torch.device(rank_device_type())
    mixers = [block.mixer for block in config.blocks if block.mixer is not None]
    cache = sum(mixer.state_elements(2) - mixer.state_elements(1) for mixer in mixers) * width
    layers = [block.info() for block in config.blocks]
    return {
        "layers": len(config.blocks),
        "hidden_size": config.hidden_size,
        **{name: _common(each[name] for each in layers if name in each) for name in dict.fromkeys(chain(*layers))},
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        **_rope_facts(model),
        "tied_embeddings": config.head.tied,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": attention_summary(config, device, dtype),
        "parameters": parameters,
        "embedding_parameters": model.decoder.embed.weight.numel(),
        "weights_bytes": parameters * width,
        "kv_cache_bytes_per_token": cache,
        "full_context_bytes": parameters * width + cache * (config.max_position_embeddings or 0),
        "adamw_bytes": parameters * width * ADAMW_COPIES,
    }


def _rope_facts(model: Any) -> dict[str, Any]:
    """Type and base of the rotary positions of a model, of full attention if there are several; empty for none."""
    from ligermodels.archs import family_of
    from ligermodels.archs.fields import FULL
    from ligermodels.convert.rope_settings import rope_parameters

    if not any(block.ropes for block in model.config.blocks):
        return {}
    thetas = family_of(model.hf_config).default_theta
    rope = rope_parameters(model.hf_config, thetas, FULL if isinstance(thetas, Mapping) and FULL in thetas else None)
    return {name: rope[name] for name in ("rope_type", "rope_theta")}


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Facts about the adapter in `folder`, from its tensors and its config. `not_opened` is the reason if native LoRA
    cannot open it.

    Raises ConfigError and CheckpointError for files that are missing or damaged.
    """
    from ligermodels.adapt.adapter import open_adapter
    from ligermodels.adapt.adapter_layers import layers_of_file
    from ligermodels.adapt.targets import leaf

    with open_adapter(folder) as (config, checkpoint):
        headers = checkpoint.headers
        facts: dict[str, Any] = {
            "base_model": config.get("base_model_name_or_path"),
            "type": config.get("peft_type"),
            "rank": config.get("r"),
            "alpha": config.get("lora_alpha"),
            "use_rslora": bool(config.get("use_rslora")),
            "targets": config.get("target_modules"),
            "modules_to_save": config.get("modules_to_save") or [],
            "trainable_token_indices": config.get("trainable_token_indices") or [],
        }
        try:
            layers = layers_of_file(config, headers)
        except (ConfigError, CheckpointError) as error:
            facts["not_opened"] = str(error)
        else:
            facts["rank"] = _distinct(rank for rank, _ in layers.values())
            facts["alpha"] = _distinct(alpha for _, alpha in layers.values())
            facts["targets"] = list(dict.fromkeys(map(leaf, layers)))
            facts["adapted_layers"] = len(layers)
        return facts | _sizes(headers.values()) | _stored(headers.values())


def heads_facts(folder: Path) -> dict[str, Any]:
    """Facts about the Medusa heads in `folder`. Raises CheckpointError if they cannot be read."""
    from ligermodels.convert.config_json import config_in
    from ligermodels.speculative.medusa_files import open_heads

    config = config_in(folder)
    with open_heads(folder) as heads:
        profile, count, layers = heads.profile, heads.num_heads, heads.num_layers
        own = {name: header for name, header in heads.reader.headers.items() if name.startswith(profile.prefix)}
        return {
            "format": profile.name,
            "base_model": config.get("base_model_name_or_path"),
            "heads": count,
            "layers": layers,
            "hidden_size": own[profile.linear.format(head=0, layer=0, part="weight")].shape[0],
            "lm_heads": sum(profile.lm_head.format(head=i, layers=layers) in own for i in range(count)),
            **_sizes(own.values()),
            **_stored(own.values()),
        }


def draft_facts(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The type of the MTP, EAGLE-3, DFlash or DSpark head in `folder`, and facts about it; None if it holds others."""
    from ligermodels.convert.config_json import config_in
    from ligermodels.convert.safetensors_reader import Checkpoint as Files
    from ligermodels.models.extra_heads import EAGLE_TYPE, MTP_TYPE, draft_type
    from ligermodels.speculative import block_formats, eagle3_formats

    config = config_in(folder)
    if (kind := draft_type(config)) is not None:
        facts = (eagle3_formats if kind == EAGLE_TYPE else block_formats).facts_of(config)
    elif config.get("model_type") == MTP_TYPE:
        names = {"base_model": "base_model_name_or_path"}
        names |= {name: name for name in ("base_model_type", "hidden_size", "vocab_size")}
        kind, facts = "mtp", {name: config.get(field) for name, field in names.items()}
    else:
        return None
    with Files(folder) as files:
        own = list(files.headers.values())
    return kind, {**facts, **_sizes(own), **_stored(own)}


def _sizes(specs: Iterable[Spec]) -> dict[str, Any]:
    counts = [(math.prod(spec.shape), spec.dtype.itemsize) for spec in specs]
    return {
        "parameters": sum(count for count, _ in counts),
        "weights_bytes": sum(count * width for count, width in counts),
    }


def _stored(specs: Collection[Spec]) -> dict[str, Any]:
    return {"tensors": len(specs), "stored_dtypes": sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})}


def _common(values: Iterable[int]) -> int | list[int]:
    """The value that all layers have, or a list with the value of each layer."""
    by_layer = list(values)
    return by_layer[0] if len(set(by_layer)) == 1 else by_layer


def _distinct(values: Iterable[float]) -> float | list[float]:
    """The only value, or all distinct values in ascending order."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else distinct


def _rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        label = prefix + LABELS.get(name, name.replace("_", " "))
        if isinstance(value, dict):
            yield from _rows(value, f"{label}: ")
        elif value is not None:
            yield label, _readable(name, value)


def _readable(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in name:
        return readable_bytes(value)
    if name.endswith("parameters"):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
