"""Decoder block: a token mixer and a feed-forward layer, each with its norms and beside a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.float8 import float8_input, produce
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.sharding import TensorSharding
from ligermodels.layers.targets import take_tokens


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block: any token mixer, any feed-forward layer.

    Each of the two is normalised before (`pre_norm`), after (`post_norm`; Gemma 2 has both, OLMo 2 only this), and
    multiplied by `residual_scale` (Granite) before it is added to the residual. A feed-forward layer whose config says
    `normalizes` is given the residual as it is. `after` is a further layer, which maps the residual to the residual;
    with `layer_scalar` all of that is multiplied by a stored number, which is not trained (both Gemma 4).
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
    residual_scale: float = 1.0
    after: LayerConfig | None = None
    layer_scalar: bool = False

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """How the block's tensors are stored; see `LayerConfig.weight_mappings`."""
        there = dict(self.NAMES)
        if not self.post_norm:
            there["norm.mlp_norm"] = "post_attention_layernorm"
        there |= names
        norms = [f"{part}_norm" for part in ("mixer", "mlp") if self.pre_norm and not self._own_norm(part)]
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
                rename(f"{native}.{norm}.{kind}", f"{checkpoint}.{there[f'norm.{norm}']}.{kind}")
                for norm in norms
                for kind in kinds
            ),
        ]

    def _own_norm(self, part: str) -> bool:
        return part == "mlp" and self.mlp.normalizes


class Block(nn.Module):
    """x + post_norm(mixer(pre_norm(x))), then the same with the feed-forward layer, and what else the config has.

    Buffer `layer_scalar` (1,), if there is one: as in transformers it is no parameter, and optimizers leave it alone.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}
    layer_scalar: Tensor | None

    def __init__(self, hidden_size: int, config: BlockConfig) -> None:
        super().__init__()

        def before(part: str) -> nn.Module:
            norm = config.pre_norm and not config._own_norm(part)
            return config.norm.build_before(hidden_size) if norm else nn.Identity()

        def after() -> nn.Module | None:
            return config.norm.build_after(hidden_size) if config.post_norm else None

        self.residual_scale = config.residual_scale
        self.mixer_norm = before("mixer")
        self.mixer = config.mixer.build(hidden_size)
        self.mixer_post_norm = after()
        self.mlp_norm = before("mlp")
        self.mlp = config.mlp.build(hidden_size)
        self.mlp_post_norm = after()
        self.after = None if config.after is None else config.after.build(hidden_size)
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def init_weights(self, std: float = 0.0) -> None:
        """Layer scalar one."""
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, token_indices: Tensor | None = None
    ) -> Tensor | tuple[Any, ...]:
        """x (B, T, H) -> (B, T, H); where there are any, with the `KeysValues` that the mixer shares and then the
        `RouterOutput` of a mixture of experts.

        Args:
            state: the mixer's decoding state, if there is one.
            token_indices: long (n,), indices of the flattened B * T: the result is (1, n, H), of these tokens alone.
                The mixer sees all tokens, and so does a feed-forward layer that is not `token_wise`.
        """
        y, x = _add_and_norm(self.mixer_norm, x, None, self.mixer)
        batch, length = x.shape[:2]
        y, keys_values = _parts(self.mixer(y, context, state))
        needed = token_indices
        if token_indices is not None and getattr(self.mlp, "token_wise", False):
            y, x = take_tokens(y, token_indices), take_tokens(x, token_indices)
            token_indices = None
        x, branch = self._add(self.mixer_post_norm, x, y)
        y, x = _add_and_norm(self.mlp_norm, x, branch, self.mlp)
        y, router = _parts(self.mlp(y, context))
        x, branch = self._add(self.mlp_post_norm, x, y)
        x = x if branch is None else x + branch
        x = x if token_indices is None else take_tokens(x, token_indices)
        if self.after is not None:
            x = self.after(x, context if needed is None else context.of_tokens(needed, batch, length))
        if self.layer_scalar is not None:
            x = x * self.layer_scalar.to(x.dtype)
        # These leave by the return value: FSDP2's hooks see their gradients only there.
        more = [each for each in (keys_values, router) if each is not None]
        return (x, *more) if more else x

    def _add(self, post_norm: nn.Module | None, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is still to be added to it; without a post-norm the next norm adds that."""
        if self.residual_scale == 1.0 and getattr(post_norm, "fused_add", False):
            return cast(nn.Module, post_norm)(branch, x), None
        branch = branch if post_norm is None else post_norm(branch)
        return x, branch if self.residual_scale == 1.0 else self.residual_scale * branch


def _parts(output: Any) -> tuple[Tensor, Any]:
    """What a layer returns for the hidden states, and what it returns beside them, or None."""
    return output if isinstance(output, tuple) else (output, None)


def _add_and_norm(norm: nn.Module, x: Tensor, branch: Tensor | None, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm of x + branch, in the form that `layer` wants its input in, and x + branch."""
    if getattr(norm, "fused_add", False):
        return cast("tuple[Tensor, Tensor]", produce(norm, float8_input(layer), x, branch))
    x = x if branch is None else x + branch.to(x.dtype)
    y = norm(x)
    return y if isinstance(y, tuple) else (y, x)  # a module around a fused norm gives both
