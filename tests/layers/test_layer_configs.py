"""Fields of layer configs: a value that a layer cannot honour is an error that names the field."""

from typing import Any

import pytest

from ligermodels.errors import ConfigError
from ligermodels.layers import (
    AttentionConfig,
    BlockConfig,
    DenseMoEConfig,
    DynamicScaling,
    GatedDeltaNetConfig,
    HeadConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mamba2Config,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    PerLayerInputsConfig,
    ProportionalScaling,
    QKNormConfig,
    RopeConfig,
    RouterConfig,
    SharedKVAttentionConfig,
    ShortConvConfig,
    ValueConfig,
    YarnScaling,
    inverse_frequencies,
)
from ligermodels.layers.query_scaling import QueryScaling
from ligermodels.layers.ungated_mlp import UngatedMLPConfig

NORM, ROUTER, ROPE = NormConfig(1e-6), RouterConfig(4, 2), RopeConfig(8)
ATTENTION: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ROPE}
LATENT: dict[str, Any] = {
    "num_heads": 4,
    "plain_dim": 8,
    "rotated_dim": 8,
    "value_dim": 8,
    "kv_rank": 8,
    "q_rank": None,
    "rope": ROPE,
}
EXPERTS = MoEConfig(ROUTER, 8, aux_loss=False)
BLOCK: dict[str, Any] = {"mixer": AttentionConfig(**ATTENTION), "mlp": MLPConfig(8), "norm": NORM}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}
MAMBA: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "state_size": 8, "num_groups": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64}
YARN = {"factor": 8.0, "original_context": 64}
PER_LAYER: dict[str, Any] = {"vocab_size": 9, "num_layers": 2, "size": 4, "norm": NORM}

CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (NormConfig, {"eps": 1e-6}, {"kind": "rsm", "casting_mode": "lama", "bias": True, "eps": -1e-6}),
    (NormConfig, {"eps": 1e-6, "kind": "layer"}, {"casting_mode": "gemma"}),
    (QKNormConfig, {"norm": NORM}, {"over": "projektion", "norm": NormConfig(1e-6, kind="layer")}),
    (QKNormConfig, {"norm": NORM, "over": "projection"}, {"has_weight": False, "after_rope": True}),
    (QKNormConfig, {"norm": NormConfig(1e-6, offset=1.0)}, {"has_weight": False}),
    (ValueConfig, {}, {"norm_eps": -1.0, "dim": 0, "scale": float("nan")}),
    (ValueConfig, {"from_keys": True}, {"dim": 4}),
    (AttentionConfig, ATTENTION, {"num_heads": 5, "num_kv_heads": 0, "head_dim": -8, "window": 0, "softcap": -1.0}),
    (AttentionConfig, ATTENTION, {"chunk": 0}),
    (AttentionConfig, ATTENTION, {"rope": RopeConfig(10)}),
    (AttentionConfig, {**ATTENTION, "stored_as_pairs": True}, {"output_gate": True}),
    (AttentionConfig, {**ATTENTION, "values": ValueConfig(from_keys=True)}, {"output_gate": True}),
    (
        AttentionConfig,
        {**ATTENTION, "values": ValueConfig(dim=4)},
        {"output_gate": True, "stored_as_pairs": True, "shares_kv": True, "values": ValueConfig(dim=10)},
    ),
    (
        SharedKVAttentionConfig,
        {**ATTENTION, "kv_from": 0},
        {
            "sinks": True,
            "output_gate": True,
            "shares_kv": True,
            "values": ValueConfig(),
            "query_scaling": QueryScaling(0.1, 64),
            "qk_norm": QKNormConfig(NORM, "projection"),
            "kv_from": -1,
            "num_heads": 5,
        },
    ),
    (SharedKVAttentionConfig, {**ATTENTION, "kv_from": 0}, {"qk_norm": QKNormConfig(NORM, has_weight=False)}),
    (SharedKVAttentionConfig, {**ATTENTION, "kv_from": 0}, {"qk_norm": QKNormConfig(NORM, after_rope=True)}),
    (BlockConfig, BLOCK, {"output_norm": NORM}),
    (BlockConfig, {**BLOCK, "post_norm": True}, {"output_norm": NormConfig(1e-6, kind="layer", bias=True)}),
    (BlockConfig, {**BLOCK, "mlp": DenseMoEConfig(MLPConfig(8), EXPERTS, NORM)}, {"parallel": True}),
    (LatentAttentionConfig, LATENT, {"num_heads": 0, "plain_dim": -1, "value_dim": 0, "kv_rank": 0, "q_rank": 0}),
    (LatentAttentionConfig, LATENT, {"rotated_dim": 4}),
    (ShortConvConfig, {"channels": 8}, {"channels": 0, "width": -1}),
    (GatedDeltaNetConfig, DELTA, {"num_key_heads": 0, "num_value_heads": 3, "conv_width": 0, "norm_eps": -1.0}),
    (KimiDeltaAttentionConfig, {**DELTA, "gate_rank": 8}, {"num_key_heads": 0, "gate_rank": 0, "decay_bound": 0.0}),
    (LatentAttentionConfig, LATENT, {"head_gate": "relu"}),
    (LatentAttentionConfig, {**LATENT, "rope": None}, {"rotated_dim": 0}),
    (Mamba2Config, MAMBA, {"num_heads": 5, "num_groups": 0, "state_size": 0, "time_step_limit": (2.0, 1.0)}),
    (MLPConfig, {"size": 8}, {"size": 0, "activation": "gelu_new"}),
    (UngatedMLPConfig, {"size": 8}, {"size": 8.5, "activation": "gelu"}),
    (MoEConfig, {"router": ROUTER, "size": 8}, {"size": 0, "activation": "relu", "alpha": 0.0, "limit": -7.0}),
    (RouterConfig, {"num_experts": 4, "top_k": 2}, {"scores": "softmaxx", "top_k": 5, "num_groups": 3, "eps": -1.0}),
    (RouterConfig, {"num_experts": 4, "top_k": 2}, {"min_sum": -1.0, "scores_per_group": 0}),
    (PerLayerInputsConfig, PER_LAYER, {"vocab_size": 0, "num_layers": 0, "size": -4}),
    (PerLayerInputConfig, {"layer": 0, "size": 4, "norm": NORM}, {"layer": -1, "size": 0, "activation": "tanh"}),
    (QueryScaling, {"beta": 0.1, "original_context": 64}, {"original_context": 0, "offset": -1}),
    (RopeConfig, {"dim": 8}, {"dim": 0, "theta": -1.0, "attention_factor": float("nan")}),
    (LinearScaling, {"factor": 2.0}, {"factor": 0.0}),
    (ProportionalScaling, {"part": 0.5}, {"part": 1.5, "factor": -1.0}),
    (DynamicScaling, YARN, {"factor": 0.0, "original_context": 0}),
    (Llama3Scaling, LLAMA3, {"factor": 0.0, "low_freq_factor": 4.0, "original_context": 0}),
    (YarnScaling, YARN, {"factor": -2.0, "beta_fast": 0.0, "beta_slow": 0.0, "original_context": 0}),
    (HeadConfig, {}, {"softcap": 0.0}),
]


@pytest.mark.parametrize(
    ("config", "fields", "name", "value"),
    [(config, fields, name, value) for config, fields, bad in CASES for name, value in bad.items()],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value) if isinstance(value, str) else "",
)
def test_a_field_that_is_wrong(config: Any, fields: dict[str, Any], name: str, value: Any) -> None:
    config(**fields)
    with pytest.raises(ConfigError, match=f"^{name}: "):
        config(**{**fields, name: value})


def test_the_number_of_longrope_factors() -> None:
    right, one = (1.0,) * 4, (1.0,)  # torch would take one factor for all
    assert inverse_frequencies(RopeConfig(8, scaling=LongRopeScaling(right, right, 64))).shape == (4,)
    for name, factors in (("short", (one, right)), ("long", (right, one))):
        with pytest.raises(ConfigError, match=f"^{name}: must have 4 factors, dim / 2; got 1"):
            inverse_frequencies(RopeConfig(8, scaling=LongRopeScaling(*factors, 64)))
