"""Float8 training of a model: which of its linear layers compute in float8."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from ligermodels.adapt.exclusion import Exclusion
from ligermodels.errors import BackendError, Float8Warning, InputError
from ligermodels.layers import Linear
from ligermodels.layers.float8 import Float8, float8_slots
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.ops import Float8Recipe, check_float8_sizes, float8_unsupported

Model = TypeVar("Model", bound=CausalLM)

LEAST = 0.1
"""A larger part of the blocks' weights than this is not left out of float8 without a word."""


def float8(
    model: Model,
    recipe: Float8Recipe | None = None,
    *,
    exclude_first: int = 0,
    exclude_last: int = 0,
    exclude: Sequence[str] = (),
) -> Model:
    """Let the linear layers of the blocks compute in float8, forward and backward, in place.

    Weights keep their dtype in the model, its checkpoints and the optimizer. Each forward pass casts them; weights that
    need no gradient are cast once (in a process by itself), and again when they are changed (except by changes in place
    through `.data`, which PyTorch does not count). Embeddings, head, norms, routers, routed experts, attention and the
    residual stay in the model's dtype. Layers compute in float8 in training mode, and wherever gradients are recorded;
    in eval mode under `torch.no_grad`, as in generation, they compute in their own dtype.

    Called before or after `add_lora`, and before the model is sharded. A second call is for other layers.

    Args:
        model: stays the same object.
        recipe: formats and scales; by default `Float8Recipe()`.
        exclude_first, exclude_last: number of blocks at either end that are left as they are.
        exclude: patterns (`fnmatch`) of names of layers and weights that are left as they are: whole names
            ("decoder.blocks.3.mlp.down") or names within a block ("mlp.*"); "mlp" is everything in that module.

    Returns `model`. Warns with a `Float8Warning` where more than a tenth of the blocks' weights have no rule for
    float8, as routed experts, and are not excluded: they stay in the model's dtype.

    Raises:
        InputError: an argument out of range, a pattern that matches nothing, or nothing left; sizes that are no
            multiples of 16; a model that is sharded or quantised; a layer that is in float8 already, or is no `Linear`.
        BackendError: the model is on a GPU without float8.

    Example:
        >>> model = lm.float8(lm.from_pretrained("meta-llama/Llama-3.1-8B", dtype=torch.bfloat16, device="cuda"))
    """
    recipe = _checked(model, recipe)
    blocks = list(model.decoder.blocks)
    for name, value in (("exclude_first", exclude_first), ("exclude_last", exclude_last)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= len(blocks):
            raise InputError(f"{name}: must be a number of blocks, 0 to {len(blocks)}, got {value!r}")
    excluded = Exclusion(exclude)
    chosen: dict[str, Any] = {}
    without_rule: list[tuple[nn.Module, str]] = []
    for i, block in enumerate(blocks):
        prefix, found = f"decoder.blocks.{i}", dict(float8_slots(block))
        kept = {f"{prefix}.{name}": linear for name, linear in found.items() if not excluded(prefix, name)}
        others = [name for name in _other_weights(block, found) if not excluded(prefix, name)]
        if exclude_first <= i < len(blocks) - exclude_last:
            chosen |= kept
            without_rule += [(block, name) for name in others]
    excluded.check_used()
    if not chosen:
        raise InputError("float8: there is no linear layer that could compute in float8, and is not excluded")
    for name, linear in chosen.items():
        _check_linear(name, linear)
    for linear in chosen.values():
        linear.store(Float8(recipe))
    _warn(blocks, without_rule)
    return model


def _other_weights(block: nn.Module, found: Iterable[str]) -> list[str]:
    """The names of the parameters of two dimensions or more that are not of the linear layers `found`."""
    return [
        name
        for name, parameter in block.named_parameters()
        if parameter.dim() > 1 and not any(name.startswith(f"{linear}.") for linear in found)
    ]


def _warn(blocks: Sequence[nn.Module], without_rule: Sequence[tuple[nn.Module, str]]) -> None:
    """Float8Warning if these weights are more than a tenth of all."""
    sizes: dict[str, int] = {}
    for block, name in without_rule:
        owner, _, _ = name.rpartition(".")
        kind = f"{name} ({type(block.get_submodule(owner)).__name__})"
        sizes[kind] = sizes.get(kind, 0) + block.get_parameter(name).numel()
    whole = sum(p.numel() for block in blocks for p in block.parameters())
    if sum(sizes.values()) <= LEAST * whole:
        return
    named = [kind for kind, size in sizes.items() if size > LEAST / 10 * whole]
    warnings.warn(
        f"float8: {sum(sizes.values()) / whole:.0%} of the weights of the blocks stay in the model's dtype, for they "
        f"have no rule for float8: {', '.join(named)}; exclude them to say that this is wanted",
        Float8Warning,
        stacklevel=3,
    )


def _checked(model: CausalLM, recipe: Float8Recipe | None) -> Float8Recipe:
    """The recipe; errors where the model cannot be had in float8."""
    check_native(model, "float8")
    if not isinstance(recipe, Float8Recipe | None):
        raise InputError(f"recipe: must be a Float8Recipe, got {recipe!r}")
    if is_sharded(model):
        raise InputError("float8: the model is sharded already; call float8 first, then shard")
    check_unquantized(model, "float8", "float8 training needs the weights as they were")
    if (reason := float8_unsupported(model.device)) is not None:
        raise BackendError(f"float8: {reason}")
    return recipe or Float8Recipe()


def _check_linear(name: str, linear: nn.Module) -> None:
    """InputError unless the layer can be had in float8."""
    if not isinstance(linear, Linear) or type(linear).forward is not Linear.forward:
        raise InputError(
            f"{name}: is a {type(linear).__name__}, which has no float8; leave it as it is by exclude={[name]!r}"
        )
    if linear.compute is not None:
        raise InputError(f"{name}: is in float8 already; leave it as it is by exclude={[name]!r}")
    if linear.weight.dtype.itemsize > 4:
        raise InputError(f"{name}: is {linear.weight.dtype}; float8 is for weights of 4 bytes or fewer")
    check_float8_sizes(name, linear.out_features, linear.in_features)
