"""Greedy Medusa decoding: a tree of the heads' candidates is checked in one forward pass, without loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.cache import KVCache
from ligermodels.generation.generate import (
    Decoder,
    TokenIds,
    as_eos_ids,
    check_max_new_tokens,
    evaluating,
    prepare_prompts,
)
from ligermodels.generation.sampling import greedy
from ligermodels.generation.tree import Tree


@dataclass(frozen=True)
class SpeculativeOutput:
    """What `medusa_generate` returns.

    sequences: long (B, T + n), as `generate` returns them.
    steps: forward passes after the prefills, over all rows.
    new_tokens: tokens generated over all rows, EOS included, padding not.
    tokens_per_step: tokens that those passes gave, per pass: (new_tokens - B) / steps, as each prefill gives the first
        token of its row. Plain decoding has exactly 1; nan when there was no step.
    """

    sequences: Tensor
    steps: int
    new_tokens: int

    @property
    def tokens_per_step(self) -> float:
        return (self.new_tokens - len(self.sequences)) / self.steps if self.steps else float("nan")


@torch.no_grad()
def medusa_generate(
    model: Decoder,
    propose: Callable[[Tensor], Tensor],
    input_ids: TokenIds,
    *,
    tree: Tree,
    max_new_tokens: int,
    eos_token_ids: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    attention_mask: Tensor | None = None,
) -> SpeculativeOutput:
    """Greedy `generate` in fewer forward passes: the same tokens, whatever the heads propose.

    A step runs the model over all nodes of the tree at once, each seeing the text so far and its own ancestors, and
    accepts the path on which every token is the model's own choice after its parent. The choice after the last one
    comes free and is the next root. The tokens are exactly those of `generate`, up to the rounding of forward passes of
    different shapes, which may decide between two logits that are equal but for it. Rows are decoded one by one.

    Args:
        propose: hidden states (B, H) -> logits (B, K, V) of the K heads; head k speaks of the token k + 2 places after
            the one whose hidden state it is given.
        tree: the candidates to try; at most K deep.
        The others are those of `generate`.

    Raises:
        InputError: as `generate`, or the tree needs more heads or candidates than propose gives.
    """
    eos_ids = as_eos_ids(eos_token_ids)
    pad_id = pad_token_id if pad_token_id is not None else (eos_ids[0] if eos_ids else None)
    prompts = prepare_prompts(input_ids, attention_mask, pad_id, model.config.vocab_size)
    check_max_new_tokens(max_new_tokens)
    with evaluating(model):
        cache = model.new_cache(1, prompts.ids.shape[1] + max_new_tokens + len(tree))
        ids, real = prompts.ids.to(cache.device), prompts.mask.to(cache.device)
        rows, steps = [], 0
        for row, prompt in enumerate(ids):
            cache.keep(0, [])
            new, passes = _decode(model, propose, prompt[real[row]], cache, tree, max_new_tokens, frozenset(eos_ids))
            rows.append(new)
            steps += passes
    longest = max(map(len, rows))
    # rows differ in length only when one met EOS, and then pad_id is known
    padded = torch.tensor([new + [pad_id or 0] * (longest - len(new)) for new in rows], device=cache.device)
    return SpeculativeOutput(torch.cat([ids, padded], dim=1), steps=steps, new_tokens=sum(map(len, rows)))


def _decode(
    model: Decoder,
    propose: Callable[[Tensor], Tensor],
    prompt: Tensor,
    cache: KVCache,
    tree: Tree,
    max_new_tokens: int,
    eos: frozenset[int],
) -> tuple[list[int], int]:
    """Decode one prompt (T,) without padding, in an empty cache: its new tokens, and the steps they took."""
    device = cache.device
    mask, depth, parent = tree.mask.to(device), tree.depth.to(device), tree.parent.to(device)
    head, rank = tree.head[1:].to(device), tree.rank[1:].to(device)
    positions = torch.arange(len(prompt), device=device)
    hidden = model.hidden_states(prompt[None], position_ids=positions[None], cache=cache)[:, -1]  # (1, H)
    root = greedy(model.head(hidden))  # (1,)
    new, steps = root.tolist(), 0
    while len(new) < max_new_tokens and new[-1] not in eos:
        start = cache.length
        candidates = _candidates(propose(hidden), tree)
        tokens = torch.cat([root, candidates[head, rank]])
        seen = F.pad(mask, (start, 0), value=True)[None]  # all of the text, then the ancestors
        states = model.hidden_states(tokens[None], position_ids=(start + depth)[None], mask=seen, cache=cache)[0]
        choices = greedy(model.head(states))
        right = tokens == choices[parent]
        right[0] = True
        accepted = (right | ~mask).all(dim=1)  # a node is in when it and all its ancestors are right
        # Candidates of one head differ, so at most one node of each depth is in, and node order is path order. This is
        # the step's one wait for the device.
        chosen, inside = torch.stack([choices, accepted.long()]).tolist()
        path = [node for node in range(len(tree)) if inside[node]]
        for node in path:
            new.append(chosen[node])
            if len(new) == max_new_tokens or new[-1] in eos:
                break
        cache.keep(start, path)
        hidden, root = states[path[-1:]], choices[path[-1:]]
        steps += 1
    return new, steps


def _candidates(logits: Tensor, tree: Tree) -> Tensor:
    """The heads' best tokens, best first: logits (1, K, V) -> long (tree.max_depth, tree.width)."""
    if logits.ndim != 3 or logits.shape[0] != 1:
        raise InputError(f"propose must give logits of shape (1, heads, vocabulary), got {tuple(logits.shape)}")
    _, heads, vocabulary = logits.shape
    if heads < tree.max_depth or vocabulary < tree.width:
        needs = f"the tree needs {tree.max_depth} heads and {tree.width} candidates of each"
        raise InputError(f"{needs}, propose gives {heads} heads over a vocabulary of {vocabulary}")
    return logits[0, : tree.max_depth].topk(tree.width, dim=-1).indices
