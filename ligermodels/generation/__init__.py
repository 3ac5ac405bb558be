"""Text generation: KV cache, sampling, plain decoding, and Medusa tree decoding."""

from ligermodels.generation.cache import KVCache
from ligermodels.generation.generate import generate
from ligermodels.generation.sampling import sample
from ligermodels.generation.speculative import SpeculativeOutput, medusa_generate
from ligermodels.generation.step import Decoder
from ligermodels.generation.tree import Tree, chain, default_tree, expected_tokens, grow

__all__ = [
    "Decoder",
    "KVCache",
    "SpeculativeOutput",
    "Tree",
    "chain",
    "default_tree",
    "expected_tokens",
    "generate",
    "grow",
    "medusa_generate",
    "sample",
]
