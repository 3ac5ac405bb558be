"""Float8 training: the linear layers of a model compute in float8."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from ligermodels.adapt.exclusion import Exclusion
from ligermodels.arguments import check_count
from ligermodels.errors import BackendError, Float8Warning, InputError
from ligermodels.layers import Block, Layer, Linear
from ligermodels.layers.float8 import Float8, float8_slots
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native, check_own_modules
from ligermodels.ops import Float8Recipe, check_float8_sizes, float8_unsupported

Model = TypeVar("Model", bound=CausalLM)

LEAST = 0.1
"""If more than this fraction of the blocks' weights stays in the model's dtype, `float8` warns."""


def float8(
    model: Model,
    recipe: Float8Recipe | None = None,
    *,
    exclude_first: int = 0,
    exclude_last: int = 0,
    exclude: Sequence[str] = (),
) -> Model:
    """Let the linear layers of the blocks compute in float8, forward and backward, in place.

    Weights keep their dtype in the model, in checkpoints and in the optimizer. Each forward pass casts them. In one
    process, frozen weights are cast once, and again after changes that PyTorch counts (in-place changes through `.data`
    are not counted). Embeddings, head, norms, routers, routed experts, attention and the residual stay in
    the model's dtype. Layers compute in float8 in training mode, and wherever gradients are recorded. In
    eval mode under `torch.no_grad`, as in generation, they compute in the model's dtype.

    Call it before the model is sharded; `add_lora` can come before or after. A second call can convert other layers.

    Args:
        model: the model, not sharded.
        recipe: formats and accumulation. Default: `Float8Recipe()`.
        exclude_first: number of first blocks that stay in the model's dtype. Default: 0.
        exclude_last: number of last blocks that stay in the model's dtype. Default: 0.
        exclude: `fnmatch` patterns for names of layers and weights that stay in the model's dtype. A name is whole
            ("decoder.blocks.3.mlp.down") or relative to its block ("mlp.*"); "mlp" excludes all of that
            module.

    Returns:
        `model`. If more than a tenth of the blocks' weights stay in the model's dtype, such as routed experts, and are
        not excluded, a `Float8Warning` names them.

    Raises:
        InputError: an argument out of range; a pattern that matches nothing; no layer left; sizes that are not
            multiples of 16; a model that is sharded or quantised; a layer that is in float8 already, or not a `Linear`.
        BackendError: the model is on a GPU without float8.

    Examples:
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, device="cuda")  # doctest: +SKIP
        >>> lm.float8(model, exclude=["mlp.down"])  # doctest: +SKIP
    """
    recipe = _checked(model, recipe)
    blocks = list(model.decoder.blocks)
    for name, value in (("exclude_first", exclude_first), ("exclude_last", exclude_last)):
        check_count(name, value, least=0, most=len(blocks))
    excluded = Exclusion(exclude)
    layers: dict[str, Any] = {}
    unsupported: list[tuple[nn.Module, str]] = []
    for i, block in enumerate(blocks):
        prefix, supported = f"decoder.blocks.{i}", dict[str, nn.Module](float8_slots(block))
        kept = {f"{prefix}.{name}": linear for name, linear in supported.items() if not excluded(prefix, name)}
        others = [name for name in _other_weights(block, supported) if not excluded(prefix, name)]
        if exclude_first <= i < len(blocks) - exclude_last:
            layers |= kept
            unsupported += [(block, name) for name in others]
    excluded.check_used()
    if not layers:
        raise InputError("float8: there is no layer that could compute in float8, and is not excluded")
    for name, linear in layers.items():
        _check_layer(name, linear)
    for linear in layers.values():
        linear.store(Float8(recipe))
    _mark(blocks)
    _warn(blocks, unsupported)
    return model


def _mark(blocks: Sequence[nn.Module]) -> None:
    """Mark blocks and their layers, which then ask for the form of an input."""
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, Block | Layer):
            module.in_float8 = True


def _other_weights(block: nn.Module, linears: Iterable[str]) -> list[str]:
    """Names of a block's parameters with two or more dimensions that belong to none of the layers."""
    own = tuple(f"{name}." for name in linears)
    return [name for name, p in block.named_parameters() if p.dim() > 1 and not name.startswith(own)]


def _warn(blocks: Sequence[nn.Module], unsupported: Sequence[tuple[nn.Module, str]]) -> None:
    """Float8Warning if the unsupported weights (block, name) are more than a tenth of the blocks' weights."""
    sizes: dict[str, int] = {}
    for block, name in unsupported:
        owner, _, _ = name.rpartition(".")
        label = f"{name} ({type(block.get_submodule(owner)).__name__})"
        sizes[label] = sizes.get(label, 0) + block.get_parameter(name).numel()
    total = sum(p.numel() for block in blocks for p in block.parameters())
    if sum(sizes.values()) <= LEAST * total:
        return
    named = [label for label, size in sizes.items() if size > LEAST / 10 * total]
    warnings.warn(
        f"float8: {sum(sizes.values()) / total:.0%} of the weights of the blocks stay in the model's dtype: "
        f"{', '.join(named)}; exclude them to say that this is wanted (layers of your own compute in float8 if "
        "they name their float8_linears)",
        Float8Warning,
        stacklevel=3,
    )


def _checked(model: CausalLM, recipe: Float8Recipe | None) -> Float8Recipe:
    """The recipe, or its default; raises the errors of `float8` that concern the whole model."""
    check_native(model, "float8")
    check_own_modules(model.decoder, "float8")
    if not isinstance(recipe, Float8Recipe | None):
        raise InputError(f"recipe: must be a Float8Recipe, got {recipe!r}")
    if is_sharded(model):
        raise InputError("float8: the model is sharded already; call float8 first, then shard")
    check_unquantized(model, "float8", "float8 training needs the weights as they were")
    if (reason := float8_unsupported(model.device)) is not None:
        raise BackendError(f"float8: {reason}")
    return recipe or Float8Recipe()


def _check_layer(name: str, linear: Any) -> None:
    """Raise InputError unless the linear layer can compute in float8."""
    if type(linear).forward is not Linear.forward:
        raise InputError(
            f"{name}: is a {type(linear).__name__}, which has no float8; leave it as it is by exclude={[name]!r}"
        )
    if linear.compute is not None:
        raise InputError(f"{name}: is in float8 already; leave it as it is by exclude={[name]!r}")
    if linear.weight.dtype.itemsize > 4:
        raise InputError(f"{name}: is {linear.weight.dtype}; float8 is for weights of 4 bytes or fewer")
    check_float8_sizes(name, linear.out_features, linear.in_features)
