"""Speculative sampling: the accepted tokens are samples of the model's own distribution, for any drafts.

Two rules, both exact (Leviathan et al., 2023, arXiv 2211.17192). p is the model's distribution after a node, with
temperature, top-k, top-p and min-p.

- Chains: the drafts are samples of the heads' distributions q, shaped as p. A draft v is accepted with probability
  min(1, p(v) / q(v)); after the first rejection a token is sampled from max(p - q, 0), scaled to sum to 1; or from p,
  if p exceeds q nowhere, by a rounding.
- Trees: the candidates are the most probable ones, not samples. A token is sampled from p, and accepted as a draft if
  it is among the candidates after the node: the rule above with a q of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ligermodels.generation.sampling import warp
from ligermodels.ops.runtime.checks import assert_async
from ligermodels.speculative.acceptance import Accepted
from ligermodels.speculative.drafting import unchanged
from ligermodels.speculative.tree import DynamicTree, Tree


class Sampling:
    """The rule of speculative sampling, with its random numbers.

    A step takes its random numbers from a buffer of uniform numbers, which `renew` fills before the step: a CUDA graph
    of the step then uses new numbers in each replay.

    Args:
        shaping: `temperature`, `top_k`, `top_p` and `min_p`, arguments of `generation.sampling.warp`.
        batch_size: B.
        tree: the candidates.
        device: device of the logits.
        fill: fills a float64 tensor with uniform numbers from [0, 1).
    """

    def __init__(
        self,
        shaping: Mapping[str, Any],
        batch_size: int,
        tree: Tree | DynamicTree,
        device: torch.device,
        fill: Callable[[Tensor], object],
    ) -> None:
        self._shaping, self._levels, self._fill = shaping, tree.max_depth + 1, fill
        uniforms = torch.zeros(3, batch_size, self._levels, dtype=torch.float64, device=device)
        self._uniforms = uniforms
        self._drafting, self._accepting, self._choosing = uniforms
        self.drafts = SampledDrafts(self._distribution, self._drafting) if tree.is_chain else None
        """Chooses the drafts of a chain; None for a tree, which has the most probable candidates."""

    def renew(self) -> None:
        """Draw the random numbers of the next step."""
        self._fill(self._uniforms)

    def _distribution(self, logits: Tensor) -> Tensor:
        """The probabilities (..., V) of shaped logits (..., V), fp32."""
        return warp(logits, **self._shaping).softmax(dim=-1)

    def __call__(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> Accepted:
        """Sample a token after each node of the accepted path, from the root down. See `acceptance.Accept`."""
        batch, nodes, _ = logits.shape
        row, node = torch.arange(batch, device=tokens.device), tokens.new_zeros(batch)
        going = torch.ones_like(node, dtype=torch.bool)
        below_root = torch.arange(nodes, device=tokens.device) > 0
        choices = torch.full_like(tokens, -1)  # no token: nodes that are not on the path
        for level in range(self._levels):
            p = self._distribution(logits[row, node])
            assert_async(~p.isnan(), "sampling: probabilities are NaN, as the model's logits are NaN or infinite")
            choice = self._choice(p, tokens, level)
            choices[row, node] = torch.where(going, choice, choices[row, node])
            child = (parent == node[:, None]) & (tokens == choice[:, None]) & below_root
            going = going & child.any(dim=1)
            node = torch.where(going, child.int().argmax(dim=1), node)
        return Accepted(choices)

    def _choice(self, p: Tensor, tokens: Tensor, level: int) -> Tensor:
        """The token, long (B,), after a node at this level, where p (B, V) is the model's distribution."""
        q = None if self.drafts is None else self.drafts.probabilities(level, p.shape[1])
        draft = tokens[:, level + 1 : level + 2]  # of a chain
        if q is None or not draft.numel():  # no draft at this level
            return draw(p, self._choosing[:, level])
        accepted = self._accepting[:, level, None] * q.gather(1, draft) < p.gather(1, draft)
        rest = (p - q).clamp(min=0)
        rest = torch.where(rest.any(dim=1, keepdim=True), rest, p)  # p = q but for a rounding
        return torch.where(accepted[:, 0], draft[:, 0], draw(rest, self._choosing[:, level]))


class SampledDrafts:
    """Draft tokens that are samples of a head's distribution, which is kept for `Sampling`.

    Args:
        distribution: logits (..., V) -> probabilities (..., V).
        uniforms: float64 (B, D), a uniform number from [0, 1) for each depth.
    """

    def __init__(self, distribution: Callable[[Tensor], Tensor], uniforms: Tensor) -> None:
        self._distribution, self._uniforms = distribution, uniforms
        self._sampled: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor, depth: int = 0, token_ids: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """Long (B, n, 1): a sample for each depth from `depth` on. See `drafting.ChooseDrafts`."""
        q = self._distribution(logits)
        ids = token_ids(torch.arange(logits.shape[-1], device=logits.device))
        for index in range(logits.shape[1]):
            self._sampled[depth + index] = q[:, index], ids
        return ids[draw(q, self._uniforms[:, depth : depth + logits.shape[1]])][..., None]

    def probabilities(self, depth: int, vocab_size: int) -> Tensor | None:
        """(B, V), the distribution that the token of this depth was sampled from; None without a draft there."""
        if depth not in self._sampled:
            return None
        q, ids = self._sampled[depth]
        return q.new_zeros(len(q), vocab_size).index_copy_(1, ids, q)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample an index of each row in proportion to its weights, by the inverse of their cumulative sum.

    Args:
        weights: (..., V), at least 0.
        uniforms: float64 (...), from [0, 1).

    Returns:
        Long (...). An index of weight 0 is never chosen, unless all weights of the row are 0.
    """
    total = weights.double().cumsum(dim=-1)
    wanted = (uniforms * total[..., -1])[..., None]
    return torch.searchsorted(total, wanted, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)
