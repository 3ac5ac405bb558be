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


def cross_entropy_in_place(tokens: int, vocab: int, softcap: float | None = None) -> Case:
    """Of logits whose place the gradient takes: they are read and written once.

    What is timed begins with fresh logits, as a projection has just written them, so that no copy is in it.
    """
    liger = optional("liger_kernel.ops", "LigerCrossEntropyFunction")
    quack = optional("quack", "cross_entropy") if softcap is None else None

    def eager(x: Tensor, y: Tensor) -> Tensor:
        return _eager(x if softcap is None else softcap * torch.tanh(x.float() / softcap), y)

    return Case(
        f"cross_entropy in place {tokens}x{vocab}" + (f" softcap {softcap:g}" if softcap else ""),
        lambda: (random(tokens, vocab), integers(vocab, tokens)),
        (2 * tokens * vocab, 4 * tokens * vocab),
        providers(
            # A leaf may not be overwritten, a view may.
            lambda x, y: ops.cross_entropy(x.view_as(x), y, in_place=True, softcap=softcap),
            eager,
            liger=liger and (lambda x, y: liger.apply(x, y, None, -100, 0.0, 0.0, "mean", softcap)[0]),
            quack=quack and (lambda x, y: quack(x, y, inplace_backward=True)),
        ),
        overwritten=True,
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
