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


def register() -> None:
    """Register the model classes with vLLM under their names above. They are imported when a model asks for them."""
    from vllm import ModelRegistry

    for name in (ARCHITECTURE, HYBRID_ARCHITECTURE):
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"{__name__}.model:{name}")


__getattr__, __dir__ = lazy_names(__name__, {"weights": ("update_weights",)})

__all__ = ["ARCHITECTURE", "HYBRID_ARCHITECTURE", "register", "update_weights"]
