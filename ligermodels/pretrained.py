"""Models from a Hugging Face checkpoint, from a config, or from a transformers model in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ligermodels.adapt.lora import initialize_lora, lora_layers
from ligermodels.adapt.quantize import quantize as quantize_weights
from ligermodels.adapt.quantized_loading import load_weights
from ligermodels.arguments import QuantizedFormat, check_flag, check_format, check_function
from ligermodels.convert import hub
from ligermodels.convert.config_json import as_config, dtype_of, read_json
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.files import ADAPTER_CONFIG, Companions
from ligermodels.convert.input_files import as_path
from ligermodels.convert.placement import (
    DeviceLike,
    DeviceMap,
    DtypeLike,
    require_device,
    resolve_device,
    resolve_dtype,
)
from ligermodels.convert.quantization import without_quantization
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.errors import (
    AdapterWarning,
    BackendError,
    CheckpointError,
    ConfigError,
    InputError,
    arguments_named,
    short,
    warn_caller,
)
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors, skip_init
from ligermodels.layers.memory import memory_for
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.checkpoint import choose_layout, export_spec, has_own_head, keep_stored_dtypes, open_checkpoint
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import without_heads
from ligermodels.models.families import family_of, warn_of_other_family
from ligermodels.models.state_dict import check_state_dict, move_state_dict
from ligermodels.models.untie import untied, with_own_head
from ligermodels.ops.attention.attention import backends
from ligermodels.ops.runtime.devices import own_random_numbers
from ligermodels.parallel.plan import ParallelPlan

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@runtime_checkable
class HasConfigDict(Protocol):
    """A config object that gives its fields as a dict, such as transformers' `PretrainedConfig`."""

    def to_dict(self) -> dict[str, Any]: ...


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: DtypeLike | None = None,
    device: DeviceLike | None = None,
    torch_dtype: DtypeLike | None = None,
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    attention: str = "auto",
    mapped: bool = True,
    progress: Progress | None = None,
    plan: ParallelPlan | None = None,
    prepare: Callable[[CausalLM], object] | None = None,
    quantize: QuantizedFormat | None = None,
    quantize_exclude: Sequence[str] = (),
    quantize_head: QuantizedFormat | None = None,
    batch_invariant: bool = False,
) -> CausalLM:
    """Load a model from a Hugging Face checkpoint.

    Tensors are read one by one, cast and placed on `device`, so the host holds little more than the model itself. FP8,
    MXFP4 and bitsandbytes' 4-bit tensors are dequantised to `dtype`, and the model is saved without
    `quantization_config`; `quantize="nf4"` and `"mxfp4"` keep weights in these formats. Draft heads in the checkpoint
    (Medusa heads, layers of multi-token prediction) are not loaded; `MedusaModel.from_pretrained` and
    `MTPModel.from_pretrained` load them.

    Args:
        name_or_path: hub repo id or local folder.
        dtype: dtype of the parameters, or its name ("bfloat16"). By default, and with "auto", the dtype in config.json,
            or if it has none the dtype of most stored numbers that are not quantised.
        device: device of the parameters: a torch device, its name, or the index of a CUDA device. Default: torch's
            default device, the CPU unless `torch.device(...)` as a context or `torch.set_default_device` names another.
            On "meta" the checkpoint is checked and no tensor is read, except for an LM head that the config ties and
            that is stored: with other values than the embedding's it is not tied, and a warning says so.
        torch_dtype: transformers' older name of `dtype`.
        device_map: transformers' name of `device`: a device, `{"": device}`, or "auto" for the current CUDA device (the
            CPU if there is none).
        revision: branch, tag or commit of the hub repository. Default: "main".
        token: hub token. Default: the token that `hf auth login` or HF_TOKEN set.
        cache_dir: folder for downloads. Default: huggingface_hub's cache.
        local_files_only: use only the cache, and do not connect to the hub.
        attention: name of an attention backend, or "auto".
        mapped: on the CPU, keep weights whose dtype and order match the files memory-mapped, and read them when they
            are used. Changing the weights changes no file. Do not write into the files while the model lives; replacing
            them, as `save_pretrained` does, is safe.
        progress: called with the bytes done and the bytes in all that this rank reads.
        plan: shard the model over the ranks, as `parallelize` does. All ranks call this; each reads and holds its own
            shard, on its GPU or, without GPUs, on the CPU.
        prepare: called with the model while it is on the meta device, before it is sharded; it may call `add_lora`.
        quantize: "float8", "int4", "nf4" or "mxfp4": quantise the weights of the blocks' linear layers while they are
            read. The result equals `lm.quantize(model, quantize)` on the model in `dtype`; but nf4 weights of a
            bitsandbytes checkpoint are kept as they are stored with "nf4", and mxfp4 weights with "mxfp4". Peak memory
            is the quantised model and about one gigabyte.
        quantize_exclude: patterns of layers that `quantize` leaves in `dtype`.
        quantize_head: "float8", "int4", "nf4" or "mxfp4": quantise the LM head too. Needs `quantize`.
        batch_invariant: bits that do not depend on the batch: see `ops.set_batch_invariant`. Default: False.

    Returns:
        The model in eval mode. `save_pretrained` writes it in the layout of the checkpoint.

    Raises:
        HubError: the repository cannot be found or reached.
        ConfigError: config.json has a field that is missing, bad or not supported; the message names it.
        CheckpointError: files or tensors are missing, damaged or do not fit; the message names all of them.
        BackendError: the attention backend is unknown or not installed.
        InputError: an unknown dtype or device, two different ones, or a `device_map` of several devices or submodules.
            `quantize` with a `plan`, or for layers that cannot be quantised. `quantize_exclude` or `quantize_head`
            without `quantize`.

    Examples:
        >>> import torch
        >>> import ligermodels as lm
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, device="cuda")
        >>> input_ids = torch.randint(model.config.vocab_size, (1, 512), device="cuda")
        >>> model(input_ids, labels=input_ids).loss.backward()
        >>> model.save_pretrained("out")
    """
    check_flag("mapped", mapped)
    check_flag("batch_invariant", batch_invariant)
    check_function("progress", progress)
    check_function("prepare", prepare)
    _check_quantize(quantize, quantize_exclude, quantize_head)
    target, requested_dtype = _device(device, device_map, plan), resolve_dtype(dtype, torch_dtype)
    folder = hub.resolve(
        name_or_path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )
    name = os.fspath(name_or_path)
    if (folder / ADAPTER_CONFIG).is_file():
        warn_caller(
            f"{name}: the adapter beside the model is not applied; load_adapter(model, {name!r}) applies it, and "
            f"`ligermodels lora merge {name} {name} OUT` writes a checkpoint with it",
            AdapterWarning,
        )
    repo_id = None if os.path.isdir(Path(name).expanduser()) else name
    ranks = Ranks() if plan is None else Ranks.of_group()
    with reading(folder, partial(open_checkpoint, folder, requested_dtype), ranks) as checkpoint:
        reader, model_dtype = checkpoint.reader, checkpoint.dtype
        config = _with_attention(checkpoint.config, attention)
        model = _on_meta(config)
        weight_map = choose_layout(checkpoint.stored_config, config, reader.headers, persistent_tensors(model))
        model.export_spec = checkpoint.export_spec(weight_map, repo_id)
        weight_map.plan(reader.headers, persistent_tensors(model), f"{folder}: the checkpoint")
        if prepare is not None:
            prepare(model)
        if quantize is not None:
            with arguments_named(exclude="quantize_exclude", head="quantize_head"):
                quantize_weights(model, quantize, exclude=quantize_exclude, head=quantize_head)
        _allocate(model, model_dtype, target, plan, mapped=mapped and target.type == "cpu")
        initialize_buffers(model, config.initializer_range)
        if target.type != "meta":
            load_weights(model, weight_map, reader, model_dtype, progress, mapped=mapped)
        keep_stored_dtypes(model, weight_map, reader.headers, model_dtype)
        _initialize_lora(model, plan)
    model.batch_invariant = batch_invariant
    return model.eval()


def from_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | HasConfigDict,
    *,
    dtype: DtypeLike | None = None,
    device: DeviceLike | None = None,
    torch_dtype: DtypeLike | None = None,
    device_map: DeviceMap | None = None,
    attention: str = "auto",
    plan: ParallelPlan | None = None,
    prepare: Callable[[CausalLM], object] | None = None,
) -> CausalLM:
    """Build a model with random weights from a Hugging Face config.

    Args:
        config: a dict, a JSON file, a folder with config.json, a hub repo id, or a transformers `PretrainedConfig`. Its
            `quantization_config` is ignored, because it describes stored weights.
        dtype: dtype of the parameters, or its name ("bfloat16"). By default, and with "auto", the dtype in the config.
        device: device of the parameters: a torch device, its name, or the index of a CUDA device. Default: torch's
            default device, the CPU unless `torch.device(...)` as a context or `torch.set_default_device` names another.
        torch_dtype: transformers' older name of `dtype`.
        device_map: transformers' name of `device`: a device, `{"": device}`, or "auto" for the current CUDA device (the
            CPU if there is none).
        attention: name of an attention backend, or "auto".
        plan: shard the model over the ranks, as `parallelize` does. All ranks call this. With the same seed on each
            rank, the weights equal those of a single process.
        prepare: called with the model while it is on the meta device, before it is sharded; it may call `add_lora`.

    Returns:
        The model in training mode.

    Raises:
        ConfigError: a field is missing, bad or not supported, or the file cannot be read; the message names it.
        HubError: the repository cannot be found or reached.
        BackendError: the attention backend is unknown or not installed.
        InputError: an unknown dtype or device, two different ones, or a `device_map` of several devices or submodules.

    Examples:
        >>> import ligermodels as lm
        >>> config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        ...           "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = lm.from_config(config, dtype="float32")
    """
    check_function("prepare", prepare)
    target, model_dtype = _device(device, device_map, plan), resolve_dtype(dtype, torch_dtype)
    stored_config, companions = _read_config(config)
    hf_config, _ = without_heads(without_quantization(stored_config)[0])
    composed = _with_attention(family_of(hf_config).decoder_config(hf_config), attention)
    warn_of_other_family(hf_config)
    model = _on_meta(composed, export_spec(hf_config, composed, companions=companions))
    if prepare is not None:
        prepare(model)
    _allocate(model, model_dtype or dtype_of(hf_config), target, plan)
    model.reset_parameters()
    _initialize_lora(model, plan)
    return model


def from_transformers(
    hf_model: Any,
    *,
    dtype: DtypeLike | None = None,
    device: DeviceLike | None = None,
    torch_dtype: DtypeLike | None = None,
    device_map: DeviceMap | None = None,
    attention: str = "auto",
    consume: bool = False,
) -> CausalLM:
    """Build a native model with a copy of the weights of a transformers model.

    Args:
        hf_model: a `...ForCausalLM` of a supported family. It is not changed and shares no memory with the result.
            Parameters that are frozen in it are frozen in the result.
        dtype: dtype of the parameters, or its name ("bfloat16"). By default, and with "auto", the dtype of `hf_model`.
        device: device of the parameters: a torch device, its name, or the index of a CUDA device. Default: the device
            of `hf_model`.
        torch_dtype: transformers' older name of `dtype`.
        device_map: transformers' name of `device`: a device, `{"": device}`, or "auto" for the current CUDA device (the
            CPU if there is none).
        attention: name of an attention backend, or "auto".
        consume: free each tensor of `hf_model` once it has been copied. Peak memory is then one model and one tensor,
            and `hf_model` cannot be used afterwards.

    Returns:
        The model, in training or eval mode like `hf_model`.

    Raises:
        ConfigError: a field of the model's config is not supported; the message names it.
        CheckpointError: the tensors are not those of the config: the model has adapters (merge them first), quantised
            or offloaded weights. Or only some tensors of a fused parameter (q, k and v) are frozen.
        BackendError: the attention backend is unknown or not installed.
        InputError: `hf_model` is no transformers model, an unknown dtype or device, two different ones, or a
            `device_map` of several devices or submodules.

    Examples:
        >>> import ligermodels as lm
        >>> from transformers import AutoModelForCausalLM
        >>> hf_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        >>> model = lm.from_transformers(hf_model, device="cuda")
    """
    check_flag("consume", consume)
    hf_config = getattr(hf_model, "config", None)
    if not isinstance(hf_model, torch.nn.Module) or not isinstance(hf_config, HasConfigDict):
        raise InputError(
            f"from_transformers: takes a ...ForCausalLM of transformers in memory, got a {type(hf_model).__name__}; "
            "from_pretrained loads a checkpoint"
        )
    if getattr(hf_model, "peft_config", None):
        raise CheckpointError("from_transformers: the model has adapters; merge them first, by merge_and_unload()")
    first = next(hf_model.parameters())
    model_dtype = resolve_dtype(dtype, torch_dtype) or first.dtype
    target = require_device(resolve_device(device, device_map, first.device))
    state = check_state_dict(hf_model.state_dict(keep_vars=True), "from_transformers")
    fields, _ = without_quantization(hf_config.to_dict())
    family = family_of(fields)
    config = family.decoder_config(fields)
    if has_own_head(config, family, state.keys(), state.__getitem__):
        config, fields = with_own_head(config), untied(fields, nested=family.text is not None)
    config = _with_attention(config, attention)
    warn_of_other_family(fields)
    generation = getattr(hf_model, "generation_config", None)
    companions = Companions(None if generation is None else generation.to_diff_dict())
    model = _on_meta(config, export_spec(fields, config, companions=companions))
    allocate(model, model_dtype, "meta")
    weight_map = choose_layout(fields, config, state, persistent_tensors(model))
    weight_map.plan(state, persistent_tensors(model))
    keep_stored_dtypes(model, weight_map, state, model_dtype)
    move_state_dict(model, weight_map, state, partial(torch.empty_like, device=target), consume=consume)
    return model.train(hf_model.training)


def _check_quantize(quantize: QuantizedFormat | None, exclude: Sequence[str], head: QuantizedFormat | None) -> None:
    if quantize is not None:
        return check_format("quantize", quantize)
    for name, value in (("quantize_exclude", exclude or None), ("quantize_head", head)):
        if value is not None:
            raise InputError(f"{name}: got {short(value)} without `quantize`; give quantize too, or leave {name} out")


def _read_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | HasConfigDict,
) -> tuple[dict[str, Any], Companions]:
    """The `config` argument of `from_config` as a dict, and the files beside it where it is a checkpoint's."""
    if isinstance(config, Mapping):
        return as_config(config), Companions()
    if isinstance(config, HasConfigDict):
        return as_config(config.to_dict()), Companions()
    path = as_path(config, ConfigError, "config, a dict, a file, a folder or a repo id,")
    if path.suffix == ".json" or (os.path.lexists(path) and not os.path.isdir(path)):
        return read_json(path), Companions()
    folder = hub.resolve(config, weights=False)
    with reading(folder, lambda _: (read_json(folder / "config.json"), Companions.of(folder))) as found:
        return found


def _device(device: DeviceLike | None, device_map: DeviceMap | None, plan: ParallelPlan | None) -> torch.device:
    """The device of the parameters. With a plan, joins the launcher's process group, and the default is this rank's."""
    if plan is None:
        return require_device(resolve_device(device, device_map))
    from ligermodels.parallel.ranks import join, rank_device  # a large import

    join(None if device is None and device_map is None else resolve_device(device, device_map))
    return resolve_device(device, device_map, rank_device())


def _allocate(
    model: CausalLM, dtype: torch.dtype, device: torch.device, plan: ParallelPlan | None, *, mapped: bool = False
) -> None:
    """Allocate the parameters of a model on the meta device; with a plan, this rank's shards of them.

    ConfigError if the device has too little memory. Parameters that will be `mapped` from files are not counted, since
    files may be larger than memory.
    """
    allocate(model, dtype, "meta")
    if plan is None:
        needed = 0 if mapped else sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        with memory_for("config.json: a model of these sizes", device, needed, ConfigError):
            return allocate(model, dtype, device)
    from ligermodels.parallel.apply import parallelize

    parallelize(model, plan)
    if device.type != "meta":
        model.to_empty(device=device)


def _initialize_lora(model: CausalLM, plan: ParallelPlan | None) -> None:
    """Fill LoRA that `prepare` added while the model was on the meta device. Ranks draw the same numbers."""
    if not lora_layers(model) or model.device.type == "meta":
        return
    if plan is None:
        return initialize_lora(model)
    own = int(torch.randint(2**31, ()))  # the ranks' own random states may differ
    seed = Ranks(model.parameters()).from_first("prepare", lambda: own)
    with own_random_numbers(model.device, seed):
        initialize_lora(model)


def _on_meta(config: DecoderConfig, spec: ExportSpec | None = None) -> CausalLM:
    """The model on the meta device; ConfigError if a tensor would have more elements than torch can count."""
    try:
        with torch.device("meta"), skip_init():
            return CausalLM(config, spec)
    except RuntimeError as error:
        raise ConfigError(f"config.json: a size, as hidden_size, is too large: {str(error).splitlines()[0]}") from None


def _with_attention(config: DecoderConfig, backend: str) -> DecoderConfig:
    """`config` with this attention backend in all layers."""
    if backend == "auto":
        return config
    if not isinstance(backend, str) or not backends().get(backend, False):
        ready = ", ".join(name for name, installed in backends().items() if installed)
        raise BackendError(f"attention backend {short(backend)} is not installed or unknown; installed: {ready}")
    return replace(config, blocks=tuple(block.with_attention_backend(backend) for block in config.blocks))
