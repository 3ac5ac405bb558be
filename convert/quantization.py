"""The `quantization_config` of a config.json: how the quantised tensors of a checkpoint are stored."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ligermodels.convert.config_json import joined, nested_configs, short
from ligermodels.errors import ConfigError, ConfigWarning

FIELD = "quantization_config"


class Quantization(NamedTuple):
    """How tensors are stored.

    Args:
        encoding: "fp8" or "mxfp4", see `dequantize.ENCODINGS`.
        block: rows and columns of a block that has one scale; None where the shapes of the scales tell.
    """

    encoding: str
    block: tuple[int, int] | None = None


def without_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any], Quantization | None]:
    """`config` without its `quantization_config`, at the top or in a config of `nested_configs`, and what that says.

    None where there is none, or an empty one; then nothing is left out. Raises ConfigError, naming the method or the
    field, for one that is not implemented, and for two that contradict each other; gives a ConfigWarning for an unknown
    field.
    """
    configs = nested_configs(config)
    places = {f"{name}.{FIELD}".lstrip("."): holder for name, holder in configs.items()}
    found = {where: _read(holder[FIELD], where) for where, holder in places.items() if holder.get(FIELD)}
    if not found:
        return dict(config), None
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json: {' and '.join(found)} contradict each other; remove the wrong one")
    plain = {name: {key: each[key] for key in each if key != FIELD} for name, each in configs.items()}
    return joined(plain), next(iter(found.values()))


def _read(found: Any, where: str) -> Quantization:
    where = f"config.json: {where}"
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: must be an object, got {short(found)}")
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"{where}: quant_method = {short(method)} is not implemented; implemented: {', '.join(METHODS)}. Load the "
            "checkpoint that it was quantised from"
        )
    read, known = METHODS[method]
    if unknown := sorted(str(name) for name in found.keys() - {"quant_method", *known.split()}):
        warnings.warn(f"{where}: {', '.join(unknown)}: unknown and not used", ConfigWarning, stacklevel=4)
    return read(found, where)


def _fp8(found: Mapping[str, Any], where: str) -> Quantization:
    """`quant_method` "fp8", as transformers' FineGrainedFP8Config: blocks of 128 x 128 unless it says otherwise."""
    _choice(found, "fmt", where, "e4m3", "e5m2", "float8_e4m3fn")
    _choice(found, "scale_fmt", where, "float", "ue8m0")
    _choice(found, "expert_dtype", where, "fp8")
    size = found.get("weight_block_size", [128, 128])
    return Quantization("fp8", None if size is None else _block(size, f"{where}.weight_block_size"))


def _compressed_tensors(found: Mapping[str, Any], where: str) -> Quantization:
    """`quant_method` "compressed-tensors" with weights in FP8."""
    _choice(found, "format", where, "float-quantized", "naive-quantized")
    if found.get("transform_config"):
        raise ConfigError(f"{where}: transform_config is not implemented; load the checkpoint that was quantised")
    _choice(_object(found, "sparsity_config", where), "format", f"{where}.sparsity_config", "dense")
    blocks = set()
    for name, group in _object(found, "config_groups", where).items():
        weights = _object(group if isinstance(group, Mapping) else {}, "weights", at := f"{where}.config_groups.{name}")
        at += ".weights"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise ConfigError(f"{at}: must be of type 'float' with num_bits 8 (FP8), got {short(weights)}")
        strategy = _choice(weights, "strategy", at, "tensor", "channel", "block", "group")
        sizes = {"block": weights.get("block_structure"), "group": [1, weights.get("group_size")]}
        blocks.add(_block(sizes[strategy], at) if strategy in sizes else None)
    if len(blocks) != 1:
        raise ConfigError(f"{where}.config_groups: must have groups of one block size, got {short(blocks)}")
    return Quantization("fp8", blocks.pop())


def _mxfp4(found: Mapping[str, Any], where: str) -> Quantization:
    return Quantization("mxfp4")


METHODS: Mapping[str, tuple[Callable[[Mapping[str, Any], str], Quantization], str]] = {
    "fp8": (
        _fp8,
        """fmt weight_block_size activation_scheme modules_to_not_convert ignored_layers modules_to_convert scale_fmt
        expert_dtype dequantize kv_cache_scheme""",
    ),
    "compressed-tensors": (
        _compressed_tensors,
        """format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio sparsity_config
        transform_config version""",
    ),
    "mxfp4": (_mxfp4, "modules_to_not_convert dequantize"),
}
"""`quant_method` -> how it is read, and its fields.

Which tensors are quantised is told by their dtypes. How activations and the cache were quantised says nothing of the
weights."""


def _object(found: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = found.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}.{name}: must be an object, got {short(value)}")
    return value


def _choice(found: Mapping[str, Any], name: str, where: str, *implemented: str) -> str:
    """A field that may be left out: it is then the first of the values `implemented`."""
    value = implemented[0] if found.get(name) is None else found[name]
    if value not in implemented:
        raise ConfigError(f"{where}: {name} = {short(value)} is not implemented; implemented: {', '.join(implemented)}")
    return str(value)


def _block(size: Any, where: str) -> tuple[int, int]:
    whole = isinstance(size, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in size)
    if not whole or len(size) != 2 or min(size) < 1:
        raise ConfigError(f"{where}: a block must have two sizes above 0, rows and columns; got {short(size)}")
    return size[0], size[1]
