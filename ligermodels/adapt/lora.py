"""LoRA on a model: which of its linear layers are adapted, under their names in transformers; merging."""

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
from ligermodels.convert.mappings import TensorView
from ligermodels.convert.placement import DtypeLike, resolve_dtype
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import InputError, short
from ligermodels.layers import MoE
from ligermodels.layers.float8 import Float8Linear
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.lora import MOST_RANKS, LoRALinear, LoRAPart
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.native import check_native
from ligermodels.models.state_dict import layout_in_memory

Model = TypeVar("Model", bound=CausalLM)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module has its hooks."""


_LINEAR = (nn.Linear.forward, Float8Linear.forward, LoRALinear.forward)
"""Of classes whose layers LoRA can take the place of."""


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

    Of a layer W (out, in) with an A (r, in) and a B (out, r): W x + scaling * B A dropout(x). Only A and B are trained.
    Add LoRA before the model is sharded, and make optimizers after it. `save_adapter` writes it, `merge_lora` adds it
    to W. Arguments have PEFT's names.

    Args:
        model: stays the same object.
        r: rank of the updates.
        lora_alpha: the scaling is lora_alpha / r, or with `use_rslora` lora_alpha / sqrt(r) (Kalajdzievski, 2023).
        lora_dropout: probability that an element of x is zero, in training mode. q, k and v share a mask, as do gate
            and up; in PEFT each has its own.
        target_modules: names of linear layers in transformers ("q_proj", or longer: "layers.0.self_attn.q_proj"), a
            regular expression that whole paths match, or "all-linear": all that are in the blocks; in a mixture of
            experts neither routers and experts, nor dense MLPs and shared experts of the experts' names.
        use_rslora: see `lora_alpha`.
        dtype: of A and B, by default that of W. They compute in the dtype of x.

    Returns `model`.

    Raises:
        InputError: an argument out of range; a name in `target_modules` that no such layer has (known ones are listed);
            a model that has LoRA already, is sharded, or quantised; hooks on a layer that LoRA takes the place of.
        ConfigError: the model was composed by hand and has no `export_spec`, which has the names.
    """
    check_adaptable(model, "add_lora")
    check_flag("use_rslora", use_rslora)
    r = check_count("r", r, most=MOST_RANKS)
    check_number("lora_alpha", lora_alpha, positive=True)
    found = targets(model, transformers_layout(model))
    chosen = set(_chosen(found, target_modules, model))
    parts = {name: LoRAPart(name, found[name].views, r, lora_alpha, use_rslora) for name in found if name in chosen}
    return insert(model, new_layers(model, found, parts, lora_dropout, dtype))


def merge_lora(model: Model) -> Model:
    """Add the LoRA updates to the weights of the model, in place, and remove them; returns `model`.

    The weights are those of PEFT's `merge_and_unload`, and stay frozen: `model.requires_grad_()` makes them trainable.
    Raises InputError when there is no LoRA, the model is sharded, or a LoRA layer has hooks.
    """
    layers = require_lora(model, "merge_lora")
    if is_sharded(model):
        raise InputError("merge_lora: the model is sharded; save_adapter, then load it into a whole model and merge")
    check_untouched(layers, "merge_lora")
    for name, layer in layers.items():
        model.set_submodule(name, layer.merged())
    return model


@dataclass(frozen=True)
class Target:
    """The native linear layer `module`, in which the `views` of its weight are a linear layer of transformers."""

    module: str
    views: tuple[TensorView, ...]


def targets(model: CausalLM, weight_map: WeightMap) -> dict[str, Target]:
    """Path in transformers -> the linear layer of a block: all that LoRA can adapt.

    PEFT takes names of experts, once linear layers of their own, for the experts wherever they are: dense MLPs of the
    same names beside them (Qwen 3 MoE), and shared experts, are left out, for no adapter of theirs could be loaded.
    """
    modules = dict(model.named_modules())
    mixtures = tuple(f"{name}." for name, module in modules.items() if isinstance(module, MoE))
    taken = _names_of_experts(model, mixtures) if mixtures else set()
    uses = Counter(source for each in weight_map.mappings for source in {view.source for view in each.views})
    found: dict[str, Target] = {}
    for mapping in weight_map.mappings:
        name, _, kind = mapping.target.rpartition(".")
        linear = modules.get(name)
        sources = dict.fromkeys(view.source for view in mapping.views)
        if (
            not isinstance(linear, nn.Linear)
            or type(linear).forward not in _LINEAR  # a layer of another kind
            or kind != "weight"
            or not name.startswith("decoder.blocks.")
            or not all(source.endswith(".weight") and uses[source] == 1 for source in sources)
            or any(leaf(source.removesuffix(".weight")) in taken for source in sources)
        ):
            continue
        try:  # LoRA needs parts that are rows.
            mapping.split(torch.empty(linear.weight.shape[0], device="meta"))
        except (RuntimeError, IndexError):
            continue
        for source in sources:
            views = sorted((view for view in mapping.views if view.source == source), key=lambda view: view.start)
            found[source.removesuffix(".weight")] = Target(name, tuple(views))
    return found


def transformers_layout(model: CausalLM) -> WeightMap:
    """The weight map of transformers' model of the same checkpoint: with its vision tower, if it has one."""
    spec = model.require_export_spec()
    if spec.source is not None and spec.source.nested:
        return family_of(spec.source.hf_config).weight_maps(model.config)[0]
    return layout_in_memory(spec, model.config)


def new_layers(
    model: CausalLM, found: Mapping[str, Target], parts: Mapping[str, LoRAPart], dropout: float, dtype: DtypeLike | None
) -> dict[str, LoRALinear]:
    """Native name -> LoRA layer, not yet in the model, for `parts`: path in transformers -> part."""
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"lora_dropout: must lie in [0, 1), got {short(dropout)}")
    kind = resolve_dtype(dtype, None)
    by_module: dict[str, list[LoRAPart]] = {}
    for path, part in parts.items():
        by_module.setdefault(found[path].module, []).append(part)
    linear: Callable[[str], Any] = model.get_submodule
    check_untouched({name: linear(name) for name in by_module}, "LoRA")
    return {name: LoRALinear(linear(name), each, dropout=dropout, dtype=kind) for name, each in by_module.items()}


def insert(model: Model, layers: Mapping[str, LoRALinear], *, trainable: bool = True) -> Model:
    """Freeze `model`, and put the LoRA layers in place of the linear ones."""
    model.requires_grad_(False)
    for name, layer in layers.items():
        model.set_submodule(name, layer)
        for parameter in layer.lora_parameters().values():
            parameter.requires_grad_(trainable)
    return model


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The LoRA layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def without_lora(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that are no LoRA's: those of its checkpoint, by native name."""
    updates = {f"{name}.{part}" for name, layer in lora_layers(model).items() for part in layer.lora_parameters()}
    return {name: tensor for name, tensor in persistent_tensors(model).items() if name not in updates}


def require_lora(model: CausalLM, what: str) -> dict[str, LoRALinear]:
    """`lora_layers`; InputError when there are none, or the model is no native one."""
    check_native(model, what)
    if not (found := lora_layers(model)):
        raise InputError(f"{what}: the model has no LoRA; add_lora or load_adapter adds one")
    return found


def check_untouched(layers: Mapping[str, nn.Module], what: str) -> None:
    """InputError when one of the layers, by name, has hooks or a forward of its own, which its successor would lack."""
    for name, layer in layers.items():
        if "forward" in vars(layer) or any(getattr(layer, hooks) for hooks in HOOKS):
            raise InputError(
                f"{what}: {name} has hooks or a forward of its own, which the layer in its place would not run; remove "
                "them, and set them again on the new layer"
            )


def check_adaptable(model: Any, what: str) -> None:
    """InputError unless LoRA can be added to the model."""
    check_native(model, what)
    if lora_layers(model):
        raise InputError(f"{what}: the model has LoRA already; merge_lora it, or start from a model without")
    if is_sharded(model):
        raise InputError(f"{what}: the model is sharded already; add LoRA first, then shard")
    check_unquantized(model, what, "add LoRA to the model as it is stored, and quantise it after merge_lora")


def leaf(path: str) -> str:
    """The last component of a dotted name."""
    return path.rpartition(".")[2]


def _names_of_experts(model: CausalLM, mixtures: tuple[str, ...]) -> set[str]:
    """The last components of the paths that checkpoints of the family have for routers and experts of `mixtures`."""
    layouts = family_of(model.hf_config).weight_maps(model.config)
    targets = {f"{mixture}{part}" for mixture in mixtures for part in ("router.weight", "gate_up", "down")}
    mappings = (each for layout in layouts for each in layout.mappings if each.target in targets)
    return {leaf(view.source.removesuffix(".weight")) for each in mappings for view in each.views}


def _chosen(found: Mapping[str, Target], wanted: str | Sequence[str], model: CausalLM) -> list[str]:
    """The paths that `target_modules` names; InputError for a name that names none."""
    if wanted == "all-linear":
        names = list(found)
    elif isinstance(wanted, str):
        try:
            names = list(compress(found, full_matches(wanted, list(found))))
        except ValueError as error:
            raise InputError(f"target_modules: {short(wanted)} {error}") from None
    elif not isinstance(wanted, Iterable) or not all(isinstance(name, str) for name in wanted):
        raise InputError(f"target_modules: must be names, a regular expression or 'all-linear', got {wanted!r}")
    else:
        names = []
        for name in wanted:
            matching = [path for path in found if f".{path}".endswith(f".{name}")]
            if not matching:
                raise InputError(_unknown(name, found, model))
            names += matching
    if not names:
        raise InputError(_unknown(wanted, found, model) if wanted else "target_modules: is empty; name a linear layer")
    return names


def _unknown(name: Any, found: Mapping[str, Target], model: CausalLM) -> str:
    weight_map = transformers_layout(model)
    leaves = list(dict.fromkeys(map(leaf, found)))
    if name in leaves:
        what = f"is a regular expression that whole paths match, and none does; for layers of this name give [{name!r}]"
    elif any(name in source.split(".") for source in (*weight_map.sources(), *weight_map.aliases)):
        what = "is not a linear layer that native LoRA adapts: no embeddings, heads, norms, routers or experts"
    else:
        what = "names no linear layer"
    return f"target_modules: {name!r} {what}; known: {', '.join(leaves)}"
