"""A checkpoint here and in transformers, compared module by module."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import BackendError, CheckpointError, InputError
from ligermodels.layers.norm import RMSNormAdd
from ligermodels.pretrained import from_pretrained

TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error that rounding explains. Both models make their rotary tables in fp32, whatever their dtype."""

LOGITS = "logits"

_NOT_COMPARED = (nn.Linear, RMSNormAdd)
"""Projections, whose outputs the modules around them return; and norms whose output has the residual added to it."""


@dataclass(frozen=True)
class Place:
    """A module by its name here and in transformers, and the relative error of its output (nan: not comparable)."""

    name: str
    theirs: str
    error: float


@dataclass(frozen=True)
class Report:
    """`places` in the order in which they are computed."""

    places: Sequence[Place]
    tolerance: float
    tokens: int

    @property
    def first_mismatch(self) -> Place | None:
        """The first place whose error is above the tolerance; None when there is none."""
        return next((place for place in self.places if not place.error <= self.tolerance), None)

    @property
    def passed(self) -> bool:
        """Whether the models match everywhere."""
        return self.first_mismatch is None


def verify(
    folder: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | None = None,
    input_ids: Sequence[int] | None = None,
    tokens: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Run the same tokens through a checkpoint's model here and in transformers, and compare every module's output.

    One model is in memory at a time.

    Args:
        folder: the checkpoint.
        reference: the checkpoint that transformers opens, if another one.
        input_ids: the tokens to run; by default `tokens` random ones, always the same.
        dtype, device, attention: as in `from_pretrained`, for both models (attention: for ours; theirs is "eager").
        tolerance: largest relative error allowed, max |ours - theirs| / max |theirs|; by default TOLERANCES[dtype].
        progress: called with bytes loaded and bytes in all.

    Raises:
        BackendError: transformers is not installed.
        CheckpointError: transformers cannot open the checkpoint; and what `from_pretrained` raises.
        InputError: no tokens, or ids outside the vocabulary.
    """
    try:
        import transformers
    except ImportError:
        raise BackendError(
            "verify compares with transformers, which is not installed: pip install 'ligermodels[verify]'"
        ) from None
    model = from_pretrained(folder, dtype=dtype, device=device, attention=attention, progress=progress)
    if input_ids is None:
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    else:
        ids = torch.tensor([list(input_ids)], dtype=torch.long)
    if ids.numel() == 0:
        raise InputError("verify needs at least one token")
    ids = ids.to(device)
    names = modules_in_common(model.export_spec.weight_map) if model.export_spec else {}
    ours = _outputs(model, names, ids)
    del model

    path = folder if reference is None else reference
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
        other = auto.from_pretrained(path, dtype=dtype, attn_implementation="eager", local_files_only=True)
    except Exception as error:  # Whatever keeps transformers from opening it, it is the checkpoint's fault.
        raise CheckpointError(f"transformers cannot open {path}: {error}") from error
    if hasattr(other.config, "_experts_implementation"):
        other.set_experts_implementation("eager")  # Its default asks for aligned sizes.
    other.to(device).eval()
    theirs = _outputs(other, names.values(), ids)
    names[LOGITS] = LOGITS
    places = [
        Place(name, names[name], relative_error(output, theirs[names[name]]))
        for name, output in ours.items()
        if names[name] in theirs
    ]
    return Report(places, TOLERANCES[dtype] if tolerance is None else tolerance, ids.numel())


def modules_in_common(weights: WeightMap) -> dict[str, str]:
    """Modules here and their names in transformers, from a weight map: what holds a weight here holds it there.

    A fused weight (q, k and v) matches the modules that hold all its parts; modules around it match if they hold the
    same tensors. A weight under another name (a norm of
    queries, part of the module that also rotates them) matches nothing.
    """
    found: dict[str, str] = {}
    for mapping in weights.mappings:
        here = mapping.target.split(".")[:-1]
        there = os.path.commonpath([view.source.replace(".", "/") for view in mapping.views]).split("/")
        if len(mapping.views) == 1:
            *there, name = there  # From the weight to its module.
            if name != mapping.target.rpartition(".")[2]:
                continue
        else:
            here = here[:-1]
        while here and there:
            found.setdefault(".".join(here), ".".join(there))
            here, there = here[:-1], there[:-1]
    found.pop("head", None)  # Compared as the logits, which tied models have too.
    of_ours, of_theirs = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for mapping in weights.mappings:
        for source in (view.source for view in mapping.views):
            for module in _modules_of(mapping.target):
                of_ours[module].add(source)
            for module in _modules_of(source):
                of_theirs[module].add(source)
    return {ours: theirs for ours, theirs in found.items() if of_ours[ours] == of_theirs[theirs]}


def _modules_of(name: str) -> Iterator[str]:
    """Names of the modules that hold the tensor `name`, and of all modules around them."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """max |ours - theirs| / max |theirs|; nan for different shapes."""
    if ours.shape != theirs.shape:
        return math.nan
    difference, scale = (ours.double() - theirs.double()).abs().max().item(), theirs.double().abs().max().item()
    return difference / scale if scale else (math.inf if difference else 0.0)


@torch.no_grad()
def _outputs(model: nn.Module, names: Iterable[str], ids: Tensor) -> dict[str, Tensor]:
    """Outputs of the modules called `names`, but those _NOT_COMPARED, in the order of the forward; and the logits."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            output = output if isinstance(output, Tensor) else output[0]
            found[name] = output.flatten(0, -2).cpu()  # some modules see tokens without their batch

        return hook

    modules = dict(model.named_modules())
    for name in names:
        if name in modules and not isinstance(modules[name], _NOT_COMPARED):
            modules[name].register_forward_hook(keep(name))
    found[LOGITS] = model(ids).logits.cpu()
    return found
