"""Cases of `python -m benchmarks ops causal_conv`: the short convolution of recurrent mixers, beside fla's kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing.case import Case, of_tokens, optional, providers, random
from ligermodels import ops


@of_tokens
def causal_conv(tokens: int, channels: int, width: int, activation: str | None = "silu", bias: bool = False) -> Case:
    """The convolution of one sequence, with nothing before its first token.

    Args:
        tokens: Number of tokens of the sequence.
        channels: Number of channels.
        width: Number of tokens in the convolution, the current token included.
        activation: "silu" or None.
        bias: Whether the convolution has a bias.
    """
    peer = optional("fla.modules.causal_conv1d", "causal_conv1d")

    def inputs() -> tuple[Tensor, ...]:
        parts = random(1, tokens, channels), random(channels, width) / width
        return (*parts, random(channels)) if bias else parts

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # As a model written with nn.Conv1d computes it: channels before tokens, and back.
        rows = F.conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=channels)[..., :tokens].mT
        return rows if activation is None else F.silu(rows)

    parameters, options = channels * (width + bias), [activation or "", "bias" if bias else ""]
    values = 2 * tokens * channels
    return Case(
        ", ".join(filter(None, [f"causal_conv {tokens}x{channels}, width {width}", *options])),
        inputs,
        (2 * values + 2 * parameters, 5 * values + 6 * parameters),
        providers(
            lambda *given: ops.causal_conv(*given, activation=activation),
            plain,
            fla=peer and (lambda *given: peer(*given, activation=activation)[0]),
        ),
    )
