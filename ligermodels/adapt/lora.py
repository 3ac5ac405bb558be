"""Add LoRA to linear layers of a model, by their names in transformers, and merge it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from ligermodels.adapt.saved_modules import chosen_modules, module_paths, train_modules
from ligermodels.adapt.target_modules import chosen_targets
from ligermodels.adapt.targets import Target
from ligermodels.adapt.token_rows import Indices, chosen_rows, initialize_rows
from ligermodels.arguments import check_count, check_flag, check_number, is_whole
from ligermodels.convert.placement import DtypeLike, resolve_dtype
from ligermodels.errors import InputError, short
from ligermodels.layers import MoE
from ligermodels.layers.expert_lora import ExpertLoRA
from ligermodels.layers.initialization import persistent_tensors, whole_parameters
from ligermodels.layers.lora import MOST_RANKS, LoRA, LoRAPart
from ligermodels.layers.quantized import quantized_layers
from ligermodels.layers.sharding import is_sharded
from ligermodels.layers.token_rows import TokenRows
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native, check_own_modules

Model = TypeVar("Model", bound=CausalLM)
AnyLoRA = LoRA | ExpertLoRA | TokenRows
"""LoRA of a linear layer, or of the experts of a mixture; or trained rows of the embedding or the LM head."""


def add_lora(
    model: Model,
    r: int = 16,
    *,
    lora_alpha: float = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    target_parameters: Sequence[str] | None = None,
    experts_shared_outer_loras: bool = False,
    modules_to_save: Sequence[str] | None = None,
    trainable_token_indices: Indices | None = None,
    use_rslora: bool = False,
    dtype: DtypeLike | None = None,
) -> Model:
    """Freeze a model and add LoRA (Hu et al., 2021, https://arxiv.org/abs/2106.09685) to its linear layers, in place.

    A layer with weight W (out, in) then computes W x + scaling * B A dropout(x), with A (r, in) and B (out, r). A and B
    are trained, `modules_to_save` and `trainable_token_indices`; nothing else. W may be quantised (QLoRA; Dettmers et
    al., 2023, https://arxiv.org/abs/2305.14314) or compute in float8. Add LoRA before the model is sharded and before
    an optimizer is created. `save_adapter` writes A and B, `merge_lora` adds them to W. Arguments have PEFT's names.

    Args:
        model: the model, without LoRA and not sharded.
        r: rank of the updates. Default: 16.
        lora_alpha: numerator of the scaling lora_alpha / r. Default: 32.
        lora_dropout: probability of zeroing an element of x, in training mode, unless A and B are frozen. q, k and v
            share a mask, and so do gate and up; in PEFT each has its own, and experts have none. Default: 0.
        target_modules: names of linear layers in transformers ("q_proj" or "layers.0.self_attn.q_proj"), or a regular
            expression that matches whole paths. Names of experts ("gate_proj", "up_proj", "down_proj", for Mixtral
            "w1", "w3", "w2") adapt all experts, each with an A and a B of its own for each name; "experts" adapts
            `gate_up_proj` and `down_proj`, as `target_parameters`. "all-linear" stands for all linear layers of the
            blocks, except routers, and dense MLPs or shared experts with the experts' names; it leaves out the experts
            themselves, with a warning: give ["all-linear", "experts"] for both. Default: "all-linear".
        target_parameters: names of the experts' weights in transformers, beside `target_modules`, such as
            ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]. Gate and up then share an A. Default: none.
        experts_shared_outer_loras: all experts of a layer share A of gate and up, and B of down. SGLang and vLLM have
            the layout under this name. Default: False.
        modules_to_save: names of modules in transformers that are trained whole, such as ["embed_tokens", "lm_head"]
            for tokens that the base model does not know. As in PEFT, a name is the end of a path: "norm" is every norm.
            A tied embedding and head stay one weight. Default: none.
        trainable_token_indices: ids of tokens whose rows alone are trained, as in PEFT: a list, for the embedding, and
            for the LM head if it is tied; or a dict such as {"embed_tokens": [5, 7], "lm_head": [5, 7]}. The other rows
            stay frozen, and the adapter has the rows of these tokens. For many tokens `modules_to_save` takes less
            time. Default: none.
        use_rslora: the scaling is lora_alpha / sqrt(r) instead (Kalajdzievski, 2023). Default: False.
        dtype: dtype of A, B and rows of tokens, which compute in the dtype of x. Default: the dtype of W, or the
            model's dtype if W is quantised.

    Returns:
        `model`.

    Raises:
        InputError: an argument is out of range; `trainable_token_indices` names a module of `modules_to_save`, or an LM
            head with a bias, which PEFT leaves out there; a name in `target_modules` or `modules_to_save` matches
            nothing (the message lists the known names), or both name a layer; or the model has LoRA already, or is
            sharded.
        ConfigError: the model was composed by hand, and has no `export_spec` with the names.

    Examples:
        >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, quantize="int4")  # doctest: +SKIP
        >>> lm.add_lora(model, r=16, target_modules=["q_proj", "v_proj"])  # doctest: +SKIP
    """
    check_adaptable(model, "add_lora")
    check_flag("use_rslora", use_rslora)
    r = check_count("r", r, most=MOST_RANKS)
    lora_alpha = _number("lora_alpha", lora_alpha, positive=True)
    check_flag("experts_shared_outer_loras", experts_shared_outer_loras)
    chosen = chosen_targets(model, _listed(target_modules), _listed(target_parameters))
    modules = chosen_modules(model, _listed(modules_to_save), {target.module for target in chosen.values()})
    rows = chosen_rows(model, trainable_token_indices, modules, dtype)
    parts = {path: target.part(path, r, lora_alpha, use_rslora) for path, target in chosen.items()}
    options: dict[str, Any] = {"dropout": lora_dropout, "dtype": dtype, "shared_outer": experts_shared_outer_loras}
    insert(model, {**new_updates(model, chosen, parts, **options), **rows})
    initialize_rows(model)
    train_modules(model, modules)
    return model


def _number(name: str, value: Any, *, positive: bool = False) -> float:
    """`check_number`, as an int or a float, which adapter_config.json can hold: numbers of numpy are neither."""
    check_number(name, value, positive=positive)
    return int(value) if is_whole(value) else float(value)


def _listed(names: Any) -> Any:
    """The names of an iterator as a list, since several loops read them; other arguments as they are."""
    return list(names) if isinstance(names, Iterator) else names


def merge_lora(model: Model, *, dequantize: bool = False) -> Model:
    """Add the LoRA updates to the weights of the model, in place, and remove LoRA.

    Each weight is added to its update in float32 and rounded once; PEFT's `merge_and_unload` rounds the update and the
    sum. Modules that were trained whole keep their values. The weights stay frozen; `model.requires_grad_()` makes them
    trainable.

    Args:
        model: a model with LoRA, not sharded.
        dequantize: keep merged weights in the model's dtype, so that `save_pretrained` can write the model. Default:
            False, quantised weights are rounded to their format again, and small updates are lost in the rounding.

    Returns:
        `model`.

    Raises:
        InputError: the model has no LoRA, or is sharded; an update has values that are not finite; or an adapted weight
            is pruned or parametrised. The model is not changed.

    Examples:
        >>> lm.merge_lora(model).save_pretrained("merged/")  # doctest: +SKIP
    """
    check_flag("dequantize", dequantize)
    updates = require_lora(model, "merge_lora")
    if is_sharded(model):
        raise InputError("merge_lora: the model is sharded; save_adapter, then load it into a whole model and merge")
    _check_finite(updates)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in updates}
    for name, layer in layers.items():
        layer.check_own_weights(name)
    for layer in layers.values():
        layer.merge_update(model.dtype if dequantize else None)
    if dequantize:
        for layer in quantized_layers(model).values():  # layers without LoRA
            layer.make_dense(model.dtype)
    train_modules(model, model.modules_to_save, False)
    model.modules_to_save = ()
    return model


def _check_finite(updates: Mapping[str, AnyLoRA]) -> None:
    """Raise InputError, before a weight is changed, for an update with NaN or infinity."""
    for name, update in updates.items():
        for own, parameter in update.lora_parameters().items():
            if not parameter.is_meta and not parameter.detach().isfinite().all():
                raise InputError(
                    f"merge_lora: {name}.update.{own} has values that are not finite, which would replace the weights; "
                    "merge an earlier checkpoint, or train again with a lower learning rate"
                )


def new_updates(
    model: CausalLM,
    known: Mapping[str, Target],
    parts: Mapping[str, LoRAPart],
    *,
    dropout: float,
    dtype: DtypeLike | None,
    shared_outer: bool = False,
) -> dict[str, AnyLoRA]:
    """LoRA updates that are not yet in the model.

    Args:
        model: the model to adapt.
        known: path in transformers -> linear layer or experts.
        parts: path in transformers -> its part of an update.
        dropout: probability in [0, 1).
        dtype: dtype of A and B; None for the dtype of the weight.
        shared_outer: see `ExpertLoRA`. Default: False.

    Returns:
        Native name of the linear layer or mixture -> its update.

    Raises:
        InputError: `dropout` is out of range.
    """
    if (dropout := _number("lora_dropout", dropout)) >= 1:
        raise InputError(f"lora_dropout: must lie in [0, 1), got {short(dropout)}")
    resolved = resolve_dtype(dtype, None)
    by_module: dict[str, list[Any]] = {}
    for path, part in parts.items():
        by_module.setdefault(known[path].module, []).append(part)
    updates: dict[str, AnyLoRA] = {}
    for name, own in by_module.items():
        layer: Any = model.get_submodule(name)
        if isinstance(layer, MoE):
            weight = layer.gate_up
            options: dict[str, Any] = {"dropout": dropout, "device": layer.router.weight.device}
            options |= {"dtype": resolved or (model.dtype if weight is None else weight.dtype)}
            update = ExpertLoRA(*layer.sizes, own, shared_outer=shared_outer, **options)
            updates[name] = update.train(layer.training)
        else:
            updates[name] = LoRA(layer, own, dropout=dropout, dtype=resolved, default_dtype=model.dtype)
    return updates


def insert(model: Model, updates: Mapping[str, AnyLoRA], *, trainable: bool = True) -> Model:
    """Freeze a model and set the LoRA updates of its linear layers and experts.

    Args:
        model: the model, changed in place.
        updates: native name of the linear layer or mixture -> its update.
        trainable: whether A and B require gradients. Default: True.

    Returns:
        `model`.
    """
    model.requires_grad_(False)
    for name, update in updates.items():
        layer: Any = model.get_submodule(name)
        layer.update = update.requires_grad_(trainable)
    return model


def lora_layers(model: nn.Module) -> dict[str, AnyLoRA]:
    """The LoRA updates of a model, by the native names of their linear layers and mixtures; and trained rows of tokens.

    The rows of a tied embedding and LM head are under both names."""
    named = ((name, getattr(module, "update", None)) for name, module in model.named_modules())
    return {name: update for name, update in named if isinstance(update, LoRA | ExpertLoRA | TokenRows)}


def initialize_lora(model: nn.Module) -> None:
    """Fill the updates of a model with their initial values, whose sum with the weights is the base model.

    If the model is sharded, all ranks must call this, with the same random state."""
    for update in lora_layers(model).values():
        if not isinstance(update, TokenRows):
            with whole_parameters(update, update.lora_parameters()):
                update.init_weights()
    initialize_rows(model)


@contextmanager
def lora_disabled(model: CausalLM) -> Iterator[None]:
    """Context manager in which a model computes without its LoRA updates, as its base.

    Raises InputError if modules are trained whole, whose values in the base the model does not have.
    """
    if model.modules_to_save:
        paths = ", ".join(module_paths(model.modules_to_save))
        raise InputError(f"lora_disabled: the base's values of {paths} are not kept; copy the model before training")
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in lora_layers(model)}
    updates = {name: layer.update for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.update = None
        yield
    finally:
        for name, layer in layers.items():
            layer.update = updates[name]


def without_lora(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's checkpoint, without the tensors of LoRA, by native name."""
    updates = {f"{name}.update.{part}" for name, lora in lora_layers(model).items() for part in lora.lora_parameters()}
    return {name: tensor for name, tensor in persistent_tensors(model).items() if name not in updates}


def require_lora(model: CausalLM, function: str) -> dict[str, AnyLoRA]:
    """`lora_layers` of a native model with LoRA; InputError, naming the `function`, for other models."""
    check_native(model, function)
    if not (updates := lora_layers(model)):
        raise InputError(f"{function}: the model has no LoRA; add_lora or load_adapter adds one")
    return updates


def check_adaptable(model: Any, function: str) -> None:
    """Raise InputError, naming the `function`, unless LoRA can be added to the model."""
    check_native(model, function)
    check_own_modules(model.decoder, function)
    if lora_layers(model):
        raise InputError(f"{function}: the model has LoRA already; merge_lora it, or start from a model without")
    if is_sharded(model):
        raise InputError(f"{function}: the model is sharded already; add LoRA first, then shard")
