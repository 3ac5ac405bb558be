"""The `quantization_config` of config.json: how a checkpoint stores quantised tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ligermodels.convert.config_json import joined, nested_configs, short
from ligermodels.convert.json_values import as_object, is_int, is_object, object_field
from ligermodels.errors import ConfigError, ConfigWarning, warn_caller

FIELD = "quantization_config"


class Quantization(NamedTuple):
    """How a checkpoint stores quantised tensors.

    Args:
        encoding: "fp8", "mxfp4" or "bitsandbytes 4 bits", see `dequantize.ENCODINGS`.
        block: rows and columns that share one scale; None if the shapes of the scales determine them.
    """

    encoding: str
    block: tuple[int, int] | None = None


def without_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any], Quantization | None]:
    """Split `quantization_config` from a config, where it is at the top level or in one of `nested_configs`.

    Warns with ConfigWarning about unknown fields.

    Returns:
        The config without it, and its content; None if it is missing or null.

    Raises:
        ConfigError: the method or the value of a field is not implemented, or two such fields contradict each other.
    """
    configs = nested_configs(config)
    paths = {f"{name}.{FIELD}".lstrip("."): level for name, level in configs.items()}
    quantizations = {path: _read(level[FIELD], path) for path, level in paths.items() if level.get(FIELD) is not None}
    if len(set(quantizations.values())) > 1:
        raise ConfigError(f"config.json: {' and '.join(quantizations)} contradict each other; remove the wrong one")
    plain = {name: {key: level[key] for key in level if key != FIELD} for name, level in configs.items()}
    return joined(plain), next(iter(quantizations.values()), None)


def _read(fields: Any, path: str) -> Quantization:
    where = f"config.json: {path}"
    if not is_object(fields):
        raise ConfigError(f"{where}: must be an object, got {short(fields)}")
    name = fields.get("quant_method")
    method = METHODS.get(str(name))
    if name is None:
        raise ConfigError(f"{where}: names no quant_method; remove the field if the weights are not quantised")
    if method is None:
        raise ConfigError(
            f"{where}: quant_method = {short(name)} is not implemented; implemented: {', '.join(METHODS)}. Load the "
            "checkpoint that it was quantised from"
        )
    read, known = method
    if unknown := sorted(str(name) for name in fields.keys() - {"quant_method", *known.split()}):
        warn_caller(f"{where}: {', '.join(unknown)}: unknown and not used", ConfigWarning)
    return read(fields, where)


def _fp8(fields: Mapping[str, Any], where: str) -> Quantization:
    """`quant_method` "fp8", transformers' FineGrainedFP8Config; blocks have 128 x 128 elements by default."""
    _choice(fields, "fmt", where, "e4m3", "e5m2", "float8_e4m3fn")
    _choice(fields, "scale_fmt", where, "float", "ue8m0")
    _choice(fields, "expert_dtype", where, "fp8")
    size = fields.get("weight_block_size", [128, 128])
    return Quantization("fp8", None if size is None else _block(size, f"{where}.weight_block_size"))


def _compressed_tensors(fields: Mapping[str, Any], where: str) -> Quantization:
    """`quant_method` "compressed-tensors" with weights in FP8."""
    _choice(fields, "format", where, "float-quantized", "naive-quantized")
    if fields.get("transform_config"):
        raise ConfigError(f"{where}: transform_config is not implemented; load the checkpoint that was quantised")
    _choice(object_field(fields, "sparsity_config", f"{where}."), "format", f"{where}.sparsity_config", "dense")
    blocks = set()
    for name, group in object_field(fields, "config_groups", f"{where}.").items():
        path = f"{where}.config_groups.{name}."
        weights, at = object_field(as_object(group), "weights", path), f"{path}weights"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            raise ConfigError(f"{at}: must be of type 'float' with num_bits 8 (FP8), got {short(weights)}")
        strategy = _choice(weights, "strategy", at, "tensor", "channel", "block", "group")
        sizes = {"block": weights.get("block_structure"), "group": [1, weights.get("group_size")]}
        blocks.add(_block(sizes[strategy], at) if strategy in sizes else None)
    if len(blocks) != 1:
        raise ConfigError(f"{where}.config_groups: must have groups of one block size, got {short(blocks)}")
    return Quantization("fp8", blocks.pop())


def _bitsandbytes(fields: Mapping[str, Any], where: str) -> Quantization:
    """`quant_method` "bitsandbytes", transformers' BitsAndBytesConfig, in 4 bits; the files hold types and blocks."""
    if fields.get("load_in_4bit") is not True or fields.get("load_in_8bit"):
        raise ConfigError(f"{where}: of bitsandbytes only load_in_4bit = true is implemented, without load_in_8bit")
    return Quantization("bitsandbytes 4 bits")


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
    "mxfp4": (lambda fields, where: Quantization("mxfp4"), "modules_to_not_convert dequantize"),
    "bitsandbytes": (
        _bitsandbytes,
        """load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
        bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
        llm_int8_skip_modules llm_int8_threshold""",
    ),
}
"""`quant_method` -> the function that reads it, and the names of its fields.

The files show which tensors are quantised. Fields about activations and the cache do not affect the weights."""


def _choice(fields: Mapping[str, Any], name: str, where: str, *implemented: str) -> str:
    """The field `name`; by default the first value of `implemented`."""
    value = implemented[0] if fields.get(name) is None else fields[name]
    if value not in implemented:
        raise ConfigError(f"{where}: {name} = {short(value)} is not implemented; implemented: {', '.join(implemented)}")
    return str(value)


def _block(size: Any, where: str) -> tuple[int, int]:
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(is_int(n) and n > 0 for n in size):
        raise ConfigError(f"{where}: a block must have two sizes above 0, rows and columns; got {short(size)}")
    return size[0], size[1]
