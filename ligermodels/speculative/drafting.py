"""Drafters, which propose the candidate tokens of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.speculative.layout import Layout
from ligermodels.speculative.tree import DynamicTree, Tree

Propose = Callable[[Tensor], Tensor]
"""Hidden states (B, H) -> logits (B, K, V) of the K heads."""


def unchanged(x: Tensor) -> Tensor:
    """x itself."""
    return x


class ChooseDrafts(Protocol):
    """Chooses candidate tokens from a head's logits."""

    def __call__(self, logits: Tensor, depth: int = 0, token_ids: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """Choose the candidates of n depths of the tree.

        Args:
            logits: (B, n, V), for each of the depths.
            depth: the first of them, from 0.
            token_ids: ids of the logits' vocabulary, of any shape -> ids of the model's tokens, where these differ.

        Returns:
            Long (B, n, width of the tree), ids of the model's tokens, for each depth the best token first.
        """


class TopDrafts:
    """The most probable tokens as candidates: a `ChooseDrafts`.

    Args:
        width: number of candidates per depth.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, logits: Tensor, depth: int = 0, token_ids: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """See `ChooseDrafts`."""
        return token_ids(ops.topk_indices(logits, self.width))


class Drafter:
    """Proposes the tokens of a tree for each sequence of a batch.

    `begin` and `start` are called once, then `draft` and `follow` in every step. `draft` and `follow` change tensors in
    place, at fixed addresses, and do not synchronise with the device, so that a CUDA graph can capture them.
    """

    reads_states = False
    """Whether `start` needs the hidden states of all tokens of the prompts, not only of the last tokens."""
    boundaries: tuple[int, ...] = ()
    """The model's states that `start` and `follow` read, side by side: L is the residual stream after L layers. Empty:
    the hidden states after the final norm."""
    layout: Layout | None = None
    """After `draft`, the nodes of the tree of each sequence; None for the tree that `begin` was given."""
    max_depth: Tensor | None = None
    """After `draft`, long (B,): deeper nodes of a sequence's tree are not accepted; None for no such limit."""

    def begin(self, batch_size: int, max_length: int, tree: Tree | DynamicTree, choose: ChooseDrafts) -> None:
        """Prepare for a batch.

        Args:
            batch_size: B.
            max_length: largest length of a sequence, with the nodes of the tree.
            tree: the candidates to propose in each step.
            choose: chooses the candidates from the head's logits. In speculative sampling with a chain it samples them,
                and keeps their distributions; a drafter that does not call it proposes fixed candidates, which is
                exact too.
        """
        raise NotImplementedError

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        """Called after the prefill with the hidden states of the prompts, (B, T, H), padded on the right."""

    def draft(self, sequences: ops.Sequences) -> Tensor:
        """Candidate tokens, long (B, depth of the tree, width of the tree), for each depth the best token first."""
        raise NotImplementedError

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        """Called after each step.

        Args:
            sequences: the sequences, with the accepted tokens.
            slots: long (B, P), the result of `ops.accept_path`: `slots - slots[:, :1]` are the nodes of the accepted
                path.
            states: hidden states of all N nodes, (B, N, H).
        """


class HeadsDrafter(Drafter):
    """A `Drafter` with heads that all read the last hidden state, such as Medusa's.

    Args:
        propose: hidden states (B, H) -> logits (B, K, V) of the K heads.

    Raises:
        InputError: by `draft`, if the tree needs more heads, or more candidates per head, than there are.
    """

    def __init__(self, propose: Propose) -> None:
        self.propose = propose

    def begin(self, batch_size: int, max_length: int, tree: Tree | DynamicTree, choose: ChooseDrafts) -> None:
        self.tree, self.choose = tree, choose

    def draft(self, sequences: ops.Sequences) -> Tensor:
        hidden, tree = sequences.hidden, self.tree
        logits = self.propose(hidden)
        if logits.ndim != 3 or len(logits) != len(hidden):
            raise InputError(
                f"propose must give logits of shape ({len(hidden)}, heads, vocabulary), got {tuple(logits.shape)}"
            )
        _, heads, vocabulary = logits.shape
        if heads < tree.max_depth or vocabulary < tree.width:
            needs = f"tree: the tree needs {tree.max_depth} heads and {tree.width} candidates per head"
            raise InputError(f"{needs}, but propose gives {heads} heads over {vocabulary} tokens; give a smaller tree")
        return self.choose(logits[:, : tree.max_depth])
