"""Cross entropy, alone and with the projection to the vocabulary, as cases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks.case import Case, integers, optional, providers, random
from ligermodels import ops


def _eager(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), y)


def cross_entropy(tokens: int, vocab: int) -> Case:
    """Of logits that are kept."""
    return Case(
        f"cross_entropy {tokens}x{vocab}",
        lambda: (random(tokens, vocab), integers(vocab, tokens)),
        (2 * tokens * vocab, 6 * tokens * vocab),
        providers(ops.cross_entropy, _eager, quack=optional("quack", "cross_entropy")),
    )


def linear_cross_entropy(tokens: int, hidden: int, vocab: int, ignored: float = 0.0, frozen: str | None = None) -> Case:
    """Projection and loss. The limit is its GEMMs alone, of rows that have a target and for gradients that are needed;
    `frozen`, the "head" or the "hidden" states, needs none."""
    liger = optional("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction")
    count = tokens - int(tokens * ignored)
    name = f"linear_cross_entropy {tokens}x{hidden}x{vocab}"
    name += (f" {ignored:.0%} ignored" if ignored else "") + (f" frozen {frozen}" if frozen else "")

    def inputs() -> tuple[Tensor, ...]:
        weight = random(vocab, hidden) * hidden**-0.5
        target = integers(vocab, tokens)
        target[torch.randperm(tokens, device=measure.DEVICE)[count:]] = -100
        return random(tokens, hidden), weight, target

    def gemms(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x = x[:count]
        logits = x @ w.t()
        return logits @ w if frozen != "hidden" else w, logits.t() @ x if frozen != "head" else x

    return Case(
        name,
        inputs,
        None,
        providers(
            lambda x, w, y: ops.linear_cross_entropy(x, w, y, num_targets=count),
            lambda x, w, y: F.cross_entropy((x @ w.T).float(), y),
            compiled=not (ignored or frozen),
            liger=liger and (lambda x, w, y: liger.apply(x, w, y)[0]),
        ),
        (lambda x, w, y: x[:count] @ w.t(), gemms),
        frozen=() if frozen is None else (("hidden", "head").index(frozen),),
    )
