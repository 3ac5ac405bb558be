"""The modules that models are composed of, each with its config."""

from ligermodels.layers.attention import Attention, AttentionConfig
from ligermodels.layers.block import Block, BlockConfig
from ligermodels.layers.config import LayerConfig, LayerState
from ligermodels.layers.context import ForwardContext, RouterOutput, TreeTokens
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.full_precision import FullPrecision
from ligermodels.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.lm_head import HeadConfig, LMHead
from ligermodels.layers.mlp import GatedActivation, GatedMLP, MLPConfig
from ligermodels.layers.moe import MoE, MoEConfig, load_balancing_loss
from ligermodels.layers.norm import LayerNorm, NormConfig, RMSNorm
from ligermodels.layers.qkv import QKNormConfig, SplitQKV
from ligermodels.layers.recurrent_state import RecurrentState
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
from ligermodels.layers.router import Router, RouterConfig
from ligermodels.layers.targets import IGNORE_INDEX, Targets, shift_labels

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "DynamicScaling",
    "Embedding",
    "ForwardContext",
    "FullPrecision",
    "GatedActivation",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedMLP",
    "HeadConfig",
    "KVCache",
    "LMHead",
    "LayerConfig",
    "LayerNorm",
    "LayerState",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLPConfig",
    "MoE",
    "MoEConfig",
    "NormConfig",
    "QKNormConfig",
    "RMSNorm",
    "RecurrentState",
    "RopeConfig",
    "RopeScaling",
    "RotaryEmbedding",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "SplitQKV",
    "Targets",
    "TreeTokens",
    "YarnScaling",
    "inverse_frequencies",
    "load_balancing_loss",
    "longrope_attention_factor",
    "shift_labels",
    "yarn_attention_factor",
]
