"""The recurrence of Mamba2 against a loop over tokens: texts, packed documents, steps and trees."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError

GROUPS, HEADS, N, P = 2, 6, 5, 7
OF_TOKENS = ("x", "dt", "B", "C")


def operands(batch: int, tokens: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Decays from nearly none to nearly all."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    group = batch, tokens, GROUPS, N
    return {
        "x": normal(batch, tokens, HEADS, P), "dt": normal(batch, tokens, HEADS).exp(), "A": -normal(HEADS).exp(),
        "B": normal(*group), "C": normal(*group), "D": normal(HEADS),
    }  # fmt: skip


def some_state(batch: int) -> Tensor:
    return torch.randn(batch, HEADS, N, P, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_tokens(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As it is defined, token by token."""
    B, C = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (B, C))
    found = []
    for t in range(x.shape[1]):
        added = B[:, t, :, :, None] * (dt[:, t, :, None] * x[:, t])[:, :, None]
        state = state * (dt[:, t] * A).exp()[..., None, None] + added
        found.append(torch.einsum("brnp,brn->brp", state, C[:, t]) + D[:, None] * x[:, t])
    return torch.stack(found, 1), state


def at(given: dict[str, Tensor], places: Any) -> dict[str, Tensor]:
    """The operands of some tokens."""
    return {name: t[:, places] if name in OF_TOKENS else t for name, t in given.items()}


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> bool:
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 131])
@pytest.mark.parametrize("initial", [False, True], ids=["from zero", "from a state"])
def test_is_the_loop_over_tokens(tokens: int, initial: bool) -> None:
    """Values, and the gradients of all operands."""
    given = {name: t.requires_grad_() for name, t in operands(2, tokens).items()}
    state = some_state(2).requires_grad_() if initial else None
    wanted = by_tokens(**given, state=0 * some_state(2) if state is None else state)
    found = ops.ssd(**given, initial_state=state)
    assert all(close(ours, true) for ours, true in zip(found, wanted, strict=True))
    weights = [torch.randn_like(t) for t in wanted]
    leaves = [*given.values(), *([] if state is None else [state])]
    ours, true = (
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(each, weights, strict=True)), leaves)
        for each in (found, wanted)
    )
    assert all(close(*pair) for pair in zip(ours, true, strict=True))
    plain = {**given, "D": None}
    assert close(ops.ssd(**plain)[0], ops.ssd(**{**given, "D": 0 * given["D"]})[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_float32(dtype: torch.dtype) -> None:
    given = operands(2, 150, dtype)
    y, last = ops.ssd(**given)
    exact, exact_last = by_tokens(**{n: t.double() for n, t in given.items()}, state=0 * some_state(2))
    assert y.dtype == dtype and last.dtype == torch.float32
    assert close(last.double(), exact_last, 2e-6)
    assert close(y.double(), exact, 2e-6 if dtype == torch.float32 else 4e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.ssd(**given)[1], last)


@pytest.mark.parametrize("rate", [0.0, -1e-4, -80.0])
def test_extreme_decays(rate: float) -> None:
    """A state that is kept, or gone at once: no overflow, whichever way differences of decays go."""
    given = operands(1, 140, torch.float32)
    given["A"] = torch.full_like(given["A"], rate).requires_grad_()
    y, last = ops.ssd(**given)
    y.square().sum().backward()
    exact, _ = by_tokens(**{n: t.detach().double() for n, t in given.items()}, state=0 * some_state(1))
    assert close(y.detach().double(), exact, 1e-5) and last.isfinite().all()
    assert given["A"].grad is not None and given["A"].grad.isfinite().all()


def test_tokens_without_a_step_leave_the_state() -> None:
    given, state = operands(2, 9), some_state(2)
    given["dt"][:, 5:] = 0
    assert close(ops.ssd(**given, initial_state=state)[1], ops.ssd(**at(given, slice(5)), initial_state=state)[1])


@pytest.mark.parametrize("lengths", [[13, 1, 50, 0, 64, 70, 2], [0, 63, 66, 1]])
def test_packed_documents_equal_separate_ones(lengths: list[int]) -> None:
    """Ends at the ends of chunks, and within them; documents over several chunks, and of no token."""
    given = {name: t.requires_grad_() for name, t in operands(1, sum(lengths)).items()}
    given["dt"] = (given["dt"].detach() / 50).requires_grad_()  # states that last
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    y, last = ops.ssd(**given, cu_seqlens=bounds)
    parts = [at(given, slice(start, end)) for start, end in pairwise(bounds.tolist())]
    apart = [ops.ssd(**part) for part in parts if part["x"].shape[1]]
    separate = torch.cat([each for each, _ in apart], dim=1)
    assert close(y, separate) and close(last, apart[-1][1])
    weights = torch.randn(y.shape, dtype=y.dtype)
    pairs = zip(*(torch.autograd.grad((out * weights).sum(), given.values()) for out in (y, separate)), strict=True)
    assert all(close(*pair) for pair in pairs)


@torch.no_grad()
@pytest.mark.parametrize("nodes", [1, 2, 9, 71])
def test_each_node_of_a_tree_is_its_path_in_steps(nodes: int) -> None:
    """Also after it is committed."""
    generator = torch.Generator().manual_seed(nodes)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[torch.randint(max(node - 5, 0), node, (), generator=generator)]
    given, state = operands(2, nodes), some_state(2)
    given["dt"] = given["dt"] / 20  # states that last
    y, updates = ops.ssd_tree(**given, state=state, ancestors=ancestors)
    for node in range(nodes):
        stepped = state.clone()
        for place in ancestors[node].nonzero().flatten().tolist():
            alone = ops.ssd_step(**at(given, slice(place, place + 1)), state=stepped)
        assert close(y[:, node], alone[:, 0])
        after = state.clone()
        ops.commit_tree(after, updates, torch.tensor([node, 0]), ancestors)
        assert close(after[0], stepped[0])
        assert close(after[1], ops.tree_state(state, updates, torch.tensor([0, 0]), ancestors)[1])


def test_bad_input() -> None:
    given, state = operands(2, 3, torch.float32), some_state(2)
    with pytest.raises(InputError, match="ssd: A must be"):
        ops.ssd(**{**given, "A": given["A"][1:]})
    with pytest.raises(InputError, match="multiple of the groups of B and C"):
        ops.ssd(**{**given, "B": given["B"].repeat(1, 1, 2, 1), "C": given["C"].repeat(1, 1, 2, 1)})
    with pytest.raises(InputError, match="ssd: documents are packed into one row, but x has 2"):
        ops.ssd(**given, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(InputError, match="ssd: cu_seqlens"):
        ops.ssd(**at({n: t[:1] if n in OF_TOKENS else t for n, t in given.items()}, slice(3)),
                cu_seqlens=torch.tensor([0, 2], dtype=torch.int32))  # fmt: skip
    with pytest.raises(InputError, match="ssd_step: x must be"):
        ops.ssd_step(**given, state=state.float())
    with pytest.raises(InputError, match="ssd_step: state must be"):
        ops.ssd_step(**at(given, slice(1)), state=state)
    given["x"].requires_grad_()
    with pytest.raises(InputError, match="ssd_tree has no gradient"):
        ops.ssd_tree(**given, state=state.float(), ancestors=torch.eye(3, dtype=torch.bool))
