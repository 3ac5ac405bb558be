"""Decoder block: a token mixer and a feed-forward layer, each with its norms and beside a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext, RouterOutput
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.targets import take_tokens


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block: any token mixer, any feed-forward layer.

    Each of the two is normalised before (`pre_norm`), after (`post_norm`; Gemma 2 has both, OLMo 2 only this), and
    multiplied by `residual_scale` (Granite) before it is added to the residual.
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

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """How the block's tensors are stored; see `LayerConfig.weight_mappings`."""
        there = dict(self.NAMES)
        if not self.post_norm:
            there["norm.mlp_norm"] = "post_attention_layernorm"
        there |= names
        norms = [f"{part}_norm" for part in ("mixer", "mlp") if self.pre_norm]
        norms += [f"{part}_post_norm" for part in ("mixer", "mlp") if self.post_norm]
        kinds = ("weight", "bias") if self.norm.bias else ("weight",)
        return [
            *self.mixer.weight_mappings(hidden_size, f"{native}.mixer", checkpoint, names),
            *self.mlp.weight_mappings(hidden_size, f"{native}.mlp", checkpoint, names),
            *(
                rename(f"{native}.{norm}.{kind}", f"{checkpoint}.{there[f'norm.{norm}']}.{kind}")
                for norm in norms
                for kind in kinds
            ),
        ]


class Block(nn.Module):
    """x + post_norm(mixer(pre_norm(x))), then the same with the feed-forward layer."""

    def __init__(self, hidden_size: int, config: BlockConfig) -> None:
        super().__init__()

        def before() -> nn.Module:
            return config.norm.build_before(hidden_size) if config.pre_norm else nn.Identity()

        def after() -> nn.Module | None:
            return config.norm.build_after(hidden_size) if config.post_norm else None

        self.residual_scale = config.residual_scale
        self.mixer_norm = before()
        self.mixer = config.mixer.build(hidden_size)
        self.mixer_post_norm = after()
        self.mlp_norm = before()
        self.mlp = config.mlp.build(hidden_size)
        self.mlp_post_norm = after()

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, token_indices: Tensor | None = None
    ) -> Tensor | tuple[Tensor, RouterOutput]:
        """x (B, T, H) -> (B, T, H); of a mixture of experts with its router's output.

        Args:
            state: the mixer's decoding state, if there is one.
            token_indices: long (n,), indices of the flattened B * T: the result is (1, n, H), of these tokens alone.
                The mixer sees all tokens, and so does a feed-forward layer that is not `token_wise`.
        """
        y, x = _add_and_norm(self.mixer_norm, x, None)
        y = self.mixer(y, context, state)
        if token_indices is not None and getattr(self.mlp, "token_wise", False):
            y, x = take_tokens(y, token_indices), take_tokens(x, token_indices)
            token_indices = None
        x, branch = self._add(self.mixer_post_norm, x, y)
        y, x = _add_and_norm(self.mlp_norm, x, branch)
        y = self.mlp(y, context)
        # The router's output leaves by the return value: FSDP2's hooks see its gradient only there.
        y, router = y if isinstance(y, tuple) else (y, None)
        x, branch = self._add(self.mlp_post_norm, x, y)
        x = x if branch is None else x + branch
        x = x if token_indices is None else take_tokens(x, token_indices)
        return x if router is None else (x, router)

    def _add(self, post_norm: nn.Module | None, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is still to be added to it; without a post-norm the next norm adds that."""
        if self.residual_scale == 1.0 and getattr(post_norm, "fused_add", False):
            return cast(nn.Module, post_norm)(branch, x), None
        branch = branch if post_norm is None else post_norm(branch)
        return x, branch if self.residual_scale == 1.0 else self.residual_scale * branch


def _add_and_norm(norm: nn.Module, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of x + branch, and x + branch."""
    if getattr(norm, "fused_add", False):
        return cast("tuple[Tensor, Tensor]", norm(x, branch))
    x = x if branch is None else x + branch.to(x.dtype)
    y = norm(x)
    return y if isinstance(y, tuple) else (y, x)  # a module around a fused norm gives both
