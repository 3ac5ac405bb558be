"""The gated delta rule and the convolution before it, against loops over tokens: texts, packed documents, trees."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError

GROUPS, HEADS, K, V = 2, 6, 5, 7


def operands(batch: int, tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Decays from nearly none to nearly all."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64).to(dtype)

    g = -normal(HEADS).mul(2).exp()
    return {"q": normal(GROUPS, K), "k": normal(GROUPS, K), "v": normal(HEADS, V), "g": g,
            "beta": normal(HEADS).sigmoid()}  # fmt: skip


def some_state(batch: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, HEADS, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, token by token."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (q / K**0.5, k))
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("brkv,brk->brv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        found.append(torch.einsum("brkv,brk->brv", state, q[:, t]))
    return torch.stack(found, 1), state


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> bool:
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 131])
@pytest.mark.parametrize("initial", [False, True], ids=["from zero", "from a state"])
def test_is_the_loop_over_tokens(tokens: int, initial: bool) -> None:
    given = operands(2, tokens)
    state = some_state(2) if initial else torch.zeros(2, HEADS, K, V, dtype=torch.float64)
    o, last = ops.gated_delta_rule(**given, initial_state=state if initial else None)
    wanted_o, wanted_last = by_tokens(**given, state=state)
    assert close(o, wanted_o) and close(last, wanted_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_float32(dtype: torch.dtype) -> None:
    given = operands(2, 150, dtype)
    o, last = ops.gated_delta_rule(**given)
    exact, exact_last = by_tokens(**{n: t.double() for n, t in given.items()}, state=0 * some_state(2))
    assert o.dtype == dtype and last.dtype == torch.float32
    assert close(last.double(), exact_last, 2e-6)
    assert close(o.double(), exact, 2e-6 if dtype == torch.float32 else 4e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.gated_delta_rule(**given)[1], last)


@pytest.mark.parametrize("decay", [0.0, -1e-4, -80.0])
def test_extreme_decays_and_equal_keys(decay: float) -> None:
    """A state that is kept, or gone at once: no overflow, whichever way differences of decays go."""
    given = operands(1, 140, torch.float32)
    given["g"] = torch.full_like(given["g"], decay).requires_grad_()
    given["k"] = given["k"][:, :1].expand_as(given["k"])
    o, last = ops.gated_delta_rule(**given)
    o.square().sum().backward()
    exact, _ = by_tokens(**{n: t.detach().double() for n, t in given.items()}, state=0 * some_state(1))
    assert close(o.detach().double(), exact, 1e-5) and last.isfinite().all()
    assert given["g"].grad is not None and given["g"].grad.isfinite().all()


@pytest.mark.parametrize("tokens", [3, 67])
def test_gradients(tokens: int) -> None:
    given = [t[:, :, :3] if t.shape[2] == HEADS else t[:, :, :1] for t in operands(1, tokens).values()]
    given = [t.clone().requires_grad_() for t in (*given, some_state(1)[:, :3])]
    bounds = None if tokens == 3 else torch.tensor([0, 30, tokens], dtype=torch.int32)

    def rule(*tensors: Tensor) -> Any:
        return ops.gated_delta_rule(*tensors[:5], initial_state=tensors[5], cu_seqlens=bounds)

    assert torch.autograd.gradcheck(rule, given, fast_mode=True)


@pytest.mark.parametrize("lengths", [[13, 1, 50, 0, 64, 70, 2], [100, 5, 200], [0, 63, 66, 1]])
def test_packed_documents_equal_separate_ones(lengths: list[int]) -> None:
    """Ends at the ends of chunks, and within them; documents over several chunks, and of no token."""
    given = {name: t.requires_grad_() for name, t in operands(1, sum(lengths)).items()}
    given["g"] = (given["g"].detach() / 50).requires_grad_()  # states that last
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    o, last = ops.gated_delta_rule(**given, cu_seqlens=bounds)
    parts = [{name: t[:, start:end] for name, t in given.items()} for start, end in pairwise(bounds.tolist())]
    apart = [ops.gated_delta_rule(**part) for part in parts if part["q"].shape[1]]
    assert close(o, torch.cat([each for each, _ in apart], dim=1)) and close(last, apart[-1][1])
    weights = torch.randn(o.shape, dtype=o.dtype)
    together, separate = (
        torch.autograd.grad((out * weights).sum(), given.values())
        for out in (o, torch.cat([each for each, _ in apart], dim=1))
    )
    assert all(close(found, wanted) for found, wanted in zip(together, separate, strict=True))


def tree(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """parent, depth and ancestors of a random tree whose nodes come after their parents."""
    generator = torch.Generator().manual_seed(nodes)
    parent, ancestors = torch.zeros(nodes, dtype=torch.long), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent[node] = torch.randint(max(node - 5, 0), node, (), generator=generator)
        ancestors[node] |= ancestors[parent[node]]
    return parent, ancestors.sum(1) - 1, ancestors


@pytest.mark.parametrize("nodes", [1, 2, 9, 71])
def test_each_node_of_a_tree_is_its_path_run_alone(nodes: int) -> None:
    parent, depth, ancestors = tree(nodes)
    given, state = operands(2, nodes), some_state(2)
    earlier = torch.randn(2, 3, 11, dtype=torch.float64)
    x, weight = torch.randn(2, nodes, 11, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    y = ops.causal_conv(x, weight, earlier=earlier, tree=(parent, depth))
    for node in range(nodes):
        path = ancestors[node].nonzero().flatten()
        alone, last = ops.gated_delta_rule(**{n: t[:, path] for n, t in given.items()}, initial_state=state)
        assert close(o[:, node], alone[:, -1])
        kept = ops.tree_state(state, updates, torch.tensor([node, 0]), ancestors)
        assert close(kept[:1], last[:1])
        assert close(y[:, node], ops.causal_conv(x[:, path], weight, earlier=earlier)[:, -1])
    first = ops.gated_delta_rule(**{n: t[:, :1] for n, t in given.items()}, initial_state=state)[1]
    assert close(kept[1:], first[1:])


@pytest.mark.parametrize("width", [2, 4])
def test_conv_is_torchs(width: int) -> None:
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    weight = torch.randn(5, width, dtype=torch.float64)
    wanted = F.silu(F.conv1d(F.pad(x.mT, (width - 1, 0)), weight[:, None], groups=5)).mT
    assert close(ops.causal_conv(x, weight), wanted)
    assert close(ops.causal_conv(x[:, 4:], weight, earlier=x[:, 5 - width : 4]), wanted[:, 4:])
    narrow = ops.causal_conv(x.bfloat16(), weight.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert close(narrow.double(), ops.causal_conv(x.bfloat16().double(), weight.bfloat16().double()), 4e-3)


def test_conv_of_packed_documents_and_its_gradients() -> None:
    lengths = [1, 5, 0, 2, 9]
    x = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    apart = [ops.causal_conv(part, weight) for part in x.split(lengths, 1) if part.shape[1]]
    assert close(ops.causal_conv(x, weight, cu_seqlens=bounds), torch.cat(apart, dim=1))
    assert torch.autograd.gradcheck(lambda *given: ops.causal_conv(*given, cu_seqlens=bounds), (x, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 3, GROUPS, K + 1)}, "gated_delta_rule: k must be"),
        ({"v": torch.zeros(1, 3, 5, V), "g": torch.zeros(1, 3, 5), "beta": torch.zeros(1, 3, 5)}, "a multiple of"),
        ({"beta": torch.zeros(1, 3, 1)}, "beta must be"),
        ({"initial_state": torch.zeros(1, HEADS, V, K)}, "initial_state must be"),
    ],
)
def test_bad_operands(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ops.gated_delta_rule(**{**operands(1, 3, torch.float32), **change})


def test_documents_come_in_one_row() -> None:
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(InputError, match="gated_delta_rule: documents are packed into one row"):
        ops.gated_delta_rule(**operands(2, 3), cu_seqlens=bounds)
    with pytest.raises(InputError, match="causal_conv: documents are packed into one row"):
        ops.causal_conv(torch.zeros(2, 3, 5), torch.zeros(5, 4), cu_seqlens=bounds)
