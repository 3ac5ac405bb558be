"""Cases of the losses: cross entropy, alone and with the projection to the vocabulary, and log-probabilities."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import chunked_log_probs
from benchmarks.timing import measure
from benchmarks.timing.case import Call, Case, integers, of_tokens, optional, providers, random
from ligermodels import ops

OPTIONS = "LinearCrossEntropyOptions"


def _torch_fused(reduction: str) -> Call | None:
    """torch's `linear_cross_entropy` (since 2.13), chunked by its default sizes."""
    fused, options = optional("torch.nn.functional", "linear_cross_entropy"), optional("torch.nn", OPTIONS)
    if fused is None:
        return None
    chunked = {} if options is None else {"options": options()}
    return lambda x, w, y: fused(x, w, y, reduction=reduction, **chunked)


def _eager(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), y)


@of_tokens
def cross_entropy(tokens: int, vocab: int) -> Case:
    """Cross entropy of logits, which are not overwritten."""
    return Case(
        f"cross_entropy {tokens}x{vocab}",
        lambda: (random(tokens, vocab), integers(vocab, tokens)),
        (2 * tokens * vocab, 6 * tokens * vocab),
        providers(ops.cross_entropy, _eager, quack=optional("quack", "cross_entropy")),
    )


@of_tokens
def linear_cross_entropy(tokens: int, hidden: int, vocab: int, ignored: float = 0.0, frozen: str | None = None) -> Case:
    """Projection and cross entropy. The lower bound is its GEMMs, for rows with a target and the needed gradients.

    Args:
        tokens: Number of tokens.
        hidden: Hidden size.
        vocab: Vocabulary size.
        ignored: Fraction of tokens without a target.
        frozen: "head" or "hidden" (states): needs no gradient.
    """
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
            torch_fused=_torch_fused("mean"),
        ),
        (lambda x, w, y: x[:count] @ w.t(), gemms),
        frozen=() if frozen is None else (("hidden", "head").index(frozen),),
    )


@of_tokens
def linear_log_probs(
    tokens: int, hidden: int, vocab: int, frozen: bool = False, entropy: bool = True, logged: bool = False
) -> Case:
    """Log-probabilities of target tokens, and the entropy.

    The lower bound is the GEMMs: one for the logits, and one for each gradient.

    Args:
        tokens: Number of tokens.
        hidden: Hidden size.
        vocab: Vocabulary size.
        frozen: The head needs no gradient.
        entropy: Compute the entropy too.
        logged: The entropy is only logged, so it needs no gradient.
    """
    liger, fused = None, None
    if not entropy:  # these peers have no entropy
        liger = optional("liger_kernel.chunked_loss.fused_linear_ppo", "_ChunkedSelectiveLogProbFunction")
        fused = _torch_fused("none")
    name = f"linear_log_probs {tokens}x{hidden}x{vocab}" + (" frozen head" if frozen else "")
    name += " and entropy" * entropy + " for a log" * (entropy and logged)

    def outputs(log_probs: Tensor, found: Tensor) -> tuple[Tensor, ...]:
        return (log_probs,) if logged else (log_probs, found)

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = ops.linear_log_probs(x, w, y, return_entropy=entropy, entropy_in_loss=entropy and not logged)
        return found if isinstance(found, Tensor) else outputs(found.log_probs, cast(Tensor, found.entropy))

    def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        log_p = F.log_softmax((x @ w.T).float(), -1)
        log_probs = log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return outputs(log_probs, -(log_p.exp() * log_p).sum(-1)) if entropy else log_probs

    def chunked(x: Tensor, w: Tensor, y: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = chunked_log_probs.ChunkedLogProbs.apply(x, w, y, entropy)
        return outputs(*found) if entropy else found[0]

    def gemms(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = x @ w.t()
        return (logits @ w,) if frozen else (logits @ w, logits.t() @ x)

    return Case(
        name,
        lambda: (random(tokens, hidden), random(vocab, hidden) * hidden**-0.5, integers(vocab, tokens)),
        None,
        providers(
            ours,
            eager,
            liger=liger and (lambda x, w, y: liger.apply(x, w, y, None, 1.0, 4096)),
            torch_fused=fused and (lambda x, w, y: -cast(Tensor, fused(x, w, y))),
            torch_chunked=chunked,
        ),
        (lambda x, w, y: x @ w.t(), gemms),
        frozen=(1,) if frozen else (),
    )
