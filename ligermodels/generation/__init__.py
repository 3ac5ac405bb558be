"""Text generation: decoding states, sampling, and plain decoding, in CUDA graphs on a GPU."""

from ligermodels.generation.generate import generate, stream
from ligermodels.generation.routing import GenerateOutput
from ligermodels.generation.sampling import sample
from ligermodels.generation.state import DecodingState
from ligermodels.generation.step import DecodingModel

__all__ = ["DecodingModel", "DecodingState", "GenerateOutput", "generate", "sample", "stream"]
