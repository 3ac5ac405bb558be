"""The modules that models are composed of, and their configs."""

from ligermodels.layers.attention import Attention, AttentionConfig, Context, QKNormConfig
from ligermodels.layers.block import Block, BlockConfig
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.head import HeadConfig, LMHead
from ligermodels.layers.mlp import GatedMLP, MLPConfig
from ligermodels.layers.moe import MoE, MoEConfig, load_balancing_loss
from ligermodels.layers.norm import NormConfig, RMSNorm
from ligermodels.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    RotaryEmbedding,
    YarnScaling,
    inverse_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
)
from ligermodels.layers.targets import IGNORE_INDEX, TargetRows, shift_labels

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "Context",
    "DynamicScaling",
    "Embedding",
    "GatedMLP",
    "HeadConfig",
    "LMHead",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "NormConfig",
    "QKNormConfig",
    "RMSNorm",
    "RopeConfig",
    "RopeScaling",
    "RotaryEmbedding",
    "TargetRows",
    "YarnScaling",
    "inverse_frequencies",
    "load_balancing_loss",
    "longrope_attention_factor",
    "shift_labels",
    "yarn_attention_factor",
]
