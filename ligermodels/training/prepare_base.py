"""Changes of the base model of fine-tuning, while it is on the meta device: routers, quantised weights, LoRA."""

from __future__ import annotations

from ligermodels.adapt.lora import add_lora
from ligermodels.adapt.saved_modules import token_modules
from ligermodels.adapt.targets import leaf
from ligermodels.arguments import QuantizedFormat
from ligermodels.errors import ConfigError, arguments_named
from ligermodels.models.causal_lm import CausalLM
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.job import quantize_base
from ligermodels.training.router_bias import balance_routers


def prepare_lora(recipe: FineTuningRecipe, model: CausalLM) -> None:
    """Set up the model's routers, quantise its weights and add LoRA, if the recipe does."""
    prepare_routers(recipe, model)
    quantize_base(recipe, model)
    if recipe.lora_rank is not None:
        names = {"target_modules": "lora_targets", "modules_to_save": "lora_modules_to_save"}
        names["trainable_token_indices"] = "lora_trainable_token_indices"
        rows, whole = recipe.lora_trainable_token_indices, {leaf(name) for name in recipe.lora_modules_to_save}
        with arguments_named(r="lora_rank", **names):
            add_lora(
                model,
                recipe.lora_rank,
                lora_alpha=recipe.lora_alpha or 2 * recipe.lora_rank,
                lora_dropout=recipe.lora_dropout,
                target_modules=recipe.lora_targets or "all-linear",
                modules_to_save=recipe.lora_modules_to_save,
                trainable_token_indices={name: rows for name in token_modules(model) if rows and name not in whole}
                or None,
            )


def prepare_sampling(recipe: FineTuningRecipe, kind: QuantizedFormat | None, model: CausalLM) -> None:
    """Make the changes of `prepare_lora` to a copy that completions are sampled from, and round its weights to `kind`,
    if given, except the layers of `quantize_exclude`."""
    prepare_lora(recipe if kind is None else recipe.model_copy(update={"quantize": kind}), model)


def prepare_routers(recipe: FineTuningRecipe, model: CausalLM) -> None:
    """Set the weight of the routers' z-loss, and prepare updates of their biases.

    Raises:
        ConfigError: a setting does not fit the model.
    """
    if recipe.router_z_loss_coef and not model.decoder.expert_routers:
        raise ConfigError("router_z_loss_coef: is for mixtures of experts, and this model has none; leave it out")
    model.router_z_loss_coef = recipe.router_z_loss_coef
    if recipe.router_bias_update_rate:
        balance_routers(model)
