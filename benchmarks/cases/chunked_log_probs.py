"""Log-probabilities as TRL 1.16 computes them (trl/kernels/chunked_logprob.py), for machines that lack it.

Tiles of tokens and classes, GEMMs, sums over tiles and float32 sums of gradients are equal to TRL's; the two Triton
kernels of TRL are compiled torch functions here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS, CLASSES = 4096, 32768
"""Size of a tile, as in TRL."""


def _fold(tile: Tensor, local: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Add a tile to the state of rows: maximum, sum of exp, sum of x exp, and logit of the target."""
    top, total, weighted, at_y = state
    x = tile.float()
    higher = torch.maximum(top, x.amax(-1))
    rescale, e = torch.exp(top - higher), torch.exp(x - higher[:, None])
    inside = (local >= 0) & (local < x.shape[1])
    found = x.gather(-1, local.clamp(0, x.shape[1] - 1)[:, None]).squeeze(-1)
    total, weighted = total * rescale + e.sum(-1), weighted * rescale + (e * x).sum(-1)
    return higher, total, weighted, torch.where(inside, found, at_y)


def _gradient(
    tile: Tensor, local: Tensor, lse: Tensor, entropy: Tensor | None, of_log_probs: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of a tile of logits."""
    log_p = tile.float() - lse[:, None]
    p = log_p.exp()
    g = torch.zeros_like(p)
    if of_log_probs is not None:
        is_target = torch.arange(tile.shape[1], device=tile.device) == local[:, None]
        g = g + of_log_probs[:, None] * (is_target.float() - p)
    if of_entropy is not None and entropy is not None:
        g = g - of_entropy[:, None] * p * (log_p + entropy[:, None])
    return g.to(tile.dtype)


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.is_cuda:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of target (T,) from hidden (T, H) and weight (V, H), and their entropy if `entropy`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> Any:
        """Compute the outputs tile by tile."""
        ctx.set_materialize_grads(False)
        fold = torch.compile(_fold, dynamic=True)
        log_probs, entropies, lses = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for t in range(0, len(hidden), TOKENS):
            rows = slice(t, t + TOKENS)
            x, zeros = hidden[rows], torch.zeros_like(log_probs[rows])
            state: tuple[Tensor, ...] = (zeros - torch.inf, zeros, zeros, zeros)
            for v in range(0, len(weight), CLASSES):
                state = fold(x @ weight[v : v + CLASSES].t(), target[rows] - v, state)
            top, total, weighted, at_y = state
            lses[rows] = top + total.log()
            log_probs[rows], entropies[rows] = at_y - lses[rows], lses[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, target, lses, entropies if entropy else None)
        return log_probs, entropies if entropy else None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute the gradients tile by tile, from recomputed logits."""
        of_log_probs, of_entropy = gradients
        gradient = torch.compile(_gradient, dynamic=True)
        hidden, weight, target, lses, entropies = ctx.saved_tensors
        dx, dw = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if need else None
            for x, need in zip((hidden, weight), ctx.needs_input_grad[:2], strict=True)
        )
        for t in range(0, len(hidden), TOKENS):
            rows = slice(t, t + TOKENS)
            of_rows = [None if g is None else g[rows] for g in (entropies, of_log_probs, of_entropy)]
            for v in range(0, len(weight), CLASSES):
                x, w = hidden[rows], weight[v : v + CLASSES]
                g = gradient(x @ w.t(), target[rows] - v, lses[rows], *of_rows)
                if dx is not None:
                    _add(dx[rows], g, w)
                if dw is not None:
                    _add(dw[v : v + CLASSES], g.t(), x)
        found = (None if g is None else g.to(x.dtype) for g, x in ((dx, hidden), (dw, weight)))
        return *found, None, None
