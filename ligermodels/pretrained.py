"""From a Hugging Face checkpoint or config to a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ligermodels.adapt.quantize import quantize as quantize_weights
from ligermodels.adapt.quantized_loading import load_weights
from ligermodels.archs import family_of
from ligermodels.archs.multimodal import tied_as_stored
from ligermodels.arguments import Quantized, check_flag, check_format, check_function
from ligermodels.convert import hub
from ligermodels.convert.config_json import as_config, dtype_of, read_json
from ligermodels.convert.dequantize import dequantized
from ligermodels.convert.export_spec import ExportSpec, SourceCheckpoint
from ligermodels.convert.files import COMPANIONS, PROCESSORS
from ligermodels.convert.input_files import as_path, is_present
from ligermodels.convert.loading import FileReader, Spec
from ligermodels.convert.placement import (
    DeviceLike,
    DeviceMap,
    DtypeLike,
    require_device,
    resolve_device,
    resolve_dtype,
)
from ligermodels.convert.quantization import Quantization, without_quantization
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import BackendError, CheckpointError, ConfigError, InputError, arguments_named, short
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors, skip_init
from ligermodels.layers.memory import memory_for
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import require_model, without_heads
from ligermodels.models.state_dict import move_state_dict, nearest_layout
from ligermodels.ops.attention.attention import backends
from ligermodels.parallel.plan import ParallelPlan

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@runtime_checkable
class HasConfigDict(Protocol):
    """A config object with its fields as a dict, as transformers' `PretrainedConfig` is."""

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
    quantize: Quantized | None = None,
    quantize_exclude: Sequence[str] = (),
    quantize_head: Quantized | None = None,
) -> CausalLM:
    """Load a checkpoint: its weights cast and placed on `device`, the host holding little more than them.

    Of one that holds Medusa heads too (`full-hf`), or a layer of multi-token prediction, this is the model alone;
    `MedusaModel.from_pretrained` and `MTPModel.from_pretrained` load those.
    Tensors in FP8 are dequantised to `dtype`, and the model is written without `quantization_config`.

    Args:
        name_or_path: a hub repo id or a local folder.
        dtype: of the parameters, or its name ("bfloat16"); by default, and with "auto", the one that config.json names.
        device: where the parameters go, a torch device, its name or the index of a CUDA device; by default the CPU. On
            "meta" the checkpoint is checked, and no tensor is read.
        torch_dtype: transformers' older name of `dtype`.
        device_map: transformers' name of `device`; also `{"": device}`, or "auto" for the current CUDA device, without
            one the CPU.
        revision, token, cache_dir, local_files_only: as in huggingface_hub.
        attention: name of an attention backend, or "auto".
        mapped: on the CPU, weights in the stored dtype and order stay mapped from their files and are read when they
            are used. Changing them changes no file. While the model lives, do not write into those files; replacing
            them, as `save_pretrained` does, is safe.
        progress: called with bytes done and bytes in all, those that this rank reads.
        plan: spread the model over the ranks, see `parallelize`: each reads and holds its own part alone, on its GPU or
            else the CPU. All ranks call this.
        prepare: called with the model while it is on the meta device, before it is spread: `add_lora`, say.
        quantize: "float8" or "int4": round the weights of the blocks' linear layers as they are read, as
            `lm.quantize(model, quantize)` does it to the model in `dtype`. Memory holds the quantised model and about a
            gigabyte more.
        quantize_exclude: with `quantize`, patterns of layers that are not rounded: `exclude` of `lm.quantize`.
        quantize_head: with `quantize`, "float8" or "int4": round the head too: `head` of `lm.quantize`.

    Raises:
        HubError: the repository cannot be found or reached.
        ConfigError: config.json has a missing, bad or unsupported field (named).
        CheckpointError: files or tensors are missing, damaged or do not fit (all of them named).
        InputError: an unknown dtype or device, two different ones, or a `device_map` of several devices or submodules.
            Also as `lm.quantize`; where a `plan` is given with it; and for `quantize_exclude` or `quantize_head`
            without it.
    """
    check_flag("mapped", mapped)
    check_function("progress", progress)
    check_function("prepare", prepare)
    if quantize is not None:
        check_format("quantize", quantize)
    elif quantize_exclude:
        raise InputError(f"quantize_exclude: got {short(quantize_exclude)} without `quantize`, which it is for")
    elif quantize_head is not None:
        raise InputError(f"quantize_head: got {short(quantize_head)} without `quantize`, which it is for")
    place, kind = _place(device, device_map, plan), resolve_dtype(dtype, torch_dtype)
    folder = hub.resolve(
        name_or_path, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
    )
    with reading(folder, partial(_open, folder, kind), Ranks() if plan is None else Ranks.of_group()) as read:
        found, hf_config, checkpoint, kind = read.stored_config, read.hf_config, read.checkpoint, read.dtype
        config = _with_attention(read.config, attention)
        model = _skeleton(config)
        weight_map = choose_layout(found, config, checkpoint.headers, persistent_tensors(model))
        extra = checkpoint.headers.keys() - weight_map.sources() - weight_map.aliases.keys()
        repo_id = None if os.path.isdir(Path(name_or_path).expanduser()) else os.fspath(name_or_path)
        source = SourceCheckpoint(
            folder.absolute(),
            found,
            weight_map,
            sorted(extra),
            family_of(hf_config).text is not None,
            read.companions.processors,
            repo_id,
            read.quantization,
        )
        model.export_spec = replace(_export_spec(hf_config, config, weight_map, read.companions), source=source)
        weight_map.plan(checkpoint.headers, persistent_tensors(model))
        if prepare is not None:
            prepare(model)
        if quantize is not None:
            with arguments_named(exclude="quantize_exclude", head="quantize_head"):
                quantize_weights(model, quantize, exclude=quantize_exclude, head=quantize_head)
        _allocate(model, kind, place, plan, mapped=mapped and place.type == "cpu")
        initialize_buffers(model, config.initializer_range)
        if place.type != "meta":
            load_weights(model, weight_map, checkpoint, kind, progress, mapped=mapped)
        _keep_dtypes(model, weight_map, checkpoint.headers, kind)
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
    """A model with random weights from a Hugging Face config.

    Args:
        config: a dict, a JSON file, a folder with config.json, a hub repo id, or a transformers `PretrainedConfig`. Its
            `quantization_config`, if any, is left out: it is of stored weights.
        dtype, device, torch_dtype, device_map, attention: as of `from_pretrained`.
        plan, prepare: as of `from_pretrained`. The weights are those of one process with the same seed on each rank.

    Raises ConfigError, naming the field or file; HubError when the repository cannot be found or reached; InputError as
    `from_pretrained`.
    """
    check_function("prepare", prepare)
    place, kind = _place(device, device_map, plan), resolve_dtype(dtype, torch_dtype)
    about = None
    if isinstance(config, Mapping):
        hf_config = as_config(config)
    elif isinstance(config, HasConfigDict):
        hf_config = as_config(config.to_dict())
    elif (path := as_path(config, ConfigError, "config, a dict, a file, a folder or a repo id,")).suffix == ".json" or (
        os.path.lexists(path) and not os.path.isdir(path)
    ):
        hf_config = read_json(path)
    else:
        folder = hub.resolve(config, weights=False)
        with reading(folder, lambda _: (read_json(folder / "config.json"), _Companions.of(folder))) as read:
            hf_config, about = read
    hf_config, _ = without_quantization(hf_config)
    family = family_of(hf_config)
    composed = _with_attention(family.decoder_config(hf_config), attention)
    model = _skeleton(composed, _export_spec(hf_config, composed, family.weight_maps(composed)[0], about))
    if prepare is not None:
        prepare(model)
    _allocate(model, kind or dtype_of(hf_config), place, plan)
    model.reset_parameters()
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
    """A native model with the weights of a transformers model in memory, `...ForCausalLM` of a supported family.

    Args:
        hf_model: the model. It stays as it is, and shares nothing with the result. What is frozen in it is frozen in
            the result.
        dtype, device, torch_dtype, device_map: as of `from_pretrained`; by default, and with a dtype "auto", those of
            `hf_model`.
        attention: name of an attention backend, or "auto".
        consume: free each of its tensors once it has been copied, so that memory holds one model and one tensor; it
            cannot be used any more.

    Raises:
        ConfigError: a field of its config is not supported (named).
        CheckpointError: its tensors are not those that its config says: adapters (merge them first), quantised weights.
            Or some of the tensors that are one parameter here (of q, k and v, say) are frozen, and others are not.
        InputError: as `from_pretrained`.
    """
    check_flag("consume", consume)
    is_model = isinstance(hf_model, torch.nn.Module)
    if not is_model or not isinstance(getattr(hf_model, "config", None), HasConfigDict):
        raise InputError(
            f"from_transformers: takes a ...ForCausalLM of transformers in memory, got a {type(hf_model).__name__}; "
            "from_pretrained loads a checkpoint"
        )
    first = next(hf_model.parameters())
    kind = resolve_dtype(dtype, torch_dtype) or first.dtype
    place = require_device(resolve_device(device, device_map, first.device))
    state = hf_model.state_dict(keep_vars=True)
    hf_config, _ = without_quantization(hf_model.config.to_dict())
    family = family_of(hf_config)
    config = _with_attention(family.decoder_config(hf_config), attention)
    spec = _export_spec(hf_config, config, family.weight_maps(config)[0])
    generation = getattr(hf_model, "generation_config", None)
    if generation is not None:
        spec = replace(spec, generation_config=generation.to_diff_dict())
    model = _skeleton(config, spec)
    allocate(model, kind, "meta")
    weight_map = choose_layout(hf_config, config, state, persistent_tensors(model))
    weight_map.plan(state, persistent_tensors(model))
    _keep_dtypes(model, weight_map, state, kind)
    move_state_dict(model, weight_map, state, partial(torch.empty_like, device=place), consume=consume)
    return model.train(hf_model.training)


def choose_layout(
    hf_config: Mapping[str, Any], config: DecoderConfig, headers: Mapping[str, Spec], state: Mapping[str, Tensor]
) -> WeightMap:
    """Of the layouts in which this family's checkpoints are found, the one that fits best: see `nearest_layout`."""
    _, heads = without_heads(hf_config)
    family = family_of(hf_config)
    layout = nearest_layout(family.weight_maps(config), headers, state)
    return replace(layout, ignored=[*layout.ignored, *heads, *family.mtp.ignored(hf_config)])


def _place(device: DeviceLike | None, device_map: DeviceMap | None, plan: ParallelPlan | None) -> torch.device:
    if plan is None:
        return require_device(resolve_device(device, device_map))
    from ligermodels.parallel.ranks import join, rank_device  # a large import

    join(None if device is None and device_map is None else resolve_device(device, device_map))
    return resolve_device(device, device_map, rank_device())


def _allocate(
    model: CausalLM, dtype: torch.dtype, device: torch.device, plan: ParallelPlan | None, *, mapped: bool = False
) -> None:
    """Give a model on the meta device memory; with a plan that of this rank's part. ConfigError where there is less.

    With `mapped`, memory is what files are mapped to, which may be more than there is.
    """
    if plan is None:
        allocate(model, dtype, "meta")
        needed = 0 if mapped else sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        with memory_for("config.json: a model of these sizes", device, needed, ConfigError):
            return allocate(model, dtype, device)
    from ligermodels.parallel.apply import parallelize

    allocate(model, dtype, "meta")
    parallelize(model, plan)
    if device.type != "meta":
        model.to_empty(device=device)


def _keep_dtypes(model: CausalLM, weight_map: WeightMap, headers: Mapping[str, Spec], dtype: torch.dtype) -> None:
    """Have the model, loaded in `dtype`, written with what it keeps in another dtype as it was stored."""
    spec, dtypes = model.require_export_spec(), weight_map.stored_dtypes(headers, persistent_tensors(model), dtype)
    source = spec.source
    if source is not None:
        source = replace(source, weight_map=replace(source.weight_map, dtypes=dtypes))
    model.export_spec = replace(spec, weight_map=replace(spec.weight_map, dtypes=dtypes), source=source)


def _skeleton(config: DecoderConfig, spec: ExportSpec | None = None) -> CausalLM:
    """The model on the meta device; ConfigError when a tensor would have more elements than can be counted."""
    try:
        with torch.device("meta"), skip_init():
            return CausalLM(config, spec)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"config.json: hidden_size, or a size beside it, is too large: {reason}") from None


class _Companions(NamedTuple):
    """Beside the weights of a checkpoint: generation_config.json, and name -> path of the tokenizer's files, and of
    those of more than text."""

    generation_config: dict[str, Any] | None
    tokenizer: Mapping[str, Path]
    processors: Mapping[str, Path]

    @classmethod
    def of(cls, folder: Path) -> _Companions:
        """ConfigError for a generation_config.json that is none."""
        found = _present(folder, COMPANIONS)
        found.pop("config.json", None)
        generation = found.pop("generation_config.json", None)
        return cls(None if generation is None else read_json(generation), found, _present(folder, PROCESSORS))


class _Opened(NamedTuple):
    """What is read of a checkpoint: config.json; that of the model alone, and what it composes to; the weights, in
    `dtype` where they are quantised; and the files beside them."""

    stored_config: dict[str, Any]
    hf_config: dict[str, Any]
    config: DecoderConfig
    checkpoint: FileReader
    dtype: torch.dtype
    quantization: Quantization | None
    companions: _Companions


def _open(folder: Path, dtype: torch.dtype | None, opened: ExitStack) -> _Opened:
    """The checkpoint in `folder`, whose files are closed with `opened`; `dtype` is config.json's by default. Raises as
    `from_pretrained`."""
    stored_config, quantization = without_quantization(read_json(folder / "config.json"))
    if "model_type" not in stored_config:
        require_model(stored_config)
    hf_config, _ = without_heads(stored_config)
    family, dtype = family_of(hf_config), dtype or dtype_of(hf_config)
    # Errors of the config come before those of the weights, unless these say what the config leaves open.
    config = family.decoder_config(hf_config) if family.text is None else None
    checkpoint = dequantized(opened.enter_context(Checkpoint(folder)), quantization, dtype)
    if config is None:
        hf_config = tied_as_stored(hf_config, family, checkpoint)
        config = family.decoder_config(hf_config)
    return _Opened(stored_config, hf_config, config, checkpoint, dtype, quantization, _Companions.of(folder))


def _export_spec(
    hf_config: dict[str, Any], config: DecoderConfig, weight_map: WeightMap, about: _Companions | None = None
) -> ExportSpec:
    """What the model goes back out as: the layout it came in, or that of the language model alone."""
    text = family_of(hf_config).text
    if text is not None:
        hf_config = text(hf_config)
        weight_map = family_of(hf_config).weight_maps(config)[0]
    return ExportSpec(
        hf_config=hf_config,
        weight_map=weight_map,
        generation_config=None if about is None else about.generation_config,
        default_theta=family_of(hf_config).default_theta,
        attribute_map=family_of(hf_config).attribute_map,
        files={} if about is None else about.tokenizer,
    )


def _present(folder: Path, names: Collection[str]) -> dict[str, Path]:
    return {name: folder / name for name in names if is_present(folder / name, CheckpointError)}


def _with_attention(config: DecoderConfig, backend: str) -> DecoderConfig:
    """`config` with every layer's attention on the backend of this name."""
    if backend == "auto":
        return config
    if not isinstance(backend, str) or not backends().get(backend, False):
        ready = ", ".join(name for name, installed in backends().items() if installed)
        raise BackendError(f"attention backend {short(backend)} is not installed or unknown; installed: {ready}")
    blocks = (replace(block, mixer=block.mixer.with_attention_backend(backend)) for block in config.blocks)
    return replace(config, blocks=tuple(blocks))
