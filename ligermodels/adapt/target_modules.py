"""The layers and experts that `target_modules` and `target_parameters` name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from ligermodels.adapt.patterns import full_matches
from ligermodels.adapt.targets import (
    Target,
    container,
    ends_with,
    expert_targets,
    layers_of_own_classes,
    layouts_of,
    leaf,
    linear_layers,
    mixtures,
    names_of_experts,
    overlapping,
    targets,
    transformers_layout,
)
from ligermodels.errors import AdapterWarning, InputError, short
from ligermodels.models.causal_lm import CausalLM

ALL_LINEAR = "all-linear"
EXPERTS = "experts"


def chosen_targets(
    model: CausalLM, target_modules: str | Sequence[str], target_parameters: Sequence[str] | None
) -> dict[str, Target]:
    """Path in transformers -> target, for all targets that the arguments of `add_lora` name.

    Warns if experts, dense layers with the names of experts, or layers of a user's own classes are left out.

    Args:
        model: the model.
        target_modules: see `add_lora`.
        target_parameters: see `add_lora`.

    Raises:
        InputError: a name matches nothing, or some experts of a mixture without the others; or two parts overlap.
    """
    names = _Names(model)
    paths = {*names.of_modules(target_modules), *names.of_parameters(target_parameters)}
    if not paths:
        raise InputError("target_modules: is empty; name a linear layer")
    known = {**names.linear, **names.experts}
    chosen = {path: known[path] for path in known if path in paths}
    if (pair := overlapping(known, list(chosen))) is not None:
        raise InputError(f"target_modules: {pair[0]} and {pair[1]} are the same weights; name one of them")
    names.warn_of_omissions(target_modules, chosen)
    return chosen


class _Names:
    """The names in transformers of the targets of LoRA in a model."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.layout, self.layouts = model, transformers_layout(model), layouts_of(model)
        self.linear = targets(model, self.layout, self.layouts)
        self.experts = expert_targets(model, self.layout, self.layouts)

    def of_modules(self, wanted: str | Sequence[str]) -> list[str]:
        """The paths that `target_modules` names."""
        if wanted == ALL_LINEAR:
            return list(self.linear)
        if isinstance(wanted, str):
            return self._of_expression(wanted)
        if not isinstance(wanted, Iterable) or not all(isinstance(name, str) for name in wanted):
            raise InputError(f"target_modules: must be names, a regular expression or 'all-linear', got {wanted!r}")
        paths: list[str] = []
        for name in wanted:
            matching = list(self.linear) if name == ALL_LINEAR else self._of_name(name)
            if not matching:
                raise InputError(self._unknown(name))
            paths += matching
        return paths

    def of_parameters(self, wanted: Sequence[str] | None) -> list[str]:
        """The paths that `target_parameters` names."""
        if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted or ()):
            raise InputError(f"target_parameters: must be a list of names, got {wanted!r}")
        parameters = [path for path, target in self.experts.items() if target.is_whole]
        paths: list[str] = []
        for name in wanted or ():
            matching = [path for path in parameters if ends_with(path, name)]
            if not matching:
                known = ", ".join(dict.fromkeys(".".join(path.split(".")[-2:]) for path in parameters)) or "none"
                raise InputError(
                    f"target_parameters: {name!r} names no weights of experts; known: {known}. Linear layers are named "
                    "by target_modules"
                )
            paths += matching
        return paths

    def _of_expression(self, pattern: str) -> list[str]:
        names = {path: [path] for path in self.linear}
        for path, target in self.experts.items():
            if len(target.layers) == 1:
                names[path] = list(target.layers[0])
            elif not target.layers and target.is_whole:
                names[path] = [path]
        try:
            every = [name for group in names.values() for name in group]
            matching = set(compress(every, full_matches(pattern, every)))
        except ValueError as error:
            raise InputError(f"target_modules: {short(pattern)} {error}") from None
        paths = [path for path, group in names.items() if _all_or_none(pattern, group, matching)]
        if pattern and not paths:
            raise InputError(self._unknown(pattern))
        return paths

    def _of_name(self, name: str) -> list[str]:
        paths = [path for path in self.linear if ends_with(path, name)]
        for path, target in self.experts.items():
            layers = target.layers[0] if len(target.layers) == 1 else ()
            matching = {layer for layer in layers if ends_with(layer, name)}
            whole = target.is_whole and ends_with(container(path), name)
            if whole or ends_with(path, name) or _all_or_none(name, layers, matching):
                paths.append(path)
        return paths

    def _unknown(self, name: Any) -> str:
        """The message for a name that matches nothing."""
        leaves = list(dict.fromkeys(map(leaf, (*self.linear, *self.experts))))
        known = [*leaves, EXPERTS] if self.experts else leaves
        if name in known:
            reason = f"is a regular expression that matches no whole path; for layers of this name give [{name!r}]"
        elif any(name in source.split(".") for source in (*self.layout.sources(), *self.layout.aliases)):
            reason = "is not a linear layer that native LoRA adapts: no embeddings, heads, norms or routers"
        else:
            reason = "names no linear layer"
        return f"target_modules: {name!r} {reason}; known: {', '.join(known)}"

    def warn_of_omissions(self, wanted: str | Sequence[str], chosen: Mapping[str, Target]) -> None:
        """Warn of experts that "all-linear" does not reach, of dense layers with the names of experts, and of layers of
        other classes."""
        own = layers_of_own_classes(self.model, self.layout)
        left_out = _named_by(wanted, list(own))
        if left_out:
            _warn(
                f"{len(left_out)} layers, such as {left_out[0]}, a {own[left_out[0]]}, are not adapted: LoRA is a part "
                "of ligermodels.layers.Linear, and of subclasses with its forward"
            )
        has_experts = any(target.projection is not None for target in chosen.values())
        if self.experts and not has_experts and (wanted == ALL_LINEAR or ALL_LINEAR in wanted):
            layers = f"{len(mixtures(self.model))} of {len(self.model.decoder.blocks)} layers"
            _warn(
                f"the experts of {layers} are not trained: {ALL_LINEAR!r} names linear layers, and "
                f"transformers keeps experts as parameters. To train them too, give target_modules="
                f"{[ALL_LINEAR, EXPERTS]} (--lora-targets {ALL_LINEAR} --lora-targets {EXPERTS})"
            )
        if not has_experts or isinstance(wanted, str):
            return
        names = names_of_experts(self.model, self.layouts)
        every = linear_layers(self.model, self.layout)
        left_out = [
            path
            for path, _, sources in every
            if not names.isdisjoint(map(leaf, sources)) and any(ends_with(path, name) for name in wanted)
        ]
        if left_out:
            _warn(
                f"{len(left_out)} dense layers or shared experts, such as {left_out[0]}, are not adapted: PEFT takes "
                "their names for the experts of this model, and could not load their LoRA"
            )


def _warn(message: str) -> None:
    warnings.warn(f"LoRA: {message}", AdapterWarning, stacklevel=5)


def _named_by(wanted: str | Sequence[str], paths: Sequence[str]) -> list[str]:
    """The `paths` that `target_modules` names, which has been checked."""
    if wanted == ALL_LINEAR or ALL_LINEAR in wanted:
        return [*paths]
    if isinstance(wanted, str):
        return list(compress(paths, full_matches(wanted, paths)))
    return [path for path in paths if any(ends_with(path, name) for name in wanted)]


def _all_or_none(name: str, group: Sequence[str], matching: set[str]) -> bool:
    """Whether `matching` has all of the `group`; InputError if it has some."""
    count = len(matching.intersection(group))
    if count not in (0, len(group)):
        raise InputError(
            f"target_modules: {short(name)} names {count} of {len(group)} experts of a layer, such as {group[0]}; LoRA "
            f"adapts all of them: give {[leaf(group[0])]}"
        )
    return bool(group) and count == len(group)
