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

    A layer W (out, in) with an A (r, in) and a B (out, r) computes W x + scaling * B A dropout(x). Only A and B are
    trained. W may be quantised (QLoRA; Dettmers et al., 2023, https://arxiv.org/abs/2305.14314) or compute in float8.
    Add LoRA before the model is sharded, and make optimizers after it. `save_adapter` writes it, `merge_lora` adds it
    to W. Arguments have PEFT's names.

    Args:
        model: stays the same object.
        r: rank of the updates.
        lora_alpha: the scaling is lora_alpha / r, or with `use_rslora` lora_alpha / sqrt(r) (Kalajdzievski, 2023).
        lora_dropout: probability that an element of x is zero, in training mode. q, k and v share a mask, as do gate
            and up; in PEFT each has its own.
        target_modules: names of linear layers in transformers ("q_proj", or longer: "layers.0.self_attn.q_proj"), a
            regular expression that whole paths match, or "all-linear": all linear layers of the blocks; in a mixture of
            experts neither routers and experts, nor dense MLPs and shared experts of the experts' names.
        use_rslora: see `lora_alpha`.
        dtype: of A and B, by default the dtype of W, or of the model where W is quantised. They compute in the dtype
            of x.

    Returns `model`.

    Raises:
        InputError: an argument out of range; a name in `target_modules` that no such layer has (known ones are listed);
            a model that has LoRA already, or is sharded.
        ConfigError: the model was composed by hand and has no `export_spec`, which has the names.

    Example:
        >>> model = lm.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16, quantize="int4")
        >>> lm.add_lora(model, r=16, target_modules=["q_proj", "v_proj"])
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
    """Add the LoRA updates to the weights of the model, in place, and remove them; returns `model`.

    The weights are those of PEFT's `merge_and_unload`, and stay frozen: `model.requires_grad_()` makes them trainable.

    Args:
        model: one with LoRA, not sharded; stays the same object.
        dequantize: how quantised weights are kept. False: rounded anew to their format, which rounds small updates
            away. True: in the model's dtype, so that the model can be written by `save_pretrained`.

    Raises InputError when there is no LoRA, or the model is sharded.
    """
    check_flag("dequantize", dequantize)
    updates = require_lora(model, "merge_lora")
    if is_sharded(model):
        raise InputError("merge_lora: the model is sharded; save_adapter, then load it into a whole model and merge")
    for name in updates:
        layer: Any = model.get_submodule(name)
        if dequantize:
            layer.make_dense(model.dtype)
        layer.merge_update(model.dtype)
    if dequantize:
        for layer in quantized_layers(model).values():  # layers without LoRA
            layer.make_dense(model.dtype)
    return model


@dataclass(frozen=True)
class Target:
    """The native linear layer `module`, in which the `views` of its weight are a linear layer of transformers."""

    module: str
    views: tuple[TensorView, ...]


def targets(model: CausalLM, weight_map: WeightMap) -> dict[str, Target]:
    """Path in transformers -> the linear layer of a block: all layers that LoRA can adapt.

    PEFT takes names of experts, once linear layers of their own, for the experts wherever they are: dense MLPs of the
    same names beside them (Qwen 3 MoE), and shared experts, are left out, for no adapter of theirs could be loaded.
    """
    modules = dict(model.named_modules())
    mixtures = tuple(f"{name}." for name, module in modules.items() if isinstance(module, MoE))
    of_experts = _names_of_experts(model, mixtures) if mixtures else set()
    uses = Counter(source for mapping in weight_map.mappings for source in {view.source for view in mapping.views})
    known: dict[str, Target] = {}
    for mapping in weight_map.mappings:
        name, _, parameter = mapping.target.rpartition(".")
        sources = dict.fromkeys(view.source for view in mapping.views)
        alone = all(source.endswith(".weight") and uses[source] == 1 for source in sources)
        taken = any(leaf(source.removesuffix(".weight")) in of_experts for source in sources)
        if parameter != "weight" or not alone or taken or not _is_adaptable(name, modules.get(name), mapping):
            continue
        for source in sources:
            views = sorted((view for view in mapping.views if view.source == source), key=lambda view: view.start)
            known[source.removesuffix(".weight")] = Target(name, tuple(views))
    return known


def _is_adaptable(name: str, module: nn.Module | None, mapping: WeightMapping) -> bool:
    """Whether the module is a linear layer of a block with the forward of `Linear`, and its parts are rows."""
    if not name.startswith("decoder.blocks.") or not isinstance(module, Linear):
        return False
    if type(module).forward is not Linear.forward:  # a user's class
        return False
    try:
        mapping.split(torch.empty(module.out_features, device="meta"))
    except (RuntimeError, IndexError):
        return False
    return True


def transformers_layout(model: CausalLM) -> WeightMap:
    """The weight map of transformers' model of the same checkpoint: with its vision tower, if it has one."""
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
        known: path in transformers -> linear layer, see `targets`.
        parts: path in transformers -> its part.
        dropout: probability in [0, 1); InputError for another value.
        dtype: of A and B; None for the dtype of the weight.

    Returns native name of the linear layer -> its update.
    """
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"lora_dropout: must lie in [0, 1), got {short(dropout)}")
    resolved = resolve_dtype(dtype, None)
    by_module: dict[str, list[LoRAPart]] = {}
    for path, part in parts.items():
        by_module.setdefault(known[path].module, []).append(part)
    linear: Callable[[str], Any] = model.get_submodule
    options: dict[str, Any] = {"dropout": dropout, "dtype": resolved, "default_dtype": model.dtype}
    return {name: LoRA(linear(name), own, **options) for name, own in by_module.items()}


def insert(model: Model, updates: Mapping[str, LoRA], *, trainable: bool = True) -> Model:
    """Freeze `model`, and give its linear layers, by native name, these updates; `trainable`: whether they train."""
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


def require_lora(model: CausalLM, what: str) -> dict[str, LoRA]:
    """`lora_layers`; InputError, naming the function `what`, when there are none, or the model is no native one."""
    check_native(model, what)
    if not (updates := lora_layers(model)):
        raise InputError(f"{what}: the model has no LoRA; add_lora or load_adapter adds one")
    return updates


def check_adaptable(model: Any, what: str) -> None:
    """InputError, naming the function `what`, unless LoRA can be added to the model."""
    check_native(model, what)
    if lora_layers(model):
        raise InputError(f"{what}: the model has LoRA already; merge_lora it, or start from a model without")
    if is_sharded(model):
        raise InputError(f"{what}: the model is sharded already; add LoRA first, then shard")


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
