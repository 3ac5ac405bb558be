"""Trees of candidate continuations for Medusa decoding (Cai et al. 2024, arXiv 2401.10774)."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from ligermodels.errors import InputError

Path: TypeAlias = tuple[int, ...]
Table: TypeAlias = Tensor | Sequence[Sequence[float]]

# Vicuna-7B, Medusa-1: how often the right token is a head's first candidate, and among its first five
REFERENCE_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
REFERENCE_TOP5 = (0.78, 0.56, 0.42, 0.34, 0.30)
MAX_CHILDREN = 10


@dataclass(frozen=True)
class Tree:
    """Which candidates of which heads one forward pass tries. Make it with `from_paths`.

    Node 0 is the root, the last token that is already certain. Node i > 0 is paths[i - 1]: the ranks, among the
    candidates of heads 0, 1, ..., of the tokens from the root down to it. Nodes are ordered by depth, then by path.
    The tensors live on the CPU.
    """

    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], num_heads: int | None = None) -> "Tree":
        """A tree of these paths; (0, 2) is the third candidate of head 1 below the first candidate of head 0.

        Raises:
            InputError: a path is empty, repeated, has a negative rank, lacks its parent, or is longer than num_heads.
        """
        given = [tuple(path) for path in paths]
        known = set(given)
        for path in given:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise InputError(f"tree path {path} must be one or more ranks, integers from 0 on")
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"tree path {path} lacks its parent {path[:-1]}: add it")
            if num_heads is not None and len(path) > num_heads:
                raise InputError(f"tree path {path} needs {len(path)} heads, there are {num_heads}")
        if len(known) < len(given):
            repeated = next(path for path in given if given.count(path) > 1)
            raise InputError(f"tree path {repeated} is given more than once")
        return cls(tuple(sorted(known, key=lambda path: (len(path), path))))

    def __len__(self) -> int:
        """Number of nodes N, the root included."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node: how many heads the tree uses."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """How many candidates of a head the tree uses at most: its highest rank plus one."""
        return max((path[-1] + 1 for path in self.paths), default=0)

    @cached_property
    def parent(self) -> Tensor:
        """Long (N,): each node's parent; the root is its own."""
        number = {path: node for node, path in enumerate(((), *self.paths))}
        return torch.tensor([0, *(number[path[:-1]] for path in self.paths)])

    @cached_property
    def depth(self) -> Tensor:
        """Long (N,): each node's distance from the root, which is its position after the root's."""
        return torch.tensor([0, *(len(path) for path in self.paths)])

    @cached_property
    def rank(self) -> Tensor:
        """Long (N,): each node's rank among its head's candidates; -1 for the root."""
        return torch.tensor([-1, *(path[-1] for path in self.paths)])

    @cached_property
    def route(self) -> Tensor:
        """Long (N, max_depth + 1): the nodes from the root down to each node, which is repeated to the end."""
        route = torch.arange(len(self))[:, None].repeat(1, self.max_depth + 1)
        for node, parent in enumerate(self.parent.tolist()):
            above = int(self.depth[node])
            route[node, :above] = route[parent, :above]
        return route

    @cached_property
    def mask(self) -> Tensor:
        """Bool (N, N): mask[i, j] is True when node j is node i or one of its ancestors."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parent.tolist()):
            mask[node] |= mask[parent]
        return mask


def chain(num_heads: int) -> Tree:
    """Only the first candidate of each head, one below the other."""
    return Tree.from_paths([(0,) * depth for depth in range(1, num_heads + 1)])


def grow(accuracies: Table, nodes: int = 63) -> Tree:
    """The tree of `nodes` nodes (and the root) that accepts the most tokens, if heads are right independently.

    The rule of the paper's section on optimised trees: always add the node, below one that is already in, whose path is
    the most probable. A path's probability is the product of its candidates'. The tree is smaller when there are not
    that many paths of probability above zero.

    Args:
        accuracies: (K, M), the probability that the token of rank m of head k is the right one (not the cumulative
            top-m accuracy, which is their running sum). M bounds the children of a node.

    Raises:
        InputError: accuracies is not such a table, or nodes is below 1.
    """
    table = _as_table(accuracies)
    if nodes < 1:
        raise InputError(f"nodes must be at least 1, got {nodes}")
    paths: list[Path] = []
    frontier: list[tuple[float, int, Path]] = [(-1.0, 0, ())]  # least first: probable, then shallow, then low in rank
    while frontier and len(paths) <= nodes:
        negative, depth, path = heapq.heappop(frontier)
        paths.append(path)
        if depth < len(table):
            for rank, accuracy in enumerate(table[depth]):
                if negative * accuracy < 0:
                    heapq.heappush(frontier, (negative * accuracy, depth + 1, (*path, rank)))
    return Tree.from_paths(paths[1:])


def expected_tokens(tree: Tree, accuracies: Table) -> float:
    """Tokens a step that `tree` yields on average: 1 + the probabilities of its paths (see `grow` for accuracies)."""
    table = _as_table(accuracies)
    if tree.max_depth > len(table) or tree.width > len(table[0]):
        raise InputError(
            f"accuracies cover {len(table)} heads and {len(table[0])} ranks, the tree uses {tree.max_depth} heads and "
            f"{tree.width} ranks"
        )
    return 1 + math.fsum(math.prod(table[head][rank] for head, rank in enumerate(path)) for path in tree.paths)


def default_tree(num_heads: int, nodes: int = 63, *, vocab_size: int = MAX_CHILDREN) -> Tree:
    """A tree for heads of unknown accuracy, grown from those published for Vicuna-7B; at most 10 children a node, and
    no more than a vocabulary of `vocab_size` has tokens."""
    if min(num_heads, vocab_size) < 1:
        raise InputError(f"num_heads and vocab_size must be at least 1, got {num_heads} and {vocab_size}")
    return grow([reference_accuracies(head)[:vocab_size] for head in range(num_heads)], nodes)


def reference_accuracies(head: int) -> list[float]:
    """Accuracy of a head's first 10 ranks, a power law through the published top-1 and top-5.

    The chance that the right token is not among the first m is taken as (1 - top1) * m^-b. Heads after the published
    five lose as much of both, in proportion, as the fifth's top-5 does against the fourth's.
    """
    known = min(head, len(REFERENCE_TOP1) - 1)
    loss = (REFERENCE_TOP5[-1] / REFERENCE_TOP5[-2]) ** (head - known)
    top1, top5 = REFERENCE_TOP1[known] * loss, REFERENCE_TOP5[known] * loss
    b = math.log((1 - top1) / (1 - top5)) / math.log(5)
    missed = [1.0] + [(1 - top1) * m**-b for m in range(1, MAX_CHILDREN + 1)]
    return [before - after for before, after in pairwise(missed)]


def _as_table(accuracies: Table) -> list[list[float]]:
    try:
        table = torch.as_tensor(accuracies, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"accuracies must be a table (heads, ranks) of numbers: {error}") from None
    if table.ndim != 2 or table.numel() == 0:
        raise InputError(f"accuracies must have shape (heads, ranks), got {tuple(table.shape)}")
    if not bool(((table >= 0) & (table <= 1)).all()):
        raise InputError("accuracies must lie in [0, 1]")
    if bool((table.sum(dim=1) > 1 + 1e-6).any()):
        raise InputError("accuracies of a head add up to more than 1: give each rank's own, not the cumulative top-m")
    return table.tolist()
