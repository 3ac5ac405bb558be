"""Text generation: decoding states, sampling, and plain decoding, in CUDA graphs on a GPU."""

from ligermodels.generation.generate import generate, stream
from ligermodels.generation.routing import GenerateOutput
from ligermodels.generation.sampled_log_probs import sample_with_log_probs
from ligermodels.generation.sampling import sample
from ligermodels.generation.state import DecodingState
from ligermodels.generation.step import DecodingModel

__all__ = ["DecodingModel", "DecodingState", "GenerateOutput", "generate", "sample", "sample_with_log_probs", "stream"]
