"""Native models inside vLLM: embedding, norms, projections, recurrences, MLPs and head of this package around vLLM's
attention and caches.

vLLM imports `register` through the entry point `vllm.general_plugins` in each of its processes.
"""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.integrations.vllm.weights import update_weights

ARCHITECTURE = "LigerModelsForCausalLM"
"""Name of the model class for vLLM: `--hf-overrides '{"architectures": ["LigerModelsForCausalLM"]}'`."""

HYBRID_ARCHITECTURE = "LigerModelsHybridForCausalLM"
"""Name of the model class for models with recurrent mixers: Gated DeltaNet, Mamba2 or short convolutions."""

RECEIVER = f"{__name__}.receiver.WeightReceiver"
"""vLLM's `worker_extension_cls` of engines that take new weights, by default of all with these classes."""


def register() -> None:
    """Register the model classes with vLLM under their names above. They are imported when a model asks for them."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from ligermodels.integrations.vllm.engine_defaults import EngineDefaults

    for name in (ARCHITECTURE, HYBRID_ARCHITECTURE):
        MODELS_CONFIG_MAP[name] = EngineDefaults
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"{__name__}.model:{name}")


__getattr__, __dir__ = lazy_names(__name__, {"weights": ("update_weights",)})

__all__ = ["ARCHITECTURE", "HYBRID_ARCHITECTURE", "RECEIVER", "register", "update_weights"]
