"""The targets of LoRA in a model, by their names in transformers: linear layers, and the experts of mixtures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ligermodels.convert.mappings import (
    TensorView,
    WeightMapping,
    interleaved_gate_up,
    interleaved_gate_up_in_one,
    rename,
)
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError
from ligermodels.layers import Linear, MoE
from ligermodels.layers.expert_lora import ExpertPart, same_rows
from ligermodels.layers.expert_parts import Projection
from ligermodels.layers.lora import LoRAPart
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import layout_in_memory


@dataclass(frozen=True)
class Target:
    """A linear layer of transformers, as views of the weight of the native linear layer called `module`.

    For experts, `module` is the mixture; see `ExpertPart` for `projection`, `stacked` and `layers`.
    """

    module: str
    views: tuple[TensorView, ...]
    projection: Projection | None = None
    stacked: tuple[TensorView, ...] = ()
    layers: tuple[tuple[str, ...], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole parameter of experts, which `target_parameters` can name."""
        return self.projection is not None and same_rows(self.views, self.stacked)

    def part(self, path: str, r: int, lora_alpha: float, use_rslora: bool) -> LoRAPart:
        """The part of an update for this target.

        Args:
            path: path of the layer in transformers.
            r: rank.
            lora_alpha: the update is multiplied by lora_alpha / r.
            use_rslora: by lora_alpha / sqrt(r) instead.
        """
        if self.projection is None:
            return LoRAPart(path, self.views, r, lora_alpha, use_rslora)
        return ExpertPart(path, self.views, r, lora_alpha, use_rslora, self.projection, self.stacked, self.layers)


def leaf(path: str) -> str:
    """The last component of a dotted name."""
    return path.rpartition(".")[2]


def container(path: str) -> str:
    """A dotted name without its last component."""
    return path.rpartition(".")[0]


def ends_with(path: str, name: str) -> bool:
    """Whether `name` is the whole of a dotted path, or its last components."""
    return f".{path}".endswith(f".{name}")


def transformers_layout(model: CausalLM) -> WeightMap:
    """The weight map of transformers' model for the same checkpoint, including a vision tower."""
    spec = model.require_export_spec()
    if spec.source is not None and spec.source.nested:
        return family_of(spec.source.hf_config).weight_maps(model.config)[0]
    return layout_in_memory(spec, model.config)


# -- linear layers -----------------------------------------------------------------------------------------------------


def layouts_of(model: CausalLM) -> list[WeightMap]:
    """The weight maps of all layouts of checkpoints of the model's family. Large mixtures take a second."""
    return family_of(model.hf_config).weight_maps(model.config)


def targets(model: CausalLM, weight_map: WeightMap, layouts: Sequence[WeightMap]) -> dict[str, Target]:
    """Path in transformers -> linear layer of a block, for all linear layers that LoRA can adapt.

    Excluded are dense MLPs and shared experts with the names of experts (Qwen 3 MoE). PEFT takes such names for the
    experts, which were linear layers in earlier versions of transformers, and could not load an adapter.

    Args:
        model: the model.
        weight_map: the layout with the names.
        layouts: all layouts of the family, from `layouts_of`.
    """
    expert_names = names_of_experts(model, layouts)
    found = linear_layers(model, weight_map)
    return {path: target for path, target, _ in found if leaf(path) not in expert_names}


def linear_layers(model: CausalLM, weight_map: WeightMap) -> Iterator[tuple[str, Target, list[str]]]:
    """Path in transformers, linear layer, and paths of all layers of its native weight; for every layer of a block."""
    modules = dict(model.named_modules())
    uses = Counter(source for mapping in weight_map.mappings for source in _sources(mapping))
    for mapping in weight_map.mappings:
        name, _, parameter = mapping.target.rpartition(".")
        sources = {source.removesuffix(".weight"): source for source in _sources(mapping)}
        # A name without ".weight" maps to itself; a source in several mappings is shared by several layers.
        shared = any(path == source or uses[source] > 1 for path, source in sources.items())
        if parameter == "weight" and not shared and _is_adaptable(name, modules.get(name), mapping):
            for path, source in sources.items():
                views = sorted((view for view in mapping.views if view.source == source), key=lambda view: view.start)
                yield path, Target(name, tuple(views)), list(sources)


def _sources(mapping: WeightMapping) -> list[str]:
    """The names of the checkpoint's tensors that make up a tensor, in order."""
    return list(dict.fromkeys(view.source for view in mapping.views))


def _is_adaptable(name: str, module: nn.Module | None, mapping: WeightMapping) -> bool:
    """Whether the module is a linear layer of a block with the forward of `Linear`, and its parts are rows."""
    if not (_is_in_block(name) and isinstance(module, Linear) and type(module).forward is Linear.forward):
        return False
    try:
        mapping.split(torch.empty(module.out_features, device="meta"))
    except (RuntimeError, IndexError):
        return False
    return True


def layers_of_own_classes(model: CausalLM, weight_map: WeightMap) -> dict[str, str]:
    """Path in transformers -> class, of linear layers of blocks that LoRA cannot adapt: a user has put a class with a
    forward of its own, such as `torch.nn.Linear`, in the place of a `Linear`."""
    found: dict[str, str] = {}
    modules = dict(model.named_modules())
    for mapping in weight_map.mappings:
        name, _, parameter = mapping.target.rpartition(".")
        module, is_weight = modules.get(name), parameter == "weight" and _is_in_block(name)
        if is_weight and isinstance(module, nn.Linear) and type(module).forward is not Linear.forward:
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            found |= {source.removesuffix(".weight"): kind for source in _sources(mapping)}
    return found


def _is_in_block(name: str) -> bool:
    return name.startswith("decoder.blocks.")


# -- experts -----------------------------------------------------------------------------------------------------------


def mixtures(model: nn.Module) -> dict[str, MoE]:
    """Native name -> mixture of experts, for the mixtures in the blocks of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def names_of_experts(model: CausalLM, layouts: Sequence[WeightMap]) -> set[str]:
    """The last components of the names of routers, and of the experts in checkpoints in which they are layers: the
    parameters of all experts together ("experts.down_proj") are no layers for PEFT."""
    names = mixtures(model)
    parameters = {f"{name}.{part}" for name in names for part in ("router.weight", "gate_up", "down")}
    mappings = (mapping for layout in layouts for mapping in layout.mappings if mapping.target in parameters)
    sources = (source for mapping in mappings for source in _sources(mapping))
    return {leaf(source.removesuffix(".weight")) for source in sources if source.endswith(".weight")}


def expert_targets(model: CausalLM, weight_map: WeightMap, layouts: Sequence[WeightMap]) -> dict[str, Target]:
    """Path -> part of the experts of a mixture that LoRA can adapt.

    `gate_up` and `down` have the paths of the parameters in transformers 5 ("...mlp.experts.gate_up_proj").
    "...mlp.experts.gate_proj" and "...mlp.experts.up_proj" are the halves of `gate_up`. Experts without a gate have
    "...experts.up_proj" alone.

    Args:
        model: the model.
        weight_map: the layout with the names.
        layouts: all layouts of the family, from `layouts_of`.
    """
    found: dict[str, Target] = {}
    by_target, *others = ({mapping.target: mapping for mapping in each.mappings} for each in (weight_map, *layouts))
    for name, module in mixtures(model).items():
        if type(module).forward is not MoE.forward or f"{name}.gate_up" not in by_target:  # a user's class
            continue
        gate_up = by_target[f"{name}.gate_up"]
        experts = module.config.router.num_experts
        first = gate_up.views[0].source
        path = container(first) if len(gate_up.views) == 1 else first.rpartition(".0.")[0]
        layers = _layers_of_experts([by_target, *others], name, experts, path.partition(".layers.")[0])
        if module.config.gated:
            whole = _rows(gate_up, f"{path}.gate_up_proj", module.config.rows)
            found[f"{path}.gate_up_proj"] = Target(name, whole, "gate_up", whole, layers[:2])
            for i, view in enumerate(interleaved_gate_up("", f"{path}.gate_proj", f"{path}.up_proj").views):
                found[view.source] = Target(name, (view,), "gate_up", whole, layers[i : i + 1])
        else:
            whole = rename("", f"{path}.up_proj").views
            found[f"{path}.up_proj"] = Target(name, whole, "gate_up", whole, layers[:1])
        rows = rename("", f"{path}.down_proj").views
        found[f"{path}.down_proj"] = Target(name, rows, "down", rows, layers[-1:])
    return found


def _rows(mapping: WeightMapping, path: str, rows: int) -> tuple[TensorView, ...]:
    """The rows of the stacked checkpoint tensor `path` in the native weight of one expert."""
    if len(mapping.views) > 1:
        return interleaved_gate_up_in_one("", path).views
    numbers = torch.arange(rows, device="cpu")
    order = mapping.views[0].view(numbers.view(1, rows, 1)).flatten()
    for views in (rename("", path).views, interleaved_gate_up_in_one("", path).views):
        if torch.equal(order, views[0].view(numbers).flatten()):
            return views
    raise ConfigError(f"{path}: the rows of gate and up have an order that native LoRA does not know")


def _layers_of_experts(
    layouts: Sequence[Mapping[str, WeightMapping]], name: str, experts: int, stem: str
) -> tuple[tuple[str, ...], ...]:
    """Names of the linear layers of each expert, for gate (if there is one), up and down; empty if no layout has them.

    Args:
        layouts: name of a parameter -> its mapping, for each layout.
        name: native name of the mixture.
        experts: number of experts.
        stem: the names' part before ".layers.".
    """
    for layout in layouts:
        gate_up, down = layout.get(f"{name}.gate_up"), layout.get(f"{name}.down")
        if gate_up is None or down is None or len(down.views) != experts or len(gate_up.views) % experts:
            continue
        step = len(gate_up.views) // experts  # gate and up of an expert follow each other
        sources: list[Sequence[TensorView]] = [*(gate_up.views[i::step] for i in range(step)), down.views]
        names = tuple(tuple(view.source.removesuffix(".weight") for view in views) for views in sources)
        if names[0][0].partition(".layers.")[0] == stem:
            return names
    return ()


def overlapping(known: Mapping[str, Target], paths: Sequence[str]) -> tuple[str, str] | None:
    """Two of the `paths` that adapt the same rows of experts; None if there are none."""
    whole = {known[path].module: path for path in paths if known[path].projection == "gate_up" and known[path].is_whole}
    for path in paths:
        target = known[path]
        if target.projection == "gate_up" and whole.get(target.module, path) != path:
            return whole[target.module], path
    return None
