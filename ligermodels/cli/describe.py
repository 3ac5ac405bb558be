"""`ligermodels info`: a summary of a checkpoint, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any

import typer

from ligermodels.cli.options import AsJson, Checkpoint
from ligermodels.console import print_json, readable_bytes, show_table

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
    path: Checkpoint,
    weights: Annotated[
        bool, typer.Option("--weights", help="Of a hub id: download the weights and inspect them too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the architecture, sizes and memory of a checkpoint; loads no weights."""
    found = describe(path, weights)
    if as_json:
        print_json(found)
        return
    show_table(
        ["", ""], [(LABELS.get(name, name.replace("_", " ")), _readable(name, value)) for name, value in found.items()]
    )


def describe(path: str, weights: bool = False) -> dict[str, Any]:
    """The facts that `info` shows; those of weight files only where they are on this machine.

    Raises ConfigError, CheckpointError and HubError as `from_pretrained` does.
    """
    from ligermodels.archs import family_of
    from ligermodels.archs.fields import FULL
    from ligermodels.convert import hub
    from ligermodels.convert.config_json import dtype_of, read_json, rope_parameters
    from ligermodels.convert.safetensors_reader import Checkpoint as Files
    from ligermodels.layers.config import persistent_tensors
    from ligermodels.pretrained import choose_layout, from_config

    folder = hub.resolve(path, weights=weights)
    hf_config = read_json(folder / "config.json")
    model = from_config(hf_config, device="meta")
    config = model.config
    thetas = family_of(model.hf_config).default_theta
    rope = rope_parameters(model.hf_config, thetas, FULL if isinstance(thetas, Mapping) else None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = dtype_of(hf_config).itemsize
    mixers = [block.mixer for block in config.blocks]
    cache = sum(mixer.state_elements(2) - mixer.state_elements(1) for mixer in mixers) * width
    layers = [{**block.mixer.info(), **block.mlp.info()} for block in config.blocks]
    found: dict[str, Any] = {
        "checkpoint": str(path),
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
            choose_layout(hf_config, config, files.headers, state).plan(files.headers, state)
            found["tensors"] = len(files.headers)
            found["stored_dtypes"] = sorted(
                {str(header.dtype).removeprefix("torch.") for header in files.headers.values()}
            )
    return found


def _common(values: Iterable[int]) -> int | list[int]:
    """The value of all layers if they have the same, else each layer's."""
    each = list(values)
    return each[0] if len(set(each)) == 1 else each


def _readable(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in name:
        return readable_bytes(value)
    if name.endswith("parameters"):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
