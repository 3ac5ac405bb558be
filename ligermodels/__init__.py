"""Native transformer models on the project's own Triton ops; Hugging Face checkpoints in and out."""

from typing import TYPE_CHECKING

from ligermodels import errors
from ligermodels.lazy import lazy_names
from ligermodels.moved import redirect

if TYPE_CHECKING:
    from ligermodels.adapt.adapter import load_adapter, save_adapter
    from ligermodels.adapt.float8 import float8
    from ligermodels.adapt.lora import add_lora, merge_lora
    from ligermodels.adapt.quantize import dequantize, quantize
    from ligermodels.data.tokenizer import Tokenizer
    from ligermodels.integrations.in_place import nativize, restore
    from ligermodels.models.capture import Captured, capture
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.models.decoder import Decoder, DecoderConfig
    from ligermodels.models.output import CausalLMOutput
    from ligermodels.ops.float8.linear import Float8Recipe
    from ligermodels.parallel.apply import parallelize
    from ligermodels.parallel.plan import ParallelPlan
    from ligermodels.pretrained import from_config, from_pretrained, from_transformers
    from ligermodels.speculative.dspark import DFlashModel, DSparkModel
    from ligermodels.speculative.eagle3 import Eagle3Model
    from ligermodels.speculative.joint import JointMedusa
    from ligermodels.speculative.medusa import MedusaModel
    from ligermodels.speculative.mtp import MTPModel
    from ligermodels.speculative.output import MedusaOutput, MultiHeadOutput

__version__ = "0.1.0"

redirect(__name__)

# torch takes a second or more to import: `ligermodels --help` and the errors do without.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "adapt.adapter": ("load_adapter", "save_adapter"),
        "models.capture": ("Captured", "capture"),
        "models.causal_lm": ("CausalLM",),
        "models.decoder": ("Decoder", "DecoderConfig"),
        "adapt.float8": ("float8",),
        "adapt.lora": ("add_lora", "merge_lora"),
        "models.output": ("CausalLMOutput",),
        "adapt.quantize": ("dequantize", "quantize"),
        "data.tokenizer": ("Tokenizer",),
        "integrations.in_place": ("nativize", "restore"),
        "ops.float8.linear": ("Float8Recipe",),
        "parallel.apply": ("parallelize",),
        "parallel.plan": ("ParallelPlan",),
        "pretrained": ("from_config", "from_pretrained", "from_transformers"),
        "speculative.joint": ("JointMedusa",),
        "speculative.dspark": ("DFlashModel", "DSparkModel"),
        "speculative.eagle3": ("Eagle3Model",),
        "speculative.medusa": ("MedusaModel",),
        "speculative.mtp": ("MTPModel",),
        "speculative.output": ("MedusaOutput", "MultiHeadOutput"),
    },
)

__all__ = [
    "Captured",
    "CausalLM",
    "CausalLMOutput",
    "DFlashModel",
    "DSparkModel",
    "Decoder",
    "DecoderConfig",
    "Eagle3Model",
    "Float8Recipe",
    "JointMedusa",
    "MTPModel",
    "MedusaModel",
    "MedusaOutput",
    "MultiHeadOutput",
    "ParallelPlan",
    "Tokenizer",
    "add_lora",
    "capture",
    "dequantize",
    "errors",
    "float8",
    "from_config",
    "from_pretrained",
    "from_transformers",
    "load_adapter",
    "merge_lora",
    "nativize",
    "parallelize",
    "quantize",
    "restore",
    "save_adapter",
]
