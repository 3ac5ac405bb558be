"""Decoder block: a token mixer, a feed-forward layer or both, each with its norms and a residual connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.checkpointing import call_selective
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext, KeysValues, RouterOutput
from ligermodels.layers.layer import Layer, built_layer, declared
from ligermodels.layers.norm import NormConfig, adds_residual
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.sharding import TensorSharding

if TYPE_CHECKING:
    from ligermodels.layers.router import RouterConfig


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block: any token mixer, any feed-forward layer, or one of each.

    Args:
        mixer: config of the token mixer; None for a block of a feed-forward layer alone (Nemotron-H).
        mlp: config of the feed-forward layer; None for a block of a token mixer alone. If it `normalizes`, the block
            passes it the residual stream as it is.
        norm: config of the norms.
        pre_norm: normalise the inputs of the two layers.
        post_norm: normalise their outputs (Gemma 2 has both norms, OLMo 2 only this one).
        output_norm: config of the norms of outputs, if it differs from `norm` (Muse Glimmer).
        parallel: both layers take the same input, normalised once (Cohere).
        residual_scale: factor of each layer's output before it is added to the residual stream (Granite).
        after: config of a third layer, which maps the residual stream to the residual stream (Gemma 4).
        layer_scalar: multiply the block's result by a stored number, which is not trained (Gemma 4).
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "norm.mixer_norm": "input_layernorm",
        "norm.mixer_post_norm": "post_attention_layernorm",
        "norm.mlp_norm": "pre_feedforward_layernorm",
        "norm.mlp_post_norm": "post_feedforward_layernorm",
    }

    mixer: LayerConfig | None
    mlp: LayerConfig | None
    norm: NormConfig
    pre_norm: bool = True
    post_norm: bool = False
    output_norm: NormConfig | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    after: LayerConfig | None = None
    layer_scalar: bool = False

    @property
    def layers(self) -> dict[str, LayerConfig]:
        """The configs of the block's layers by their names in `Block`, in the order of the computation."""
        layers = {"mixer": self.mixer, "mlp": self.mlp, "after": self.after}
        return {name: layer for name, layer in layers.items() if layer is not None}

    @property
    def expert_router(self) -> RouterConfig | None:
        """See `LayerConfig.expert_router`."""
        return None if self.mlp is None else self.mlp.expert_router

    @property
    def ropes(self) -> Sequence[RopeConfig]:
        """The rotary tables that the layers read, without repetition."""
        return tuple(dict.fromkeys(rope for layer in self.layers.values() for rope in layer.ropes))

    def tensor_shard(self, ranks: int) -> BlockConfig:
        """The config of one rank's shard of the block: see `LayerConfig.tensor_shard`."""
        shards: dict[str, Any] = {name: layer.tensor_shard(ranks) for name, layer in self.layers.items()}
        return replace(self, **shards)

    def with_attention_backend(self, name: str) -> BlockConfig:
        """The config with another attention backend."""
        return self if self.mixer is None else replace(self, mixer=self.mixer.with_attention_backend(name))

    def unused(self, checkpoint: str, names: Mapping[str, str]) -> list[str]:
        """Patterns of tensors of the mixer that are not needed: see `LayerConfig.unused`."""
        return [] if self.mixer is None else self.mixer.unused(checkpoint, names)

    def info(self) -> dict[str, Any]:
        """Sizes of the mixer and the feed-forward layer: see `LayerConfig.info`."""
        return {
            key: size for layer in (self.mixer, self.mlp) if layer is not None for key, size in layer.info().items()
        }

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """How checkpoints store the block's tensors.

        Args:
            hidden_size: hidden size of the model.
            native: name of the block in the model.
            checkpoint: name of the block in the checkpoint.
            names: the family's names of parts of a layer, where they differ from `NAMES`.
        """
        own_names = dict(self.NAMES)
        if not self.post_norm:
            own_names["norm.mlp_norm"] = "post_attention_layernorm"
        own_names |= names
        norms = [f"{part}_norm" for part in ("mixer", "mlp") if self._norm_before(part)]
        norms += [f"{part}_post_norm" for part in ("mixer", "mlp") if self.post_norm and part in self.layers]
        kinds = ("weight", "bias") if self.norm.bias else ("weight",)
        scalar = [rename(f"{native}.layer_scalar", f"{checkpoint}.layer_scalar")] if self.layer_scalar else []
        return [
            *scalar,
            *(
                mapping
                for name, layer in self.layers.items()
                for mapping in layer.weight_mappings(hidden_size, f"{native}.{name}", checkpoint, names)
            ),
            *(
                rename(f"{native}.{norm}.{kind}", f"{checkpoint}.{own_names[f'norm.{norm}']}.{kind}")
                for norm in norms
                for kind in kinds
            ),
        ]

    def build_norm_before(self, part: str, hidden_size: int) -> nn.Module:
        """The norm before the layer `part`, "mixer" or "mlp"; the identity if there is none."""
        return self.norm.build_before(hidden_size) if self._norm_before(part) else nn.Identity()

    def build_norm_after(self, part: str, hidden_size: int) -> nn.Module | None:
        """The norm after the layer `part`, "mixer" or "mlp", or None."""
        if not self.post_norm or part not in self.layers:
            return None
        return (self.output_norm or self.norm).build_after(hidden_size)

    def __post_init__(self) -> None:
        if self.mixer is None and self.mlp is None:
            raise ConfigError("mixer: a block needs a token mixer, a feed-forward layer or both")
        if self.parallel and (self.mixer is None or self.mlp is None):
            raise ConfigError("parallel: needs both a token mixer and a feed-forward layer")
        if self.output_norm is not None and (not self.post_norm or self.output_norm.bias != self.norm.bias):
            raise ConfigError("output_norm: needs post_norm, and a bias exactly if norm has one")
        if self.parallel and self.mlp is not None and self.mlp.normalizes:
            raise ConfigError("parallel: the feed-forward layer normalises the residual stream itself; set it to False")

    def _norm_before(self, part: str) -> bool:
        layer = self.layers.get(part)
        return self.pre_norm and layer is not None and not (part == "mlp" and (layer.normalizes or self.parallel))


class BlockOutput(NamedTuple):
    """The result of a block.

    hidden: hidden states, of the shape of the block's input.
    keys_values: keys and values that later layers attend to, or None.
    router: the router's output of a mixture of experts, or None.
    pending: a branch that the caller has to add to `hidden`, of its shape; None but with `defer`.
    """

    hidden: Tensor
    keys_values: KeysValues | None = None
    router: RouterOutput | None = None
    pending: Tensor | None = None


class Block(nn.Module):
    """x + post_norm(mixer(pre_norm(x))), then the same with the feed-forward layer; then `after` and `layer_scalar` of
    the config. Layers missing from the config are None.

    Buffer `layer_scalar` (1,), if there is one: as in transformers it is no parameter, and optimizers leave it alone.

    Raises:
        ConfigError: a config builds a module that does not derive from `Layer`.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}
    in_float8: bool = False  # `adapt.float8` sets it: norms may write float8 for the layers after them
    layer_scalar: Tensor | None

    def __init__(self, hidden_size: int, config: BlockConfig) -> None:
        super().__init__()

        self.hidden_size, self.config = hidden_size, config
        self.residual_scale = config.residual_scale
        self.mixer_has_extra_output = config.mixer is not None and config.mixer.has_extra_output
        self.mlp_has_extra_output = config.mlp is not None and config.mlp.has_extra_output
        self.mixer_norm = config.build_norm_before("mixer", hidden_size)
        self.mixer = built_layer("mixer", config.mixer, hidden_size)
        self.mixer_post_norm = config.build_norm_after("mixer", hidden_size)
        self.mlp_norm = config.build_norm_before("mlp", hidden_size)
        self.mlp = built_layer("mlp", config.mlp, hidden_size)
        self.mlp_post_norm = config.build_norm_after("mlp", hidden_size)
        self.after = built_layer("after", config.after, hidden_size)
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def init_weights(self, std: float = 0.0) -> None:
        """Layer scalar one."""
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block, with the options of `torch.compile`; as of nn.Module."""
        super().compile(*args, **kwargs)
        self.compiled_selective = torch.compile(call_selective, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # without the compiled call
        state.pop("compiled_selective", None)
        return state

    def declarations(self) -> dict[str, Layer]:
        """The declarations of the block's layers, by name: see `Layer`."""
        layers = {"mixer": self.mixer, "mlp": self.mlp, "after": self.after}
        return {name: declared(layer) for name, layer in layers.items() if layer is not None}

    @property
    def token_wise(self) -> bool:
        """Whether the result for a token depends on no other token of the block's input."""
        return all(layer.token_wise for layer in self.declarations().values())

    @property
    def may_defer(self) -> bool:
        """Whether additions may be left to other blocks: no hooks expect whole hidden states, and the block is not
        compiled, which would be done anew for each form."""
        return not (self._forward_hooks or self._forward_pre_hooks or self._compiled_call_impl)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, pending: Tensor | None = None, defer: bool = False
    ) -> BlockOutput:
        """Run the block.

        Args:
            x: hidden states (B, T, H); if the block is `token_wise`, also the needed tokens alone, (1, n, H).
            context: the context of this pass.
            state: the mixer's decoding state, or None.
            pending: the branch that the block before has left to this one, of x's shape: the first norm adds it to x in
                the same kernel. Default: None.
            defer: whether the block may leave its last addition to the caller. Default: False.

        Returns:
            The hidden states, and the keys and values and the router's output where the layers give them. All of them
            leave by the return value, because FSDP2's hooks see only the gradients of returned tensors.
        """
        residual, normed, keys_values, router = x, x, None, None
        if self.mixer is not None:
            normed, residual = self._add_and_norm(self.mixer_norm, residual, pending, self.mixer)
            mixed = self.mixer(normed, context, state)
            branch, keys_values = mixed if self.mixer_has_extra_output else (mixed, None)
            residual, pending = self._add(self.mixer_post_norm, residual, branch)
        if self.mlp is not None:
            if not self.config.parallel:
                normed, residual = self._add_and_norm(self.mlp_norm, residual, pending, self.mlp)
            elif pending is not None:
                residual = residual + pending.to(residual.dtype)
            fed = self.mlp(normed, context)
            branch, router = fed if self.mlp_has_extra_output else (fed, None)
            residual, pending = self._add(self.mlp_post_norm, residual, branch)
        if defer and self.after is None and self.layer_scalar is None:
            return BlockOutput(residual, keys_values, router, pending)
        hidden = residual if pending is None else residual + pending
        if self.after is not None:
            hidden = self.after(hidden, context)
        if self.layer_scalar is not None:
            hidden = hidden * self.layer_scalar.to(hidden.dtype)
        return BlockOutput(hidden, keys_values, router)

    def _add(self, post_norm: nn.Module | None, residual: Tensor, branch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add a branch to the residual stream; or, without a post-norm, leave the addition to the next norm.

        Returns:
            The residual stream, and the branch that the next norm still has to add, or None.
        """
        if post_norm is None and self.residual_scale == 1.0:
            return residual, branch
        if self.residual_scale == 1.0 and adds_residual(post_norm):
            return cast(nn.Module, post_norm)(branch, residual), None
        branch = branch if post_norm is None else post_norm(branch)
        return residual, branch if self.residual_scale == 1.0 else self.residual_scale * branch

    def _add_and_norm(
        self, norm: nn.Module, x: Tensor, branch: Tensor | None, layer: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + branch, in the form in which `layer` takes its input, and x + branch."""
        if self.in_float8 and not self.config.parallel and getattr(norm.forward, "writes_float8", False):
            return cast("tuple[Tensor, Tensor]", norm(x, branch, form=declared(layer).input_form()))
        if adds_residual(norm):
            return cast("tuple[Tensor, Tensor]", norm(x, branch))
        total = x if branch is None else x + branch.to(x.dtype)
        normed = norm(total)
        return normed if isinstance(normed, tuple) else (normed, total)  # a module around a fused norm gives both
