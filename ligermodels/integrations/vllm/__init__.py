"""Native models inside vLLM: embedding, norms, projections, MLPs and head of this package around vLLM's attention.

vLLM imports `register` through the entry point `vllm.general_plugins` in each of its processes.
"""

from typing import TYPE_CHECKING

from ligermodels.lazy import lazy_names

if TYPE_CHECKING:
    from ligermodels.integrations.vllm.weights import update_weights

ARCHITECTURE = "LigerModelsForCausalLM"
"""Name of the model class for vLLM: `--hf-overrides '{"architectures": ["LigerModelsForCausalLM"]}'`."""


def register() -> None:
    """Register the model class with vLLM under the name `ARCHITECTURE`. It is imported when a model asks for it."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")


__getattr__, __dir__ = lazy_names(__name__, {"weights": ("update_weights",)})

__all__ = ["ARCHITECTURE", "register", "update_weights"]
