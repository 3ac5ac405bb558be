"""`ligermodels info`: a summary of a checkpoint, an adapter or heads, from configs and headers of files."""

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
    from ligermodels.convert.loading import Spec

ADAMW_COPIES = 4
"""Copies of each parameter in AdamW training: weight, gradient and two moments."""


LABELS = {
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
        bool, typer.Option("--weights", help="Of a hub id: download the weights and inspect them too.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the weight files with the digests in their index or header.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the architecture, sizes and memory of a checkpoint, or of an adapter or of heads; loads no weights."""
    found = describe(path, weights)
    if check:
        found |= checked(path)
    if as_json:
        print_json(found)
        return
    show_table(["", ""], list(_rows(found)))


def describe(path: str, weights: bool = False) -> dict[str, Any]:
    """The facts that `info` shows; those of weight files only where they are on this machine.

    Raises ConfigError, CheckpointError and HubError as `from_pretrained` does; InputError for heads on the hub whose
    file is not to be downloaded.
    """
    folder = models.locate(path, weights=False)
    if models.is_adapter(folder):
        return {"adapter": str(path), **adapter_facts(folder)}
    if models.holds_only_heads(folder):
        if folder != Path(path).expanduser():
            if not weights:
                raise InputError(f"{path}: heads, which only their file describes; --weights downloads it")
            from ligermodels.speculative.hub import heads_folder

            folder = heads_folder(path)
        if (found := mtp_facts(folder)) is not None:
            return {"mtp_head": str(path), **found}
        return {"medusa_heads": str(path), **heads_facts(folder)}
    if weights:
        folder = models.locate(path)
    found = {"checkpoint": str(path), **checkpoint_facts(folder)}
    if "tensors" in found and models.holds_heads(folder):
        found["medusa_heads"] = heads_facts(folder)
    if models.holds_adapter(folder):
        found["adapter"] = adapter_facts(folder)
    return found


def checked(path: str) -> dict[str, int]:
    """How many weight files are those that were written, and how many have no digest that would tell; CheckpointError
    that names those that are not."""
    from ligermodels.convert.digests import check_digests

    folder = models.locate(path, weights=False)
    with progress("checking", in_bytes=True) as update:
        files = check_digests(folder, update)
    weights = {each.name for kind in ("*.safetensors", "*.pt") for each in folder.glob(kind)}
    return {"files_as_written": len(files), "files_without_digest": len(weights - set(files))}


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Of the checkpoint in `folder`; errors as of `describe`."""
    from ligermodels.archs import family_of
    from ligermodels.archs.fields import FULL
    from ligermodels.convert.config_json import dtype_of, read_json
    from ligermodels.convert.dequantize import dequantized
    from ligermodels.convert.quantization import without_quantization
    from ligermodels.convert.rope_settings import rope_parameters
    from ligermodels.convert.safetensors_reader import Checkpoint as Files
    from ligermodels.layers.initialization import persistent_tensors
    from ligermodels.models.checkpoint import choose_layout
    from ligermodels.models.extra_heads import without_heads
    from ligermodels.pretrained import from_config
    from ligermodels.speculative.mtp_files import head_tensors

    hf_config, quantization = without_quantization(read_json(folder / "config.json"))
    model = from_config(without_heads(hf_config)[0], device="meta")
    config = model.config
    thetas = family_of(model.hf_config).default_theta
    rope = rope_parameters(model.hf_config, thetas, FULL if isinstance(thetas, Mapping) and FULL in thetas else None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = dtype_of(hf_config).itemsize
    mixers = [block.mixer for block in config.blocks]
    cache = sum(mixer.state_elements(2) - mixer.state_elements(1) for mixer in mixers) * width
    layers = [{**block.mixer.info(), **block.mlp.info()} for block in config.blocks]
    found: dict[str, Any] = {
        "model_type": hf_config["model_type"],
        "layers": len(config.blocks),
        "hidden_size": config.hidden_size,
        **{name: _common(each[name] for each in layers if name in each) for name in dict.fromkeys(chain(*layers))},
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "rope_type": rope["rope_type"],
        "rope_theta": rope["rope_theta"],
        "tied_embeddings": config.head.tied,
        "dtype": str(dtype_of(hf_config)).removeprefix("torch."),
        "parameters": parameters,
        "embedding_parameters": model.decoder.embed.weight.numel(),
        "weights_bytes": parameters * width,
        "kv_cache_bytes_per_token": cache,
        "full_context_bytes": parameters * width + cache * (config.max_position_embeddings or 0),
        "adamw_bytes": parameters * width * ADAMW_COPIES,
    }
    if any(folder.glob("*.safetensors*")):
        with Files(folder) as files:
            state = persistent_tensors(model)
            headers = dequantized(files, quantization, dtype_of(hf_config)).headers
            choose_layout(hf_config, config, headers, state).plan(headers, state)
            found |= _stored(files.headers.values())
            if mtp := [headers[name] for name in sorted(head_tensors(model, headers))]:
                found["mtp_head"] = {**_sizes(mtp), **_stored(mtp)}
    return found


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Of the adapter in `folder`: what its tensors say, and the config where they do not. One that native LoRA does not
    open has the reason in `not_opened`.

    Raises ConfigError and CheckpointError for files that are missing or damaged.
    """
    from ligermodels.adapt.adapter import adapted_paths, open_adapter
    from ligermodels.adapt.lora import leaf

    with open_adapter(folder) as (config, checkpoint):
        headers = checkpoint.headers
        found: dict[str, Any] = {
            "base_model": config.get("base_model_name_or_path"),
            "type": config.get("peft_type"),
            "rank": config.get("r"),
            "alpha": config.get("lora_alpha"),
            "use_rslora": bool(config.get("use_rslora")),
            "targets": config.get("target_modules"),
        }
        try:
            alphas = adapted_paths(config, headers)
        except (ConfigError, CheckpointError) as error:
            found["not_opened"] = str(error)
        else:
            found["rank"] = _distinct(h.shape[0] for name, h in headers.items() if name.endswith(".lora_A.weight"))
            found["alpha"] = _distinct(alphas.values())
            found["targets"] = list(dict.fromkeys(map(leaf, alphas)))
            found["adapted_layers"] = len(alphas)
        return found | _sizes(headers.values()) | _stored(headers.values())


def heads_facts(folder: Path) -> dict[str, Any]:
    """Of the Medusa heads in `folder`; CheckpointError as of `open_heads`."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.speculative.files import open_heads

    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
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


def mtp_facts(folder: Path) -> dict[str, Any] | None:
    """Of the head of multi-token prediction in `folder`, alone; None where other heads are."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.convert.safetensors_reader import Checkpoint as Files
    from ligermodels.speculative.mtp_files import CONFIG, MODEL_TYPE

    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if config.get("model_type") != MODEL_TYPE:
        return None
    about = {name: config.get(name) for name in ("base_model_type", "hidden_size", "vocab_size")}
    with Files(folder) as files:
        own = list(files.headers.values())
    return {"base_model": config.get("base_model_name_or_path"), **about, **_sizes(own), **_stored(own)}


def _sizes(specs: Iterable[Spec]) -> dict[str, Any]:
    counts = [(math.prod(spec.shape), spec.dtype.itemsize) for spec in specs]
    return {
        "parameters": sum(count for count, _ in counts),
        "weights_bytes": sum(count * width for count, width in counts),
    }


def _stored(specs: Collection[Spec]) -> dict[str, Any]:
    return {"tensors": len(specs), "stored_dtypes": sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})}


def _common(values: Iterable[int]) -> int | list[int]:
    """The value of all layers if they have the same, else each layer's."""
    each = list(values)
    return each[0] if len(set(each)) == 1 else each


def _distinct(values: Iterable[float]) -> float | list[float]:
    """The one value, or all that there are, ascending."""
    each = sorted(set(values))
    return each[0] if len(each) == 1 else each


def _rows(found: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        label = of + LABELS.get(name, name.replace("_", " "))
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
