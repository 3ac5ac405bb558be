"""What proposes the candidates of speculative decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.speculative.tree import Tree

Propose = Callable[[Tensor], Tensor]
"""Hidden states (B, H) -> logits (B, K, V) of the K heads."""


class Drafter(Protocol):
    """Proposes the tokens of a tree for each sequence of a batch.

    After `begin` and `start`, a step calls `draft` and then `follow`. These two change tensors in place, at fixed
    addresses, and do not synchronise with the device, so that a CUDA graph can hold them.
    """

    reads_states: bool
    """Whether it is to be given the hidden states of prompts and of accepted paths, by `start` and `follow`."""

    def begin(self, batch_size: int, max_length: int, tree: Tree) -> None:
        """Get ready for sequences of up to `max_length` tokens, the nodes of the tree included."""

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        """After the prefill: hidden states (B, T, H) of the prompts, which are padded on the right."""

    def draft(self, sequences: ops.Sequences) -> Tensor:
        """Long (B, the tree's depth, its width): for each depth the best tokens, best first."""

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        """After each step: the hidden states (B, N, H) of the nodes, and long (B, P), `slots[:, :1]` + the nodes of the
        accepted path, by which the sequences have grown: see `ops.accept_path`."""


class HeadsDrafter:
    """A `Drafter` of heads that all read the last hidden state, such as Medusa's.

    Raises InputError, from `draft`, when there are too few heads, or too few logits of each, for the tree.
    """

    reads_states = False

    def __init__(self, propose: Propose) -> None:
        self.propose = propose

    def begin(self, batch_size: int, max_length: int, tree: Tree) -> None:
        self.tree = tree

    def start(self, sequences: ops.Sequences, states: Tensor) -> None:
        """Nothing to do."""

    def follow(self, sequences: ops.Sequences, slots: Tensor, states: Tensor) -> None:
        """Nothing to do."""

    def draft(self, sequences: ops.Sequences) -> Tensor:
        hidden, tree = sequences.hidden, self.tree
        logits = self.propose(hidden)
        if logits.ndim != 3 or len(logits) != len(hidden):
            raise InputError(
                f"propose must give logits of shape ({len(hidden)}, heads, vocabulary), got {tuple(logits.shape)}"
            )
        _, heads, vocabulary = logits.shape
        if heads < tree.max_depth or vocabulary < tree.width:
            needs = f"the tree needs {tree.max_depth} heads and {tree.width} candidates of each"
            raise InputError(f"{needs}, propose gives {heads} heads over a vocabulary of {vocabulary}")
        return ops.topk_indices(logits[:, : tree.max_depth], tree.width)
