"""The gated delta rule with a decay for each key channel (Kimi Delta Attention), against the loop over tokens in fp64:
sequences, packed documents, prefills in parts, decode steps and candidate trees."""

from functools import partial
from itertools import pairwise
from typing import Any

import delta_loop
import pytest
import torch
from delta_loop import HEADS, K, V, by_tokens, some_state
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.linear_attention import fla

operands = partial(delta_loop.operands, by_channel=True)


def error(found: Tensor, wanted: Tensor) -> float:
    """max |found - wanted| / max |wanted|; infinite for NaN, and 0 if both are 0."""
    difference, size = (found.double() - wanted.double()).abs().max(), wanted.abs().max()
    return 0.0 if difference == 0 else float((difference / size).nan_to_num(float("inf")))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 63, 64, 65, 128, 131])
@pytest.mark.parametrize("initial", [False, True], ids=["from zero", "from a state"])
def test_is_the_loop_over_tokens(tokens: int, initial: bool) -> None:
    given = {name: t.requires_grad_() for name, t in operands(2, tokens).items()}
    state = (some_state(2) if initial else torch.zeros(2, HEADS, K, V, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(2, tokens, HEADS, V, dtype=torch.float64), torch.randn_like(state)
    results = []
    for o, last in (ops.gated_delta_rule(**given, initial_state=state), by_tokens(**given, state=state)):
        loss = (o * weights[0]).sum() + (last * weights[1]).sum()
        results.append([o, last, *torch.autograd.grad(loss, [*given.values(), state])])
    assert max(map(error, *results)) < 1e-11
    if not initial:
        assert torch.equal(ops.gated_delta_rule(**given)[0], results[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["none", "slow", "strong", "all at once", "mixed"])
def test_strong_decays_in_narrow_dtypes(decay: str, dtype: torch.dtype) -> None:
    """exp(-G) overflows float32 after a token of decay -89; channels of one key differ by any amount."""
    given = operands(1, 150, dtype)
    levels = {
        "none": [0.0],
        "slow": [-1e-4],
        "strong": [-80.0],
        "all at once": [-3e4],
        "mixed": [0.0, -1e-3, -2.0, -80],
    }
    index = torch.randint(len(levels[decay]), given["g"].shape, generator=torch.Generator().manual_seed(3))
    given["g"] = torch.tensor(levels[decay])[index].to(dtype)
    given["k"] = given["k"][:, :1] + 0.1 * given["k"]  # keys that nearly repeat
    given = {name: t.requires_grad_() for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    o, last = ops.gated_delta_rule(**given)
    assert o.dtype == dtype and last.dtype == torch.float32
    wanted, wanted_last = by_tokens(**exact, state=0 * some_state(1))
    narrow = 2e-6 if dtype == torch.float32 else 4e-3
    assert error(last, wanted_last) < 1e-5 and error(o, wanted) < max(narrow, 1e-5)
    found, expected = (
        torch.autograd.grad(y.double().square().sum() + s.double().square().sum(), list(x.values()))
        for y, s, x in ((o, last, given), (wanted, wanted_last, exact))
    )
    for name, ours, theirs in zip(given, found, expected, strict=True):
        if theirs.abs().max() > 1e-30:  # of decays of all there is nothing to compare but rounding
            assert error(ours, theirs) < 10 * max(narrow, 1e-5), name
        assert ours.isfinite().all(), name


@pytest.mark.parametrize("tokens", [3, 37])
def test_second_derivatives(tokens: int) -> None:
    given = [t[:, :, :3] if t.shape[2] == HEADS else t[:, :, :1] for t in operands(1, tokens).values()]
    given = [t.clone().requires_grad_() for t in (*given, some_state(1)[:, :3])]
    bounds = None if tokens == 3 else torch.tensor([0, 20, tokens], dtype=torch.int32)

    def rule(*tensors: Tensor) -> Any:
        return ops.gated_delta_rule(*tensors[:5], initial_state=tensors[5], cu_seqlens=bounds)

    assert torch.autograd.gradcheck(rule, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(rule, given, fast_mode=True)


@pytest.mark.parametrize("tokens", [9, 130])
def test_equal_decays_of_all_channels_are_one_decay(tokens: int) -> None:
    given = operands(2, tokens)
    one = {**given, "g": given["g"][..., 0]}
    given["g"] = one["g"][..., None].expand_as(given["g"])
    assert max(map(error, ops.gated_delta_rule(**given), ops.gated_delta_rule(**one))) < 1e-12


@pytest.mark.parametrize("lengths", [[13, 1, 50, 0, 64, 70, 2], [100, 5, 200], [0, 63, 66, 1]])
def test_packed_documents_equal_separate_ones(lengths: list[int]) -> None:
    """Ends at the ends of chunks, and within them; documents over several chunks, and of no token."""
    given = {name: t.requires_grad_() for name, t in operands(1, sum(lengths)).items()}
    given["g"] = (given["g"].detach() / 50).requires_grad_()  # states that last
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    o, last = ops.gated_delta_rule(**given, cu_seqlens=bounds)
    parts = [{name: t[:, start:end] for name, t in given.items()} for start, end in pairwise(bounds.tolist())]
    apart = [by_tokens(**part, state=0 * some_state(1)) for part in parts if part["q"].shape[1]]
    wanted = torch.cat([each for each, _ in apart], dim=1)
    assert error(o, wanted) < 1e-12 and error(last, apart[-1][1]) < 1e-12
    weights = torch.randn(o.shape, dtype=o.dtype)
    gradients = (torch.autograd.grad((out * weights).sum(), list(given.values())) for out in (o, wanted))
    assert max(map(error, *gradients)) < 1e-11


@torch.no_grad()
def test_prefill_in_parts_and_steps() -> None:
    given, state = operands(2, 100), some_state(2)
    wanted, wanted_last = by_tokens(**given, state=state)
    outputs = []
    for start, end in ((0, 70), (70, 90)):
        part = {name: t[:, start:end] for name, t in given.items()}
        o, state = ops.gated_delta_rule(**part, initial_state=state)
        outputs.append(o)
    memory = state.clone(memory_format=torch.contiguous_format)
    address = memory.data_ptr()
    for t in range(90, 100):
        outputs.append(ops.gated_delta_rule_step(**{n: x[:, t : t + 1] for n, x in given.items()}, state=memory))
    assert memory.data_ptr() == address
    assert error(torch.cat(outputs, 1), wanted) < 1e-12 and error(memory, wanted_last) < 1e-12


def tree(nodes: int, seed: int) -> Tensor:
    """ancestors of a random tree whose nodes come after their parents."""
    generator = torch.Generator().manual_seed(seed)
    ancestors = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        ancestors[node] |= ancestors[torch.randint(max(node - 5, 0), node, (), generator=generator)]
    return ancestors


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 200.0], ids=["usual decays", "strong decays"])
@pytest.mark.parametrize("own", [False, True], ids=["one tree", "a tree for each sequence"])
@pytest.mark.parametrize("nodes", [1, 2, 9, 71])
def test_each_node_of_a_tree_is_its_path_run_alone(nodes: int, own: bool, scale: float) -> None:
    given, state = operands(2, nodes), some_state(2)
    given["g"] = scale * given["g"]
    trees = torch.stack([tree(nodes, 1), tree(nodes, 2 if own else 1)])
    ancestors = trees if own else trees[0]
    kept = state.clone()
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    assert torch.equal(state, kept) and updates.decay.shape == (2, nodes, HEADS, K)
    for node in range(nodes):
        committed, chosen = state.clone(), torch.tensor([node, nodes - 1 - node])
        ops.commit_tree(committed, updates, chosen, ancestors)
        for row, own_node in enumerate(chosen.tolist()):
            path = trees[row, own_node].nonzero().flatten()
            alone = {name: t[row : row + 1, path] for name, t in given.items()}
            wanted, last = by_tokens(**alone, state=state[row : row + 1])
            assert error(o[row, own_node], wanted[0, -1]) < 1e-11
            assert error(committed[row], last[0]) < 1e-11


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.kernels
@torch.no_grad()
def test_kernels() -> None:
    """Of chunks, a step, a tree and its commit (their own tests: test_op_delta_chunks and test_op_delta_decoding)."""
    shapes = {"q": (2, 16), "k": (2, 16), "v": (4, 16), "g": (4, 16), "beta": (4,)}
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {n: torch.randn(1, 9, *shape, generator=generator).to(device) for n, shape in shapes.items()}
    given |= {"g": -given["g"].exp(), "beta": given["beta"].sigmoid()}
    exact = {name: t.double() for name, t in given.items()}
    state = torch.randn(1, 4, 16, 16, generator=generator).to(device)
    wanted, last = by_tokens(**exact, state=state.double())
    o, found = ops.gated_delta_rule(**given, initial_state=state)
    assert error(o, wanted) < 1e-5 and error(found, last) < 1e-5
    line = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    branched, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=line)
    committed, stepped = state.clone(), state.clone()
    ops.commit_tree(committed, updates, torch.tensor([8], device=device), line)
    assert error(branched, wanted) < 1e-5 and error(committed, last) < 1e-5
    first = ops.gated_delta_rule_step(**{name: t[:, :1] for name, t in given.items()}, state=stepped)
    assert error(first, wanted[:, :1]) < 1e-5


def test_refusals() -> None:
    given = operands(1, 3)
    with pytest.raises(BackendError, match="gated_delta_rule: backend 'fla' cannot serve this call"):
        ops.gated_delta_rule(**given, backend="fla")
    request = fla.DeltaRequest("cuda", torch.bfloat16, 64, packed=False, continued=False, compiling=False)
    assert "each key channel" in str(fla.refuses(request._replace(by_channel=True)))
    with pytest.raises(InputError, match="gated_delta_rule: g must be"):
        ops.gated_delta_rule(**{**given, "g": given["g"][..., :1]})
    with pytest.raises(InputError, match="gated_delta_rule: g must be"):
        ops.gated_delta_rule(**{**given, "g": given["g"][..., None]})
