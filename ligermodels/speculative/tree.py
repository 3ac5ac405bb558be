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

from ligermodels.arguments import check_count, is_sequence, is_whole
from ligermodels.errors import InputError, short

Path: TypeAlias = tuple[int, ...]
Table: TypeAlias = Tensor | Sequence[Sequence[float]]

# Top-1 and top-5 accuracy of the heads of Medusa-1 on Vicuna-7B
REFERENCE_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
REFERENCE_TOP5 = (0.78, 0.56, 0.42, 0.34, 0.30)
MAX_CHILDREN = 10


@dataclass(frozen=True)
class Tree:
    """A tree of candidate tokens, which one forward pass checks. Make it with `from_paths`.

    Node 0 is the root, the last accepted token. Node i > 0 has the path paths[i - 1]. A path (r_0, r_1, ...) contains,
    for each depth, the rank of the token among the candidates of head 0, 1, ... Nodes are ordered by depth, then by
    path. All tensors are on the CPU.
    """

    paths: tuple[Path, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], num_heads: int | None = None) -> "Tree":
        """A tree with these paths.

        Args:
            paths: the ranks of each node; (0, 2) is the third candidate of head 1 after the first candidate of head 0.
            num_heads: largest length of a path; by default unlimited.

        Returns:
            The tree.

        Raises:
            InputError: a path is empty or repeated, has a negative rank, lacks its parent, or is too long.

        Examples:
            >>> tree = Tree.from_paths([(0,), (1,), (0, 0)])
            >>> medusa.generate([[1, 5, 9]], max_new_tokens=64, tree=tree)
        """
        node_paths = [_checked_path(path) for path in (paths if isinstance(paths, Iterable) else [paths])]
        known = set(node_paths)
        for path in node_paths:
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"tree path {path} lacks its parent {path[:-1]}: add it")
            if num_heads is not None and len(path) > num_heads:
                raise InputError(f"tree path {path} needs {len(path)} heads, there are {num_heads}")
        if len(known) < len(node_paths):
            repeated = next(path for path in node_paths if node_paths.count(path) > 1)
            raise InputError(f"tree path {repeated} is given more than once")
        return cls(tuple(sorted(known, key=lambda path: (len(path), path))))

    def __len__(self) -> int:
        """Number of nodes N, with the root."""
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node, the number of heads that the tree uses."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def width(self) -> int:
        """Largest number of candidates of a head that the tree uses: the highest rank plus 1."""
        return max((path[-1] + 1 for path in self.paths), default=0)

    @property
    def is_chain(self) -> bool:
        """Whether every node has a single child, the first candidate, except for the last node."""
        return len(self) == self.max_depth + 1 and self.width <= 1

    @cached_property
    def parent(self) -> Tensor:
        """Long (N,): the parent of each node; the root's parent is the root."""
        number = {path: node for node, path in enumerate(((), *self.paths))}
        return torch.tensor([0, *(number[path[:-1]] for path in self.paths)], device="cpu")

    @cached_property
    def depth(self) -> Tensor:
        """Long (N,): the distance of each node from the root; its token has the root's position plus this distance."""
        return torch.tensor([0, *(len(path) for path in self.paths)], device="cpu")

    @cached_property
    def rank(self) -> Tensor:
        """Long (N,): the rank of each node among the candidates of its head; -1 for the root."""
        return torch.tensor([-1, *(path[-1] for path in self.paths)], device="cpu")

    @cached_property
    def route(self) -> Tensor:
        """Long (N, max_depth + 1): the nodes on the path from the root to each node, padded by repeating the node."""
        route = torch.arange(len(self), device="cpu")[:, None].repeat(1, self.max_depth + 1)
        for node, parent in enumerate(self.parent.tolist()):
            above = int(self.depth[node])
            route[node, :above] = route[parent, :above]
        return route

    @cached_property
    def mask(self) -> Tensor:
        """Bool (N, N): mask[i, j] is True if node j is node i or an ancestor of node i."""
        mask = torch.eye(len(self), dtype=torch.bool, device="cpu")
        for node, parent in enumerate(self.parent.tolist()):
            mask[node] |= mask[parent]
        return mask


@dataclass(frozen=True)
class DynamicTree:
    """A tree that grows anew in each step and for each sequence, from the head's probabilities (EAGLE-2, arXiv
    2406.16858).

    At each level the `top_k` most probable paths continue, each by its `top_k` most probable tokens. Of all candidates
    the `nodes` with the most probable paths are checked. The probability of a path is the product of the head's
    probabilities of its tokens.

    Args:
        max_depth: number of levels, largest number of drafted tokens per step.
        top_k: candidates per token, and paths that continue.
        nodes: number of candidates that the model checks in a step, without the root.

    Raises:
        InputError: a number is below 1.

    Examples:
        >>> eagle.generate([[1, 5, 9]], max_new_tokens=64, tree=DynamicTree(max_depth=6, top_k=8, nodes=48))
    """

    max_depth: int = 6
    top_k: int = 8
    nodes: int = 48
    is_chain = False

    def __post_init__(self) -> None:
        for name in ("max_depth", "top_k", "nodes"):
            check_count(name, getattr(self, name))

    @property
    def width(self) -> int:
        """Number of candidates per token."""
        return self.top_k

    @property
    def pool(self) -> int:
        """Number of candidates of all levels, of which the nodes are chosen."""
        return self.top_k + (self.max_depth - 1) * self.top_k**2

    def __len__(self) -> int:
        """Number of nodes N, with the root."""
        return min(self.nodes, self.pool) + 1


def _checked_path(path: Sequence[int]) -> Path:
    if not is_sequence(path) or not path or not all(is_whole(rank) and rank >= 0 for rank in path):
        raise InputError(f"tree path {short(path)} must be one or more ranks, integers from 0 on")
    return tuple(map(int, path))


def require_fixed(tree: Tree | DynamicTree, kind: str) -> None:
    """InputError for a `DynamicTree`, with heads of this kind, which have no probabilities after a candidate."""
    if isinstance(tree, DynamicTree):
        raise InputError(
            f"tree: a DynamicTree is for EAGLE-3 and MTP heads; {kind} heads have no probabilities after each "
            "candidate; give a Tree, or leave it out"
        )


def require_candidates(tree: Tree | DynamicTree, tokens: int) -> None:
    """InputError for a tree with more candidates per token than the `tokens` that a head proposes."""
    if tree.width > tokens:
        raise InputError(f"tree: has {tree.width} candidates per token, but there are {tokens} tokens")


def chain(num_heads: int) -> Tree:
    """A tree with a single path: the first candidate of each head."""
    return Tree.from_paths([(0,) * depth for depth in range(1, check_count("num_heads", num_heads, least=0) + 1)])


def grow(accuracies: Table, nodes: int = 63) -> Tree:
    """The tree of `nodes` nodes (and the root) that accepts the most tokens, if the heads' errors are independent.

    The method is the paper's (section on optimised trees): repeatedly add the child of a node in the tree that has the
    most probable path. The probability of a path is the product of the probabilities of its candidates. The tree has
    fewer nodes if fewer paths have a probability above zero.

    Args:
        accuracies: (K, M), the probability that the candidate of rank m of head k is correct (not the cumulative top-m
            accuracy), such as `HeadScores.hits`. A node has at most M children.
        nodes: number of nodes, without the root.

    Returns:
        The tree.

    Raises:
        InputError: `accuracies` is not such a table, or `nodes` is below 1.

    Examples:
        >>> tree = grow(evaluate_heads(medusa, batches).hits, nodes=63)
    """
    table, nodes = _as_table(accuracies), check_count("nodes", nodes)
    paths: list[Path] = []
    frontier: list[tuple[float, int, Path]] = [(-1.0, 0, ())]  # minus probability, depth, path; the smallest is next
    while frontier and len(paths) <= nodes:
        negative, depth, path = heapq.heappop(frontier)
        paths.append(path)
        if depth < len(table):
            for rank, accuracy in enumerate(table[depth]):
                if negative * accuracy < 0:
                    heapq.heappush(frontier, (negative * accuracy, depth + 1, (*path, rank)))
    return Tree.from_paths(paths[1:])


def expected_tokens(tree: Tree, accuracies: Table) -> float:
    """Average number of tokens per step with `tree`, 1 + the sum of the probabilities of its paths.

    Args:
        tree: the tree.
        accuracies: (K, M), the probability that the candidate of rank m of head k is correct; errors are taken as
            independent.

    Returns:
        Tokens per step.

    Raises:
        InputError: `accuracies` is not such a table, or has fewer heads or ranks than the tree uses.
    """
    table = _as_table(accuracies)
    if tree.max_depth > len(table) or tree.width > len(table[0]):
        raise InputError(
            f"accuracies cover {len(table)} heads and {len(table[0])} ranks, the tree uses {tree.max_depth} heads and "
            f"{tree.width} ranks"
        )
    return 1 + math.fsum(math.prod(table[head][rank] for head, rank in enumerate(path)) for path in tree.paths)


def default_tree(num_heads: int, nodes: int = 63, *, vocab_size: int = MAX_CHILDREN) -> Tree:
    """A tree for heads of unknown accuracy, grown from the accuracies published for Vicuna-7B.

    Args:
        num_heads: number of heads, the largest depth.
        nodes: number of nodes, without the root.
        vocab_size: number of tokens, which limits the children of a node; a node has at most 10 children.

    Returns:
        The tree.

    Raises:
        InputError: an argument is below 1.
    """
    num_heads, vocab_size = check_count("num_heads", num_heads), check_count("vocab_size", vocab_size)
    return grow([reference_accuracies(head)[:vocab_size] for head in range(num_heads)], nodes)


def reference_accuracies(head: int) -> list[float]:
    """Accuracy of the first 10 ranks of a head, from a power law through its published top-1 and top-5 accuracy.

    The probability that the correct token is not among the first m candidates is modelled as (1 - top1) * m^-b. From
    the sixth head on, both accuracies shrink from head to head by the ratio of the fifth and the fourth head's top-5.
    """
    known = min(head, len(REFERENCE_TOP1) - 1)
    loss = (REFERENCE_TOP5[-1] / REFERENCE_TOP5[-2]) ** (head - known)
    top1, top5 = REFERENCE_TOP1[known] * loss, REFERENCE_TOP5[known] * loss
    b = math.log((1 - top1) / (1 - top5)) / math.log(5)
    missed = [1.0] + [(1 - top1) * m**-b for m in range(1, MAX_CHILDREN + 1)]
    return [before - after for before, after in pairwise(missed)]


def _as_table(accuracies: Table) -> list[list[float]]:
    try:
        table = torch.as_tensor(accuracies, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise InputError(f"accuracies must be a table (heads, ranks) of numbers: {error}") from None
    if table.ndim != 2 or table.numel() == 0:
        raise InputError(f"accuracies must have shape (heads, ranks), got {tuple(table.shape)}")
    if not bool(((table >= 0) & (table <= 1)).all()):
        raise InputError("accuracies must lie in [0, 1]")
    if bool((table.sum(dim=1) > 1 + 1e-6).any()):
        raise InputError("accuracies of a head add up to more than 1: give each rank's own, not the cumulative top-m")
    return table.tolist()
