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
        """Sample a token after each node of the accepted path. See `acceptance.Accept`."""
        if self.drafts is None:
            return Accepted(self._along_tree(logits, tokens, parent))
        return Accepted(self._along_chain(logits, tokens, self.drafts))

    def _along_chain(self, logits: Tensor, tokens: Tensor, drafts: SampledDrafts) -> Tensor:
        """The token after each node of a chain, long (B, N), as if the draft before it were accepted."""
        p = self._checked(logits)
        depths, draft = range(tokens.shape[1] - 1), tokens[:, 1:, None]
        before_last = p[:, :-1]
        q = torch.stack([drafts.probabilities(depth, p.shape[2]) for depth in depths], dim=1) if depths else before_last
        accepted = self._accepting[:, : len(depths), None] * q.gather(2, draft) < before_last.gather(2, draft)
        rest = (before_last - q).clamp(min=0)
        rest = torch.where(rest.any(dim=2, keepdim=True), rest, before_last)  # p = q but for a rounding
        others = draw(torch.cat([rest, p[:, -1:]], dim=1), self._choosing[:, : tokens.shape[1]])
        return torch.cat([torch.where(accepted, draft, others[:, :-1, None])[..., 0], others[:, -1:]], dim=1)

    def _along_tree(self, logits: Tensor, tokens: Tensor, parent: Tensor) -> Tensor:
        """The tokens after the nodes of the accepted path, from the root down: long (B, N), -1 at other nodes."""
        batch, nodes, _ = logits.shape
        row, node = torch.arange(batch, device=tokens.device), tokens.new_zeros(batch)
        going = torch.ones_like(node, dtype=torch.bool)
        below_root = torch.arange(nodes, device=tokens.device) > 0
        choices = torch.full_like(tokens, -1)
        for level in range(self._levels):
            choice = draw(self._checked(logits[row, node]), self._choosing[:, level])
            choices[row, node] = torch.where(going, choice, choices[row, node])
            child = (parent == node[:, None]) & (tokens == choice[:, None]) & below_root
            going = going & child.any(dim=1)
            node = torch.where(going, child.int().argmax(dim=1), node)
        return choices

    def _checked(self, logits: Tensor) -> Tensor:
        """The model's probabilities (..., V)."""
        p = self._distribution(logits)
        assert_async(~p.isnan(), "sampling: probabilities are NaN, as the model's logits are NaN or infinite")
        return p


class SampledDrafts:
    """Draft tokens that are samples of a head's distribution, which is kept for `Sampling`. Where its logits are NaN or
    infinite, the draft is token 0, as of a distribution with this token alone.

    Args:
        distribution: logits (..., V) -> probabilities (..., V).
        uniforms: float64 (B, D), a uniform number from [0, 1) for each depth.
    """

    def __init__(self, distribution: Callable[[Tensor], Tensor], uniforms: Tensor) -> None:
        self._distribution, self._uniforms = distribution, uniforms
        self._sampled: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor, depth: int = 0, token_ids: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """Long (B, n, 1): a sample for each depth from `depth` on. See `drafting.ChooseDrafts`."""
        q, codes = self._distribution(logits), torch.arange(logits.shape[-1], device=logits.device)
        q = torch.where(q[..., :1].isnan(), (codes == 0).to(q), q)  # NaN is in all of a row or in none
        ids = token_ids(codes)
        for index in range(logits.shape[1]):
            self._sampled[depth + index] = q[:, index], ids
        return ids[draw(q, self._uniforms[:, depth : depth + logits.shape[1]])][..., None]

    def probabilities(self, depth: int, vocab_size: int) -> Tensor:
        """(B, V), the distribution that the token of this depth was sampled from."""
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
