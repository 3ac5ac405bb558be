"""The modules of one transformers layer get their native forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

from torch import nn

from ligermodels.archs.compose import STACKED_EXPERTS
from ligermodels.errors import ConfigError
from ligermodels.integrations.attention import HFAttention, HFSharedKVAttention
from ligermodels.integrations.gated_delta_net import HFCausalConv, HFGatedDeltaNet, HFGatedNorm
from ligermodels.integrations.kimi_delta_attention import HFKimiDeltaAttention
from ligermodels.integrations.latent_attention import HFLatentAttention
from ligermodels.integrations.mamba2 import HFGatedGroupNorm, HFMamba2
from ligermodels.integrations.mlp import experts_forward, keep_implementation, mlp_forward
from ligermodels.integrations.modules import Native, layer_forward, native_forward, set_forward, within_adapter
from ligermodels.integrations.norm import HFBlock, native_norms, norm_forward
from ligermodels.integrations.short_conv import HFShortCausalConv, HFShortConv
from ligermodels.layers import (
    AttentionConfig,
    BlockConfig,
    DenseMoEConfig,
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    Mamba2Config,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    SharedKVAttentionConfig,
    ShortConvConfig,
)
from ligermodels.layers.ungated_mlp import UngatedMLPConfig

Names = Mapping[str, str]
"""Part of a native layer, a key of `NAMES` of the layers' configs -> path in the transformers layer."""


def set_norm(module: nn.Module, config: NormConfig) -> None:
    """Give a transformers norm its native forward."""
    module = within_adapter(module)
    set_forward(module, norm_forward, Native(config, layer=native_norms(module, config)))


def _nativize_attention(
    module: nn.Module,
    config: AttentionConfig,
    names: Names,
    layer: Callable[[nn.Module, Any], nn.Module] = HFAttention,
    norms: tuple[str, ...] = ("q_norm", "k_norm"),
) -> None:
    if config.qk_norm is not None and config.qk_norm.has_weight:
        for norm in norms:
            set_norm(module.get_submodule(names[f"attention.{norm}"]), config.qk_norm.norm)
    set_forward(module, layer_forward, Native(config, names, layer(module, config)))


def _nativize_latent(module: nn.Module, config: LatentAttentionConfig, names: Names) -> None:
    for norm in ("kv_a_norm",) if config.q_rank is None else ("q_a_norm", "kv_a_norm"):
        set_norm(module.get_submodule(names[f"latent.{norm}"]), config.norm)
    set_forward(module, layer_forward, Native(config, names, HFLatentAttention(module, config)))


def _nativize_delta(
    module: nn.Module,
    config: GatedDeltaNetConfig,
    names: Names,
    layer: Callable[[nn.Module, Any], nn.Module] = HFGatedDeltaNet,
) -> None:
    conv, norm = (module.get_submodule(names[name]) for name in ("delta.conv", "delta.norm"))
    set_forward(conv, native_forward, Native(config, layer=HFCausalConv(conv, config)))
    set_forward(norm, native_forward, Native(config, layer=HFGatedNorm(norm, config)))
    set_forward(module, layer_forward, Native(config, names, layer(module, config)))


def _nativize_short_conv(module: nn.Module, config: ShortConvConfig, names: Names) -> None:
    conv = module.get_submodule(names["short_conv.conv"])
    set_forward(conv, native_forward, Native(config, layer=HFShortCausalConv(conv, config)))
    set_forward(module, layer_forward, Native(config, names, HFShortConv(module, config)))


def _nativize_mamba2(module: nn.Module, config: Mamba2Config, names: Names) -> None:
    conv, norm = (module.get_submodule(names[name]) for name in ("mamba.conv", "mamba.norm"))
    set_forward(conv, native_forward, Native(config, layer=HFCausalConv(conv, config)))
    set_forward(norm, native_forward, Native(config, layer=HFGatedGroupNorm(norm, config)))
    set_forward(module, layer_forward, Native(config, names, HFMamba2(module, config)))


class _Mixer(NamedTuple):
    """A kind of token mixer.

    output: name of the output projection, a child of the mixer's module.
    nativize: function of (module, config, names) that nativizes the module.
    """

    output: str
    nativize: Callable[[nn.Module, Any, Names], None]


_MIXERS: Mapping[type, _Mixer] = {
    AttentionConfig: _Mixer("attention.o", _nativize_attention),
    SharedKVAttentionConfig: _Mixer(
        "attention.o", partial(_nativize_attention, layer=HFSharedKVAttention, norms=("q_norm",))
    ),
    LatentAttentionConfig: _Mixer("latent.o", _nativize_latent),
    GatedDeltaNetConfig: _Mixer("delta.out", _nativize_delta),
    KimiDeltaAttentionConfig: _Mixer("delta.out", partial(_nativize_delta, layer=HFKimiDeltaAttention)),
    ShortConvConfig: _Mixer("short_conv.out", _nativize_short_conv),
    Mamba2Config: _Mixer("mamba.out", _nativize_mamba2),
}


def _nativize_mlp(layer: nn.Module, config: MLPConfig, names: Names) -> Names:
    parts = {**MLPConfig.NAMES, **names}
    path = _parent(parts["mlp.down"])
    set_forward(layer.get_submodule(path), mlp_forward, Native(config, _within(parts, path)))
    return {}


def _nativize_moe(layer: nn.Module, config: MoEConfig, names: Names) -> Names:
    """Nativize the experts and the shared expert."""
    experts, found = {**STACKED_EXPERTS, **names}, dict[str, str]()
    attributes = {name: experts[name].rpartition(".")[2] for name in ("experts.gate_up", "experts.down")}
    if "experts.gate_up_pairs" in names:
        attributes["experts.gate_up_pairs"] = attributes["experts.gate_up"]
    found["experts"] = path = _parent(experts["experts.down"])
    set_forward(layer.get_submodule(path), experts_forward, Native(config, attributes))
    keep_implementation(layer.get_submodule(path))
    if config.shared is not None:
        shared, _, template = {**MoEConfig.NAMES, **names}["experts.shared"].rpartition(".")
        projections = {f"mlp.{part}": template.format(part=part) for part in ("gate", "up", "down")}
        if "experts.shared_gate_up" in names:
            projections["mlp.gate_up"] = names["experts.shared_gate_up"].removeprefix(f"{shared}.")
        mixture = _parent(path)
        if not shared.startswith(f"{mixture}."):
            found |= {"mlp": mixture, "mlp.shared": shared}
        set_forward(layer.get_submodule(shared), mlp_forward, Native(config.shared, projections))
    return found


def _nativize_dense_moe(layer: nn.Module, config: DenseMoEConfig, names: Names) -> Names:
    _nativize_mlp(layer, config.dense, names)
    for path in config.NAMES.values():
        set_norm(layer.get_submodule(path), config.norm)
    router = names["experts.router"].partition(".")[0]
    return {**_nativize_moe(layer, config.experts, names), **config.NAMES, "experts.router": router}


_MLPS: Mapping[type, Callable[[nn.Module, Any, Names], Names]] = {
    MLPConfig: _nativize_mlp,
    UngatedMLPConfig: lambda *_: {},  # transformers' forward is as fast
    MoEConfig: _nativize_moe,
    DenseMoEConfig: _nativize_dense_moe,
}
"""Kind of feed-forward layer -> what nativizes it: (layer, config, names) -> further paths of a block's parts."""


def check_supported(block: BlockConfig) -> None:
    """ConfigError, naming the class of the config, for a block with a layer that has no counterpart here; or for limits
    of activations that transformers does not compute."""
    if block.mixer is None or block.mlp is None:
        raise ConfigError("nativize: blocks of one layer are not supported")
    if type(block.mixer) not in _MIXERS:
        raise ConfigError(f"nativize: a mixer of {type(block.mixer).__name__} is not supported")
    if type(block.mlp) not in _MLPS:
        raise ConfigError(f"nativize: a feed-forward layer of {type(block.mlp).__name__} is not supported")
    feed_forwards = block.mlp, getattr(block.mlp, "shared", None)
    if any(getattr(layer, "activation", None) == "clamped_silu" for layer in feed_forwards):
        raise ConfigError(
            "nativize: the config has limits of experts' activations, and transformers computes without them; use "
            "ligermodels.from_pretrained"
        )
    if type(block.after) not in (PerLayerInputConfig, type(None)):
        raise ConfigError(f"nativize: a layer of {type(block.after).__name__} is not supported")


def nativize_layer(layer: nn.Module, block: BlockConfig, hidden_size: int, names: Names) -> None:
    """Give a transformers layer and its modules their native forwards.

    Args:
        layer: the transformers layer.
        block: config of the native block.
        hidden_size: channels of the hidden states.
        names: the family's names of parts of a layer, where they differ from `NAMES` of the layers' configs.
    """
    config: Any = block.mixer
    mixer, parts = _MIXERS[type(config)], {**config.NAMES, **MLPConfig.NAMES, **names}
    norms = _norm_paths(block, hidden_size, names)
    paths = {"mixer": _parent(parts[mixer.output]), "mlp": _parent(parts["mlp.down"])}
    paths |= {f"norm.{name}": path for name, path in norms.items()}
    for name, path in norms.items():
        is_output = name.endswith("_post_norm") and block.output_norm is not None
        set_norm(layer.get_submodule(path), cast(NormConfig, block.output_norm) if is_output else block.norm)
    mixer.nativize(layer.get_submodule(paths["mixer"]), config, _within(parts, paths["mixer"]))
    paths |= _MLPS[type(block.mlp)](layer, block.mlp, names)
    if block.after is not None:
        paths |= _nativize_after(layer, block.after)
    set_forward(layer, layer_forward, Native(block, paths, HFBlock(layer, block, frozenset(norms))))


def _nativize_after(layer: nn.Module, config: Any) -> Names:
    set_norm(layer.get_submodule(config.NAMES["norm"]), config.norm)
    projections = {f"after.{name}": config.NAMES[name] for name in ("gate", "projection")}
    return {**projections, "norm.after": config.NAMES["norm"]}


def _norm_paths(block: BlockConfig, hidden_size: int, names: Names) -> Names:
    """The block's own norms, such as "mixer_norm", and their paths."""
    paths = {}
    for mapping in block.weight_mappings(hidden_size, "block", "layer", names):
        part = mapping.target.removeprefix("block.").removesuffix(".weight")
        if part.endswith("_norm") and "." not in part:
            paths[part] = mapping.views[0].source.removeprefix("layer.").removesuffix(".weight")
    return paths


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _within(parts: Names, path: str) -> Names:
    """The parts of the module at `path`, with paths relative to it."""
    return {name: at.removeprefix(f"{path}.") for name, at in parts.items() if at.startswith(f"{path}.")}
