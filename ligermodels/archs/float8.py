"""Float8 training of a model: which of its linear layers compute in float8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.exclusion import Exclusion
from ligermodels.archs.lora import check_untouched
from ligermodels.errors import BackendError, InputError
from ligermodels.layers.float8 import Float8Linear, slots
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import is_sharded
from ligermodels.ops import Float8Recipe, check_float8_sizes, float8_unsupported

Model = TypeVar("Model", bound=CausalLM)


def float8(
    model: Model,
    recipe: Float8Recipe | None = None,
    *,
    exclude_first: int = 0,
    exclude_last: int = 0,
    exclude: Sequence[str] = (),
) -> Model:
    """Let the linear layers of the blocks compute in float8, forward and backward, in place.

    Weights stay what they are, in the model, its checkpoints and the optimizer: each forward pass casts them, but those
    that need no gradient once, and again when they are changed (but for changes in place through `.data`, which PyTorch
    does not count). Embeddings, head, norms, routers, experts, attention and the residual stay in the
    model's dtype. It holds in training mode, and wherever gradients are recorded; in eval mode under `torch.no_grad`,
    as in generation, layers compute in their own dtype.

    Args:
        model: stays the same object.
        recipe: formats and scales; by default `Float8Recipe()`.
        exclude_first, exclude_last: so many blocks at either end are left as they are.
        exclude: patterns (`fnmatch`) of names, whole ("decoder.blocks.3.mlp.down") or within a block ("mlp.*"), of
            linear layers, and of mixers or feed-forward layers ("mlp"), which are left as they are.

    Returns `model`.

    Raises:
        InputError: an argument out of range, a pattern that matches nothing, or nothing left; a mixer or a feed-forward
            layer that has linear layers, and no rule for float8; sizes that are no multiples of 16; a model that is
            sharded, quantised, or in float8 already; hooks on a linear layer, which its successor would lack.
        BackendError: the model is on a GPU without float8.
    """
    recipe = _checked(model, recipe)
    blocks = list(model.decoder.blocks)
    for name, value in (("exclude_first", exclude_first), ("exclude_last", exclude_last)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= len(blocks):
            raise InputError(f"{name}: must be a number of blocks, 0 to {len(blocks)}, got {value!r}")
    excluded = Exclusion(exclude)
    chosen = []
    for i, block in enumerate(blocks):
        found, prefix = list(slots(block)), f"decoder.blocks.{i}"
        kept = [slot for slot in found if not excluded(prefix, slot.name)]
        for part in ("mixer", "mlp"):
            if not any(slot.name.startswith(f"{part}.") for slot in found) and not excluded(prefix, part):
                kind = type(getattr(block, part)).__name__
                raise InputError(
                    f"{prefix}.{part}: a {kind} has no rule for float8; leave it in the model's dtype by "
                    f"exclude={[part]!r}"
                )
        if exclude_first <= i < len(blocks) - exclude_last:
            chosen += [(f"{prefix}.{slot.name}", slot) for slot in kept]
    excluded.check_used()
    if not chosen:
        raise InputError("exclude: leaves no linear layer to compute in float8")
    for name, slot in chosen:
        _check_linear(name, slot.linear)
    for name, (_, linear, producer) in chosen:
        if isinstance(linear, LoRALinear):
            linear.float8 = recipe
        elif isinstance(linear, nn.Linear):
            model.set_submodule(name, Float8Linear(linear, recipe))
            if producer is not None:
                producer.float8_output = recipe  # type: ignore[assignment]
    return model


def _checked(model: CausalLM, recipe: Float8Recipe | None) -> Float8Recipe:
    """The recipe; errors where the model cannot be had in float8."""
    if not isinstance(model, CausalLM):
        raise InputError(
            f"float8: takes a native CausalLM, got a {type(model).__name__}; of heads on a model, their base"
        )
    if not isinstance(recipe, Float8Recipe | None):
        raise InputError(f"recipe: must be a Float8Recipe, got {recipe!r}")
    if is_sharded(model):
        raise InputError("float8: the model is sharded already; call float8 first, then shard")
    if any(isinstance(m, Float8Linear) or getattr(m, "float8", None) is not None for m in model.decoder.modules()):
        raise InputError("float8: the model is in float8 already")
    check_unquantized(model, "float8", "float8 training needs the weights as they were")
    if (reason := float8_unsupported(model.device)) is not None:
        raise BackendError(f"float8: {reason}")
    return recipe or Float8Recipe()


def _check_linear(name: str, linear: nn.Module) -> None:
    """InputError unless the layer can be had in float8."""
    if type(linear) not in (nn.Linear, LoRALinear) or not isinstance(linear, nn.Linear):
        raise InputError(
            f"{name}: is a {type(linear).__name__}, which has no float8; leave it as it is by exclude={[name]!r}"
        )
    check_untouched({name: linear}, "float8")
    if linear.weight.dtype.itemsize > 4:
        raise InputError(f"{name}: is {linear.weight.dtype}; float8 is for weights of 4 bytes or fewer")
    check_float8_sizes(name, linear.out_features, linear.in_features)
