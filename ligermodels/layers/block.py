"""Decoder block: attention and feed-forward, each with its norms and beside a residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.layers.attention import Attention, AttentionConfig, Context
from ligermodels.layers.mlp import MLPConfig
from ligermodels.layers.moe import MoEConfig
from ligermodels.layers.norm import NormConfig, ResidualIdentity, ResidualRMSNorm, RMSNorm
from ligermodels.layers.recompute import watched
from ligermodels.layers.targets import take_rows


@dataclass(frozen=True)
class BlockConfig:
    """The parts of one decoder block.

    Each of attention and feed-forward is normalised before (`pre_norm`), after (`post_norm`, Gemma 2 has both, OLMo 2
    only this), and multiplied by `residual_scale` (Granite) before it is added to the residual.
    """

    attention: AttentionConfig
    mlp: MLPConfig | MoEConfig
    norm: NormConfig
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0


class Block(nn.Module):
    """x + post_norm(attention(pre_norm(x))), then the same with the feed-forward layer."""

    def __init__(self, hidden_size: int, config: BlockConfig, layer: int) -> None:
        super().__init__()

        def before() -> nn.Module:
            return ResidualRMSNorm(hidden_size, config.norm) if config.pre_norm else ResidualIdentity()

        def after() -> nn.Module:
            return RMSNorm(hidden_size, config.norm) if config.post_norm else nn.Identity()

        self.residual_scale = config.residual_scale
        self.attention_norm = before()
        self.attention = Attention(hidden_size, config.attention, layer)
        self.attention_post_norm = after()
        self.mlp_norm = before()
        self.mlp = config.mlp.build(hidden_size)
        self.mlp_post_norm = after()

    @property
    def takes_rows(self) -> bool:
        """Whether it may be asked for `Context.rows` alone: its attention and feed-forward layer say so of themselves.

        A mixture does not, for the losses of its router are over all tokens; nor does a module put in the place of one
        that knows nothing of rows, and gets and gives all tokens then.
        """
        return all(getattr(layer, "takes_rows", False) for layer in (self.attention, self.mlp))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x (B, T, H) -> (B, T, H), or (1, n, H) of the context's `rows`."""
        y, x = self.attention_norm(x)
        branch, x = self._normalised(self.attention_post_norm, self.attention(y, context), take_rows(x, context.rows))
        y, x = self.mlp_norm(x, branch)
        branch, x = self._normalised(self.mlp_post_norm, self.mlp(y, context), x)
        return x if branch is None else x + branch

    def _normalised(self, norm: nn.Module, branch: Tensor, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """What is to be added to the residual stream, and the stream; None if it has been added."""
        if type(norm) is RMSNorm and self.residual_scale == 1.0 and not watched(norm):
            return None, norm(branch, x)
        branch = norm(branch)
        return branch if self.residual_scale == 1.0 else self.residual_scale * branch, x
