"""Native transformer models on the project's own Triton ops; Hugging Face checkpoints in and out."""

import importlib
from typing import TYPE_CHECKING, Any

from ligermodels import errors

if TYPE_CHECKING:
    from ligermodels.archs.medusa import MedusaModel, MedusaOutput
    from ligermodels.model import CausalLM, CausalLMOutput, DecoderConfig
    from ligermodels.pretrained import from_config, from_pretrained

__version__ = "0.1.0"

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "DecoderConfig",
    "MedusaModel",
    "MedusaOutput",
    "errors",
    "from_config",
    "from_pretrained",
]

_HOMES = {
    "CausalLM": "model",
    "CausalLMOutput": "model",
    "DecoderConfig": "model",
    "MedusaModel": "archs.medusa",
    "MedusaOutput": "archs.medusa",
    "from_config": "pretrained",
    "from_pretrained": "pretrained",
}


def __getattr__(name: str) -> Any:
    # torch takes a second or more to import: `ligermodels --help` and the errors do without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
