"""Add LoRA to linear layers of a model, by their names in transformers, and merge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.adapt.patterns import full_matches
from ligermodels.arguments import check_count, check_flag, check_number
from ligermodels.convert.mappings import TensorView, WeightMapping
from ligermodels.convert.placement import DtypeLike, resolve_dtype
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import InputError, short
from ligermodels.layers import Linear, MoE
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.lora import MOST_RANKS, LoRA, LoRAPart
from ligermodels.layers.quantized import quantized_layers
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.native import check_native
from ligermodels.models.state_dict import layout_in_memory

Model = TypeVar("Model", bound=CausalLM)


def add_lora(
    model: Model,
    r: int = 16,
    *,
    lora_alpha: float = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    use_rslora: bool = False,
    dtype: DtypeLike | None = None,
) -> Model:
    """Freeze a model and add LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) to its linear layers, in place.

    A layer with weight W (out, in) then computes W x + scaling * B A dropout(x), with A (r, in) and B (out, r). Only A
    and B are trained. W may be quantised (QLoRA; Dettmers et al., 2023, https://arxiv.org/abs/2305.14314) or compute in
    float8. Add LoRA before the model is sharded and before an optimizer is created. `save_adapter` writes A and B,
    `merge_lora` adds them to W. Arguments have PEFT's names.

    Args:
        model: the model, without LoRA and not sharded.
        r: rank of the updates. Default: 16.
        lora_alpha: numerator of the scaling lora_alpha / r. Default: 32.
        lora_dropout: probability of zeroing an element of x, in training mode. q, k and v share a mask, and so do gate
            and up; in PEFT each has its own. Default: 0.
        target_modules: names of linear layers in transformers ("q_proj" or "layers.0.self_attn.q_proj"), a regular
            expression that matches whole paths, or "all-linear". Default: "all-linear", all linear layers of the
            blocks, except routers, experts, and dense MLPs or shared experts with the experts' names.
        use_rslora: the scaling is lora_alpha / sqrt(r) instead (Kalajdzievski, 2023). Default: False.
        dtype: dtype of A and B, which compute in the dtype of x. Default: the dtype of W, or the model's dtype if W is
            quantised.

    Returns:
        `model`.

    Raises:
        InputError: an argument is out of range; a name in `target_modules` matches no layer (the message lists the
            known names); or the model has LoRA already, or is sharded.
        ConfigError: the model was composed by hand, and has no `export_spec` with the names.

    Examples:
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, quantize="int4")  # doctest: +SKIP
        >>> lm.add_lora(model, r=16, target_modules=["q_proj", "v_proj"])  # doctest: +SKIP
    """
    check_adaptable(model, "add_lora")
    check_flag("use_rslora", use_rslora)
    r = check_count("r", r, most=MOST_RANKS)
    check_number("lora_alpha", lora_alpha, positive=True)
    known = targets(model, transformers_layout(model))
    chosen = set(_chosen(known, target_modules, model))
    parts = {name: LoRAPart(name, known[name].views, r, lora_alpha, use_rslora) for name in known if name in chosen}
    return insert(model, new_updates(model, known, parts, lora_dropout, dtype))


def merge_lora(model: Model, *, dequantize: bool = False) -> Model:
    """Add the LoRA updates to the weights of the model, in place, and remove LoRA.

    Each weight is added to its update in float32 and rounded once; PEFT's `merge_and_unload` rounds the update and the
    sum. The weights stay frozen; `model.requires_grad_()` makes them trainable.

    Args:
        model: a model with LoRA, not sharded.
        dequantize: keep merged weights in the model's dtype, so that `save_pretrained` can write the model. Default:
            False, quantised weights are rounded to their format again, and small updates are lost in the rounding.

    Returns:
        `model`.

    Raises:
        InputError: the model has no LoRA, or is sharded.

    Examples:
        >>> lm.merge_lora(model).save_pretrained("merged/")  # doctest: +SKIP
    """
    check_flag("dequantize", dequantize)
    updates = require_lora(model, "merge_lora")
    if is_sharded(model):
        raise InputError("merge_lora: the model is sharded; save_adapter, then load it into a whole model and merge")
    for name in updates:
        layer: Any = model.get_submodule(name)
        layer.merge_update(model.dtype if dequantize else None)
    if dequantize:
        for layer in quantized_layers(model).values():  # layers without LoRA
            layer.make_dense(model.dtype)
    return model


@dataclass(frozen=True)
class Target:
    """A linear layer of transformers, as views of the weight of the native linear layer called `module`."""

    module: str
    views: tuple[TensorView, ...]


def targets(model: CausalLM, weight_map: WeightMap) -> dict[str, Target]:
    """Path in transformers -> linear layer of a block, for all layers that LoRA can adapt.

    Excluded are dense MLPs and shared experts with the names of experts (Qwen 3 MoE). PEFT takes such names for the
    experts, which were linear layers in earlier versions of transformers, and could not load an adapter.
    """
    modules = dict(model.named_modules())
    mixtures = tuple(f"{name}." for name, module in modules.items() if isinstance(module, MoE))
    expert_names = _names_of_experts(model, mixtures) if mixtures else set()
    uses = Counter(source for mapping in weight_map.mappings for source in _sources(mapping))
    adaptable: dict[str, Target] = {}
    for mapping in weight_map.mappings:
        name, _, parameter = mapping.target.rpartition(".")
        sources = {source.removesuffix(".weight"): source for source in _sources(mapping)}
        # A name without ".weight" maps to itself; a source in several mappings is shared by several layers.
        shared = any(path == source or uses[source] > 1 for path, source in sources.items())
        if parameter != "weight" or shared or not expert_names.isdisjoint(map(leaf, sources)):
            continue
        if _is_adaptable(name, modules.get(name), mapping):
            for path, source in sources.items():
                views = sorted((view for view in mapping.views if view.source == source), key=lambda view: view.start)
                adaptable[path] = Target(name, tuple(views))
    return adaptable


def _sources(mapping: WeightMapping) -> list[str]:
    """The names of the checkpoint's tensors that make up a tensor, in order."""
    return list(dict.fromkeys(view.source for view in mapping.views))


def _is_adaptable(name: str, module: nn.Module | None, mapping: WeightMapping) -> bool:
    """Whether the module is a linear layer of a block with the forward of `Linear`, and its parts are rows."""
    if not (name.startswith("decoder.blocks.") and isinstance(module, Linear)):
        return False
    if type(module).forward is not Linear.forward:  # a user's class
        return False
    try:
        mapping.split(torch.empty(module.out_features, device="meta"))
    except (RuntimeError, IndexError):
        return False
    return True


def transformers_layout(model: CausalLM) -> WeightMap:
    """The weight map of transformers' model for the same checkpoint, including a vision tower."""
    spec = model.require_export_spec()
    if spec.source is not None and spec.source.nested:
        return family_of(spec.source.hf_config).weight_maps(model.config)[0]
    return layout_in_memory(spec, model.config)


def new_updates(
    model: CausalLM, known: Mapping[str, Target], parts: Mapping[str, LoRAPart], dropout: float, dtype: DtypeLike | None
) -> dict[str, LoRA]:
    """LoRA updates that are not yet in the model.

    Args:
        model: the model to adapt.
        known: path in transformers -> linear layer, from `targets`.
        parts: path in transformers -> its part of an update.
        dropout: probability in [0, 1).
        dtype: dtype of A and B; None for the dtype of the weight.

    Returns:
        Native name of the linear layer -> its update.

    Raises:
        InputError: `dropout` is out of range.
    """
    if check_number("lora_dropout", dropout) >= 1:
        raise InputError(f"lora_dropout: must lie in [0, 1), got {short(dropout)}")
    resolved = resolve_dtype(dtype, None)
    by_module: dict[str, list[LoRAPart]] = {}
    for path, part in parts.items():
        by_module.setdefault(known[path].module, []).append(part)
    linear: Callable[[str], Any] = model.get_submodule
    options: dict[str, Any] = {"dropout": dropout, "dtype": resolved, "default_dtype": model.dtype}
    return {name: LoRA(linear(name), own, **options) for name, own in by_module.items()}


def insert(model: Model, updates: Mapping[str, LoRA], *, trainable: bool = True) -> Model:
    """Freeze a model and set the LoRA updates of its linear layers.

    Args:
        model: the model, changed in place.
        updates: native name of the linear layer -> its update.
        trainable: whether A and B require gradients. Default: True.

    Returns:
        `model`.
    """
    model.requires_grad_(False)
    for name, update in updates.items():
        layer: Any = model.get_submodule(name)
        layer.update = update.requires_grad_(trainable)
    return model


def lora_layers(model: nn.Module) -> dict[str, LoRA]:
    """The LoRA updates of a model, by the native names of their linear layers."""
    named = ((name, getattr(module, "update", None)) for name, module in model.named_modules())
    return {name: update for name, update in named if isinstance(update, LoRA)}


def without_lora(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint, without the tensors of LoRA, by native name."""
    updates = {f"{name}.update.{part}" for name, lora in lora_layers(model).items() for part in lora.lora_parameters()}
    return {name: tensor for name, tensor in persistent_tensors(model).items() if name not in updates}


def require_lora(model: CausalLM, function: str) -> dict[str, LoRA]:
    """`lora_layers` of a native model with LoRA; InputError, naming the `function`, for other models."""
    check_native(model, function)
    if not (updates := lora_layers(model)):
        raise InputError(f"{function}: the model has no LoRA; add_lora or load_adapter adds one")
    return updates


def check_adaptable(model: Any, function: str) -> None:
    """Raise InputError, naming the `function`, unless LoRA can be added to the model."""
    check_native(model, function)
    if lora_layers(model):
        raise InputError(f"{function}: the model has LoRA already; merge_lora it, or start from a model without")
    if is_sharded(model):
        raise InputError(f"{function}: the model is sharded already; add LoRA first, then shard")


def leaf(path: str) -> str:
    """The last component of a dotted name."""
    return path.rpartition(".")[2]


def _names_of_experts(model: CausalLM, mixtures: tuple[str, ...]) -> set[str]:
    """The last components of the names of routers and experts of `mixtures` in checkpoints of the family."""
    layouts = family_of(model.hf_config).weight_maps(model.config)
    parameters = {f"{mixture}{part}" for mixture in mixtures for part in ("router.weight", "gate_up", "down")}
    mappings = (mapping for layout in layouts for mapping in layout.mappings if mapping.target in parameters)
    return {leaf(source.removesuffix(".weight")) for mapping in mappings for source in _sources(mapping)}


def _chosen(known: Mapping[str, Target], target_modules: str | Sequence[str], model: CausalLM) -> list[str]:
    """The paths that `target_modules` names; InputError for a name that matches no path."""
    if target_modules == "all-linear":
        paths = list(known)
    elif isinstance(target_modules, str):
        try:
            paths = list(compress(known, full_matches(target_modules, list(known))))
        except ValueError as error:
            raise InputError(f"target_modules: {short(target_modules)} {error}") from None
    elif not isinstance(target_modules, Iterable) or not all(isinstance(name, str) for name in target_modules):
        raise InputError(f"target_modules: must be names, a regular expression or 'all-linear', got {target_modules!r}")
    else:
        paths = []
        for name in target_modules:
            matching = [path for path in known if f".{path}".endswith(f".{name}")]
            if not matching:
                raise InputError(_unknown(name, known, model))
            paths += matching
    if not target_modules:
        raise InputError("target_modules: is empty; name a linear layer")
    if not paths:
        raise InputError(_unknown(target_modules, known, model))
    return paths


def _unknown(name: Any, known: Mapping[str, Target], model: CausalLM) -> str:
    """The message for a name that matches no linear layer."""
    weight_map = transformers_layout(model)
    leaves = list(dict.fromkeys(map(leaf, known)))
    if name in leaves:
        reason = f"is a regular expression that matches no whole path; for layers of this name give [{name!r}]"
    elif any(name in source.split(".") for source in (*weight_map.sources(), *weight_map.aliases)):
        reason = "is not a linear layer that native LoRA adapts: no embeddings, heads, norms, routers or experts"
    else:
        reason = "names no linear layer"
    return f"target_modules: {name!r} {reason}; known: {', '.join(leaves)}"
