"""The modules that models are composed of, each with its config."""

from ligermodels.layers.activation import GatedActivation
from ligermodels.layers.attention import Attention, SplitQKV
from ligermodels.layers.attention_config import AttentionConfig, QKNormConfig, ValueConfig
from ligermodels.layers.block import Block, BlockConfig, BlockOutput
from ligermodels.layers.config import LayerConfig, LayerState
from ligermodels.layers.context import ForwardContext, KeysValues, RouterOutput, TreeTokens
from ligermodels.layers.dense_moe import DenseMoEConfig
from ligermodels.layers.embedding import Embedding
from ligermodels.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ligermodels.layers.keeps_dtype import FullPrecision, KeepsDtype
from ligermodels.layers.kimi_delta_attention import KimiDeltaAttention, KimiDeltaAttentionConfig
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.latent_attention import LatentAttention, LatentAttentionConfig
from ligermodels.layers.latent_cache import LatentCache
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.linear_parts import Compute, Update
from ligermodels.layers.lm_head import HeadConfig, HeadLoss, LMHead
from ligermodels.layers.mamba2 import Mamba2, Mamba2Config
from ligermodels.layers.mlp import GatedMLP, MLPConfig
from ligermodels.layers.moe import MoE, MoEConfig
from ligermodels.layers.norm import LayerNorm, NormConfig, RMSNorm
from ligermodels.layers.parallel_mixers import ParallelMixers, ParallelMixersConfig
from ligermodels.layers.per_layer_inputs import PerLayerInputConfig, PerLayerInputs, PerLayerInputsConfig
from ligermodels.layers.recurrent_state import RecurrentState
from ligermodels.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    RotaryEmbedding,
    YarnScaling,
    inverse_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
    yarn_mscale,
)
from ligermodels.layers.router import Router, RouterConfig
from ligermodels.layers.router_losses import count_tokens_per_expert, load_balancing_loss, router_z_loss
from ligermodels.layers.shared_kv_attention import SharedKVAttentionConfig
from ligermodels.layers.short_conv import ShortConv, ShortConvConfig
from ligermodels.layers.targets import IGNORE_INDEX, Targets, shift_labels

__all__ = [
    "IGNORE_INDEX",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "BlockOutput",
    "Compute",
    "DenseMoEConfig",
    "DynamicScaling",
    "Embedding",
    "ForwardContext",
    "FullPrecision",
    "GatedActivation",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedMLP",
    "HeadConfig",
    "HeadLoss",
    "KVCache",
    "KeepsDtype",
    "KeysValues",
    "KimiDeltaAttention",
    "KimiDeltaAttentionConfig",
    "LMHead",
    "LatentAttention",
    "LatentAttentionConfig",
    "LatentCache",
    "Layer",
    "LayerConfig",
    "LayerNorm",
    "LayerState",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MLPConfig",
    "Mamba2",
    "Mamba2Config",
    "MoE",
    "MoEConfig",
    "NormConfig",
    "ParallelMixers",
    "ParallelMixersConfig",
    "PerLayerInputConfig",
    "PerLayerInputs",
    "PerLayerInputsConfig",
    "ProportionalScaling",
    "QKNormConfig",
    "RMSNorm",
    "RecurrentState",
    "RopeConfig",
    "RopeScaling",
    "RotaryEmbedding",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "SharedKVAttentionConfig",
    "ShortConv",
    "ShortConvConfig",
    "SplitQKV",
    "Targets",
    "TreeTokens",
    "Update",
    "ValueConfig",
    "YarnScaling",
    "count_tokens_per_expert",
    "inverse_frequencies",
    "load_balancing_loss",
    "longrope_attention_factor",
    "router_z_loss",
    "shift_labels",
    "yarn_attention_factor",
    "yarn_mscale",
]
