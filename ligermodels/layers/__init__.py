"""The modules that models are composed of, and their configs."""

from ligermodels.layers.attention import Attention, AttentionConfig, Context
from ligermodels.layers.block import Block, BlockConfig
from ligermodels.layers.head import IGNORE_INDEX, HeadConfig, LMHead, shift_labels
from ligermodels.layers.mlp import GatedMLP, MLPConfig
from ligermodels.layers.norm import NormConfig, RMSNorm
from ligermodels.layers.rope import LinearScaling, Llama3Scaling, RopeConfig, RotaryEmbedding, inverse_frequencies

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "Context",
    "GatedMLP",
    "HeadConfig",
    "LMHead",
    "LinearScaling",
    "Llama3Scaling",
    "MLPConfig",
    "NormConfig",
    "RMSNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "inverse_frequencies",
    "shift_labels",
]
