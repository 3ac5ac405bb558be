"""Decoder block: a token mixer and a feed-forward layer, each with its norms and a residual connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.checkpointing import call_selective
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext, KeysValues, RouterOutput
from ligermodels.layers.layer import Layer, built_layer, declared
from ligermodels.layers.norm import NormConfig, adds_residual
from ligermodels.layers.sharding import TensorSharding


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block: any token mixer and any feed-forward layer.

    Args:
        mixer: config of the token mixer.
        mlp: config of the feed-forward layer. If it `normalizes`, the block passes it the residual stream as it is.
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

    mixer: LayerConfig
    mlp: LayerConfig
    norm: NormConfig
    pre_norm: bool = True
    post_norm: bool = False
    output_norm: NormConfig | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    after: LayerConfig | None = None
    layer_scalar: bool = False

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
        norms += [f"{part}_post_norm" for part in ("mixer", "mlp") if self.post_norm]
        kinds = ("weight", "bias") if self.norm.bias else ("weight",)
        after = (
            [] if self.after is None else self.after.weight_mappings(hidden_size, f"{native}.after", checkpoint, names)
        )
        scalar = [rename(f"{native}.layer_scalar", f"{checkpoint}.layer_scalar")] if self.layer_scalar else []
        return [
            *after,
            *scalar,
            *self.mixer.weight_mappings(hidden_size, f"{native}.mixer", checkpoint, names),
            *self.mlp.weight_mappings(hidden_size, f"{native}.mlp", checkpoint, names),
            *(
                rename(f"{native}.{norm}.{kind}", f"{checkpoint}.{own_names[f'norm.{norm}']}.{kind}")
                for norm in norms
                for kind in kinds
            ),
        ]

    def build_norm_before(self, part: str, hidden_size: int) -> nn.Module:
        """The norm before the layer `part`, "mixer" or "mlp"; the identity if there is none."""
        return self.norm.build_before(hidden_size) if self._norm_before(part) else nn.Identity()

    def build_norm_after(self, hidden_size: int) -> nn.Module | None:
        """The norm after a layer, or None."""
        return (self.output_norm or self.norm).build_after(hidden_size) if self.post_norm else None

    def __post_init__(self) -> None:
        if self.output_norm is not None and (not self.post_norm or self.output_norm.bias != self.norm.bias):
            raise ConfigError("output_norm: needs post_norm, and a bias exactly if norm has one")
        if self.parallel and self.mlp.normalizes:
            raise ConfigError("parallel: the feed-forward layer normalises the residual stream itself; set it to False")

    def _norm_before(self, part: str) -> bool:
        return self.pre_norm and not (part == "mlp" and (self.mlp.normalizes or self.parallel))


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
    the config, if it has them.

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
        self.mixer_has_extra_output = config.mixer.has_extra_output
        self.mlp_has_extra_output = config.mlp.has_extra_output
        self.mixer_norm = config.build_norm_before("mixer", hidden_size)
        self.mixer = built_layer("mixer", config.mixer, hidden_size)
        self.mixer_post_norm = config.build_norm_after(hidden_size)
        self.mlp_norm = config.build_norm_before("mlp", hidden_size)
        self.mlp = built_layer("mlp", config.mlp, hidden_size)
        self.mlp_post_norm = config.build_norm_after(hidden_size)
        self.after = None if config.after is None else built_layer("after", config.after, hidden_size)
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
        normed, residual = self._add_and_norm(self.mixer_norm, x, pending, self.mixer)
        mixed = self.mixer(normed, context, state)
        branch, keys_values = mixed if self.mixer_has_extra_output else (mixed, None)
        residual, pending = self._add(self.mixer_post_norm, residual, branch)
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
