"""The LoRA of experts in files: three formats, and conversions between them.

"target_parameters": PEFT's format for stacked parameters. With E experts, A is (E * r, in), expert after expert, and B
is (out, r * E), where column i * E + e belongs to expert e. `...experts.base_layer.lora_A.weight` adapts
`gate_up_proj`, and `...experts.lora_A.weight` adapts `down_proj`, or the only adapted parameter.
"per_expert": a linear layer for each expert, `...experts.3.gate_proj.lora_A.weight`, with the names of checkpoints.
"shared_outer": tensors (E, r, in) and (E, out, r), `...experts.w1.lora_A.weight`; w1 is gate, w3 up, w2 down. All
experts share a tensor with a single row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ligermodels.adapt.targets import Target, container, ends_with, leaf
from ligermodels.arguments import ExpertFormat
from ligermodels.convert.mappings import TensorView, WeightMapping, interleaved_gate_up, rename, stack
from ligermodels.errors import CheckpointError, InputError, short
from ligermodels.layers.expert_lora import ExpertLoRA, ExpertPart
from ligermodels.layers.expert_parts import Projection
from ligermodels.layers.sharding import gathered

PREFIX = "base_model.model."
SHARED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Part -> its name in the format "shared_outer"."""


# -- names -------------------------------------------------------------------------------------------------------------


def expert_mappings(native: str, update: ExpertLoRA, form: ExpertFormat) -> list[WeightMapping]:
    """Where files of a format have the parameters of an update.

    Args:
        native: name of the update in the model.
        update: an update with the parts that the format needs, see `converted`.
        form: the format.
    """
    mappings: list[WeightMapping] = []
    for projection in update.projections:
        parts = update.parts_of(projection)
        starts = [sum(part.r for part in parts[:i]) for i in range(len(parts))]
        views: list[TensorView] = []
        for part, start in zip(parts, starts, strict=True):
            rows = partial(torch.narrow, dim=1, start=start, length=part.r)
            b = f"{native}.lora_B_{part.leaf}"
            if form == "target_parameters":
                source = PREFIX + _stacked_name(part.name, projection, update.projections)
                views.append(TensorView(f"{source}.lora_A.weight", rows, flatten=(0, 1)))
                by_rank = TensorView(f"{source}.lora_B.weight", partial(torch.permute, dims=(1, 2, 0)), flatten=(1, 2))
                mappings.append(WeightMapping(b, (by_rank,)))
            elif form == "shared_outer":
                source = f"{PREFIX}{container(part.name)}.{SHARED[part.leaf]}"
                views.append(TensorView(f"{source}.lora_A.weight", rows))
                mappings.append(rename(b, f"{source}.lora_B.weight"))
            else:
                names = [f"{PREFIX}{layer}.lora_" for layer in part.layers[0]]
                for expert, name in enumerate(names):
                    own = partial(_rows_of_expert, expert=expert, start=start, length=part.r)
                    views.append(TensorView(f"{name}A.weight", own))
                mappings.append(stack(b, [f"{name}B.weight" for name in names]))
        mappings.append(WeightMapping(f"{native}.lora_A_{projection}", tuple(views)))
    return mappings


def _rows_of_expert(tensor: Tensor, expert: int, start: int, length: int) -> Tensor:
    return tensor[expert].narrow(0, start, length)


def _stacked_name(path: str, projection: Projection, projections: Collection[Projection]) -> str:
    """The name of the module that PEFT wraps: once for `gate_up_proj` (or `up_proj`), and the wrapper again for
    `down_proj`."""
    inner = projection == "gate_up" and "down" in projections
    return f"{container(path)}.base_layer" if inner else container(path)


def check_expert_format(form: object) -> None:
    """Raise InputError unless `form` is a format of the LoRA of experts."""
    if form not in get_args(ExpertFormat):
        raise InputError(f"expert_format: must be one of {', '.join(get_args(ExpertFormat))}, got {short(form)}")


class FoundExperts(NamedTuple):
    """The experts that a file adapts.

    names: path of a part of experts -> the paths by which the patterns of the config name it.
    form: the format of the file.
    """

    names: dict[str, tuple[str, ...]]
    form: ExpertFormat


def find_experts(
    paths: Collection[str], known: Mapping[str, Target], target_parameters: Iterable[str] | None
) -> FoundExperts:
    """The experts among the paths of a file.

    Args:
        paths: paths of the adapted layers in the file.
        known: the experts of the model, from `expert_targets`.
        target_parameters: field of adapter_config.json, which tells a single adapted parameter.

    Raises:
        CheckpointError: the file mixes formats, or has some experts of a layer without the others.
    """
    found: dict[ExpertFormat, dict[str, tuple[str, ...]]] = {}
    for path, target in known.items():
        experts, name = container(path), leaf(path)
        if name in SHARED and f"{experts}.{SHARED[name]}" in paths:
            found.setdefault("shared_outer", {})[path] = (f"{experts}.{SHARED[name]}",)
        layers = target.layers[0] if len(target.layers) == 1 else ()
        if present := [layer for layer in layers if layer in paths]:
            if len(present) < len(layers):
                missing = next(layer for layer in layers if layer not in paths)
                raise CheckpointError(
                    f"adapts {len(present)} of {len(layers)} experts of {experts}, and {missing} is missing; native "
                    "LoRA adapts all experts of a layer"
                )
            found.setdefault("per_expert", {})[path] = layers
        if target.is_whole and _is_stacked(name, experts, paths, target_parameters or ()):
            found.setdefault("target_parameters", {})[path] = (path,)
    if len(found) > 1:
        raise CheckpointError(f"names experts in several formats: {', '.join(found)}")
    return next((FoundExperts(names, form) for form, names in found.items()), FoundExperts({}, "target_parameters"))


def _is_stacked(name: str, experts: str, paths: Collection[str], target_parameters: Iterable[str]) -> bool:
    """Whether a file of PEFT adapts the stacked parameter `name` of the module `experts`."""
    if f"{experts}.base_layer" in paths:
        return True
    targets = {leaf(target) for target in target_parameters if ends_with(f"{experts}.{name}", target)}
    return experts in paths and name in targets


def file_names(found: FoundExperts) -> set[str]:
    """The paths in the file that `find_experts` has found."""
    if found.form != "target_parameters":
        return {layer for layers in found.names.values() for layer in layers}
    return {own for path in found.names for own in (container(path), f"{container(path)}.base_layer")}


# -- conversions -------------------------------------------------------------------------------------------------------


def converted(
    update: ExpertLoRA, tensors: Mapping[str, Tensor], form: ExpertFormat
) -> tuple[ExpertLoRA, Mapping[str, Tensor]]:
    """An equal update with the parts that a format needs.

    "target_parameters" has one part for gate and up. If they have an A each, their ranks add up, and B is zero off two
    blocks. The other formats have a part for each; then both get a copy of a common A.

    Args:
        update: the update, also on the meta device.
        tensors: its parameters by name. Sharded ones are gathered, by all ranks, if something is to be converted.
        form: the format.

    Returns:
        The update, and its parameters by name.

    Raises:
        InputError: gate and up have different scalings, the family has no names for single experts, or the format has
            none for experts without a gate.
    """
    gate_up = update.parts_of("gate_up")
    is_joint = [part.leaf for part in gate_up] == ["gate_up_proj"]
    has_gate = not any(part.is_whole and part.leaf == "up_proj" for part in gate_up)
    _check_names(update, form, has_gate)
    change = bool(gate_up) and has_gate and is_joint != (form == "target_parameters")
    shared = update.shared_outer and form == "shared_outer"
    if not change and shared == update.shared_outer:
        return update, tensors
    whole = {name: gathered(tensor.detach()) for name, tensor in tensors.items()}
    parts = list(update.parts)
    if change:
        joined = _split(gate_up[0], whole) if is_joint else _joined(update, gate_up, whole)
        parts = [*joined, *update.parts_of("down")]
    sizes = update.sizes
    result = ExpertLoRA(
        sizes["gate_up"], sizes["down"], parts, dropout=update.dropout, device="meta", shared_outer=shared
    )
    return result, {name: whole[name].expand(p.shape) for name, p in result.lora_parameters().items()}


def _check_names(update: ExpertLoRA, form: ExpertFormat, has_gate: bool) -> None:
    """Raise InputError unless a format has names for the parts of an update of experts with or without a gate."""
    if form == "shared_outer" and not has_gate:
        raise InputError("expert_format: 'shared_outer' has no names for experts without a gate; give 'per_expert'")
    if form == "per_expert" and any(not part.layers for part in update.parts):
        raise InputError(
            f"expert_format: {form!r}: checkpoints of this family have no names for the layers of single experts, such "
            f"as {container(update.parts[0].name)}.0.gate_proj; give 'target_parameters'"
        )


def _split(part: ExpertPart, tensors: dict[str, Tensor]) -> list[ExpertPart]:
    """Replace the update of gate and up by one for each, with the same A."""
    b = tensors["lora_B_gate_up_proj"]
    native = b.new_zeros(*b.shape[1:], len(b))
    part.scatter(native, b.movedim(0, -1))
    tensors["lora_A_gate_up"] = torch.cat([tensors["lora_A_gate_up"]] * 2, dim=1)
    halves: list[ExpertPart] = []
    experts = container(part.name)
    for i, view in enumerate(interleaved_gate_up("", f"{experts}.gate_proj", f"{experts}.up_proj").views):
        half = replace(part, name=view.source, views=(view,), layers=part.layers[i : i + 1])
        tensors[f"lora_B_{half.leaf}"] = half.gather(native).movedim(-1, 0)
        halves.append(half)
    return halves


def _joined(update: ExpertLoRA, parts: list[ExpertPart], tensors: dict[str, Tensor]) -> list[ExpertPart]:
    """Replace the updates of gate and up by one of both."""
    scaling, r = parts[0].scaling, sum(part.r for part in parts)
    if any(part.scaling != scaling for part in parts):
        raise InputError(
            f"{parts[0].name} and {parts[1].leaf} have different scalings, and 'target_parameters' has one for both; "
            "give expert_format='per_expert'"
        )
    first = tensors[f"lora_B_{parts[0].leaf}"]
    native = first.new_zeros(update.sizes["gate_up"][1], r, len(first))
    start = 0
    for part in parts:
        part.scatter(native[:, start : start + part.r], tensors[f"lora_B_{part.leaf}"].movedim(0, -1))
        start += part.r
    path = f"{container(parts[0].name)}.gate_up_proj"
    lora_alpha: Any = scaling * (math.sqrt(r) if parts[0].use_rslora else r)
    lora_alpha = int(lora_alpha) if lora_alpha == int(lora_alpha) else lora_alpha
    layers = tuple(layer for part in parts for layer in part.layers)
    joined = replace(parts[0], name=path, views=parts[0].stacked, r=r, lora_alpha=lora_alpha, layers=layers)
    tensors["lora_B_gate_up_proj"] = joined.gather(native).movedim(-1, 0)
    return [joined]
