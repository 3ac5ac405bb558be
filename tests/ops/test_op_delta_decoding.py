"""Decoding by Gated DeltaNet and Kimi Delta Attention: a token or a tree of tokens of each sequence, and the states
that they change."""

from functools import partial
from typing import Any

import pytest
import torch
from conftest import Where
from op_harness import assert_as_good, contiguous, copies, middle_transposed, strided_rows
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.linear_attention.delta_tree import MAX_NODES

SHAPES = [  # sequences, nodes, groups, heads, K, V
    (1, 1, 1, 1, 16, 16),
    (2, 5, 2, 6, 5, 7),
    (3, 17, 2, 4, 24, 40),
    (1, 64, 1, 2, 32, 70),
    (1, 9, 2, 2, 100, 33),
]
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
"""Of products of float32."""
CHUNKS = {**ROUNDING, torch.bfloat16: 2e-3}
"""Of products in chunks, whose operands are bfloat16 for bfloat16 on a GPU."""
BY_CHANNEL = pytest.mark.parametrize("by_channel", [False, True], ids=["one decay", "by channel"])


def tree(nodes: int, where: torch.device, chain: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """parent, depth and ancestors of a random tree whose nodes come after their parents."""
    generator = torch.Generator().manual_seed(nodes)
    parent, ancestors = torch.zeros(nodes, dtype=torch.long), torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent[node] = node - 1 if chain else torch.randint(max(node - 5, 0), node, (), generator=generator)
        ancestors[node] |= ancestors[parent[node]]
    return parent.to(where), (ancestors.sum(1) - 1).to(where), ancestors.to(where)


def operands(
    where: Where, shape: tuple[int, ...], nodes: int | None = None, by_channel: bool = False
) -> dict[str, Tensor]:
    """Decays from nearly none to nearly all."""
    batch, tokens, groups, heads, key_dim, width = shape
    tokens = tokens if nodes is None else nodes

    def normal(*size: int) -> Tensor:
        return torch.randn(batch, tokens, *size, device=where.device).to(where.dtype)

    return {
        "q": strided_rows(normal(groups, key_dim)),
        "k": middle_transposed(normal(groups, key_dim)),
        "v": strided_rows(normal(heads, width)),
        "g": -normal(heads, *[key_dim] * by_channel).float().mul(2).exp(),
        "beta": contiguous(normal(heads).float().sigmoid()),
    }


def a_state(where: Where, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape[0], *shape[3:], device=where.device)


def double(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(given, copies(list(given.values()), torch.float64), strict=True))


def eager(given: dict[str, Tensor], state: Tensor, ancestors: Tensor, node: Tensor) -> tuple[Tensor, ...]:
    """The reference in the dtypes of what it is given."""
    o, updates = ops.gated_delta_rule_tree_reference(**given, initial_state=state, ancestors=ancestors)
    return o, *updates, ops.tree_state(state, updates, node, ancestors)


@torch.no_grad()
@BY_CHANNEL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees(where: Where, shape: tuple[int, ...], by_channel: bool) -> None:
    """Outputs, updates and the state after a node, against fp64; on a GPU, equal bits in a second run."""
    given, state = operands(where, shape, by_channel=by_channel), a_state(where, shape)
    _, _, ancestors = tree(shape[1], where.device)
    node = torch.randint(shape[1], (shape[0],), device=where.device)
    before = state.clone()
    runs = []
    for _ in range(2 if state.is_cuda else 1):
        o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
        assert torch.equal(state, before)
        after = state.clone()
        ops.commit_tree(after, updates, node, ancestors)
        runs.append((o, *updates, after))
    truth = eager(double(given), state.double(), ancestors, node)
    plain = eager(dict(zip(given, copies(list(given.values())), strict=True)), state, ancestors, node)
    assert runs[0][0].dtype == where.dtype and runs[0][1].dtype == torch.float64
    for i, (ours, again, other, true) in enumerate(zip(runs[0], runs[-1], plain, truth, strict=True)):
        assert torch.equal(ours, again)
        assert_as_good(f"result {i}", ours, other, true)


@torch.no_grad()
@BY_CHANNEL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps(where: Where, shape: tuple[int, ...], by_channel: bool) -> None:
    """Several in a row, in place, against fp64."""
    state = a_state(where, shape)
    exact, other, address = state.double(), state.clone(), state.data_ptr()
    for _ in range(3):
        given = operands(where, shape, 1, by_channel)
        o = ops.gated_delta_rule_step(**given, state=state)
        true = ops.gated_delta_rule_step_reference(**double(given), state=exact)
        plain = ops.gated_delta_rule_step_reference(**given, state=other)
        assert o.dtype == where.dtype and o.is_contiguous()
        assert_as_good("o", o, plain, true)
        assert_as_good("state", state, other, exact)
    assert state.data_ptr() == address


@torch.no_grad()
@BY_CHANNEL
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
@pytest.mark.parametrize(("nodes", "activation"), [(2, "silu"), (19, "silu"), (6, None)])
def test_each_node_of_a_tree_is_its_path_in_steps(
    where: Where, nodes: int, activation: str | None, chain: bool, by_channel: bool
) -> None:
    """Also after it is committed, and for the convolution and its inputs; a chain has paths of every length."""
    shape = (2, nodes, 2, 4, 16, 12)
    given, state = operands(where, shape, by_channel=by_channel), a_state(where, shape)
    given["g"] = given["g"] / 20  # states that last
    parent, depth, ancestors = tree(nodes, where.device, chain)
    x = strided_rows(torch.randn(2, nodes, 37, device=where.device).to(where.dtype))
    weight = torch.randn(37, 4, device=where.device).to(where.dtype)
    earlier = torch.randn(2, 3, 37, device=where.device).to(where.dtype)
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    y = ops.causal_conv(x, weight, earlier=earlier, tree=(parent, depth), activation=activation)
    close: Any = {"rtol": 1e-5 if where.dtype == torch.float32 else 1e-2, "atol": 2e-5}
    if where.dtype != torch.float32:
        close["atol"] = 4e-3
    left = dict[int, tuple[Tensor, Tensor]]()  # the state and the inputs after the steps to a node
    for node in range(nodes):
        stepped, inputs = (t.clone() for t in (left[int(parent[node])] if node else (state, earlier)))
        alone = ops.gated_delta_rule_step(**{n: t[:, node : node + 1] for n, t in given.items()}, state=stepped)
        convolved = ops.causal_conv_step(x[:, node : node + 1], weight, inputs, activation=activation)
        left[node] = stepped, inputs
        torch.testing.assert_close(o[:, node], alone[:, 0], **close)
        torch.testing.assert_close(y[:, node], convolved[:, 0], **close)
        after, kept = state.clone(), earlier.clone()
        chosen = torch.tensor([node, 0], device=where.device)  # the other sequence keeps the root alone
        ops.commit_tree(after, updates, chosen, ancestors)
        ops.commit_conv_inputs(kept, x, chosen, (parent, depth))
        torch.testing.assert_close(after[0], stepped[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(kept[0], inputs[0])
        assert torch.equal(kept[1], torch.cat([earlier[1], x[1, :1]])[1:])


@torch.no_grad()
@BY_CHANNEL
@pytest.mark.parametrize("decay", [0.0, -80.0, -3e37])
def test_long_chains_of_equal_keys(where: Where, decay: float, by_channel: bool) -> None:
    """As many levels as nodes: what is not solved yet grows to 2^63, and none of it stays. Decays go to nothing, and
    their sums beyond float32."""
    shape = (1, MAX_NODES, 1, 1, 16, 16)
    given, state = operands(where, shape, by_channel=by_channel), a_state(where, shape)
    given |= {"g": torch.full_like(given["g"], decay), "beta": torch.ones_like(given["beta"])}
    given["k"] = given["k"][:, :1].expand_as(given["k"])
    _, _, ancestors = tree(MAX_NODES, where.device, chain=True)
    node = torch.tensor([MAX_NODES - 1], device=where.device)
    truth = eager(double(given), state.double(), ancestors, node)
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    ops.commit_tree(state, updates, node, ancestors)
    for ours, true in ((o, truth[0]), (state, truth[-1])):
        limit = max(1e-5, torch.finfo(ours.dtype).eps) * float(true.abs().max())
        assert float((ours.double() - true).abs().max()) < limit


@torch.no_grad()
@pytest.mark.parametrize("nodes", [20, MAX_NODES])
def test_channels_of_any_decays(where: Where, nodes: int) -> None:
    """In a node none, a little or all of a channel decays: differences of sums are small compared to the sums, and
    exp(-G) overflows."""
    shape = (2, nodes, 2, 2, 40, 24)
    given, state = operands(where, shape, by_channel=True), a_state(where, shape)
    levels = torch.tensor([0.0, 0.0, -1e-3, -0.3, -2.0, -80.0, -3e4], device=where.device)
    given["g"] = levels[torch.randint(len(levels), given["g"].shape, device=where.device)]
    _, _, ancestors = tree(nodes, where.device)
    node = torch.tensor([nodes - 1, nodes // 2], device=where.device)
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    after = state.clone()
    ops.commit_tree(after, updates, node, ancestors)
    truth = eager(double(given), state.double(), ancestors, node)
    plain = eager(dict(zip(given, copies(list(given.values())), strict=True)), state, ancestors, node)
    for i, (ours, other, true) in enumerate(zip((o, *updates, after), plain, truth, strict=True)):
        assert_as_good(f"result {i}", ours, other, true)


@pytest.mark.gpu
@pytest.mark.kernels
@torch.no_grad()
def test_a_cuda_graph() -> None:
    """The tree and the commit with a decay for each key channel read new operands in each replay, without a sync."""
    shape = (2, 24, 2, 4, 64, 48)
    where = Where(torch.device("cuda"), torch.bfloat16, "cuda")
    given, state = operands(where, shape, by_channel=True), a_state(where, shape)
    _, _, ancestors = tree(shape[1], where.device)
    node = torch.tensor([3, 20], device="cuda")

    def run() -> tuple[Tensor, ...]:
        o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
        after = state.clone()
        ops.commit_tree(after, updates, node, ancestors)
        return o, after

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for name, more in operands(where, shape, by_channel=True).items():
        given[name].copy_(more)
    state += 1
    node.copy_(torch.tensor([23, 0], device="cuda"))
    graph.replay()
    for ours, wanted in zip(found, run(), strict=True):
        assert torch.equal(ours, wanted)


@torch.no_grad()
@BY_CHANNEL
@pytest.mark.parametrize("nodes", [MAX_NODES + 1, 3])
def test_what_the_kernels_do_not_hold_goes_to_the_reference(where: Where, nodes: int, by_channel: bool) -> None:
    shape = (1, nodes, 1, 1, 260 if nodes == 3 else 4, 5)
    given, state = operands(where, shape, by_channel=by_channel), a_state(where, shape)
    _, _, ancestors = tree(nodes, where.device)
    node = torch.tensor([nodes - 1], device=where.device)
    o, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    wanted = eager(given, state, ancestors, node)
    ops.commit_tree(state, updates, node, ancestors)
    torch.testing.assert_close(o, wanted[0])
    torch.testing.assert_close(state, wanted[-1])


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("activation", ["silu", None])
def test_steps_of_the_convolution(where: Where, width: int, activation: str | None) -> None:
    reference = partial(ops.causal_conv_reference, activation=activation)
    weight = torch.randn(300, width, device=where.device).to(where.dtype)
    texts = torch.randn(2, 5 + width - 1, 300, device=where.device).to(where.dtype)
    inputs, rest = texts[:, : width - 1].contiguous(), texts[:, width - 1 :]
    steps = [ops.causal_conv_step(rest[:, t : t + 1], weight, inputs, activation=activation) for t in range(5)]
    found, wanted = torch.cat(steps, dim=1), reference(rest, weight, earlier=texts[:, : width - 1])
    exact = reference(rest.double(), weight.double(), earlier=texts[:, : width - 1].double())
    assert_as_good("y", found, wanted, exact)
    assert torch.equal(inputs, texts[:, 5:])


@pytest.mark.kernels
@torch.no_grad()
def test_registration(kernels_device: torch.device) -> None:
    where = Where(kernels_device, torch.float32)
    shape = (2, 3, 1, 2, 8, 8)
    given, state = operands(where, shape), a_state(where, shape)
    parent, depth, ancestors = tree(3, kernels_device)
    node = torch.tensor([1, 2], device=kernels_device)
    one = {name: t[:, :1].contiguous() for name, t in given.items()}
    wide = {**given, "g": given["g"][..., None].expand(-1, -1, -1, 8).contiguous()}
    x, weight = torch.randn(2, 3, 9, device=kernels_device), torch.randn(9, 4, device=kernels_device)
    earlier = torch.randn(2, 3, 9, device=kernels_device)
    _, updates = ops.gated_delta_rule_tree(**given, state=state, ancestors=ancestors)
    _, wide_updates = ops.gated_delta_rule_tree(**wide, state=state, ancestors=ancestors)
    q, k, v, g, beta = given.values()
    of_mamba, skip = (v, beta, g, k, q), torch.ones(2, device=kernels_device)
    for case, arguments in {
        "ssd_step": (*(t[:, :1].contiguous() for t in of_mamba), skip, state),
        "ssd_tree": (*of_mamba, None, state, ancestors),
        "ssd_chunks_forward": (*of_mamba, skip, state, None, True, torch.float32),
        "gated_delta_rule_step": (*one.values(), state),
        "gated_delta_rule_tree": (*given.values(), state, ancestors),
        "gated_delta_rule_tree, by channel": (*wide.values(), state, ancestors),
        "commit_tree": (state, *updates, node, ancestors),
        "commit_tree, by channel": (state, *wide_updates, node, ancestors),
        "causal_conv_step": (x[:, :1].contiguous(), weight, earlier, weight[:, 0].contiguous(), True),
        "causal_conv_tree": (x, weight, weight[:, 0].contiguous(), earlier, parent, depth, True),
        "commit_conv_inputs": (earlier, x, node, parent, depth),
    }.items():
        op = getattr(torch.ops.ligermodels, case.partition(",")[0]).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 1, 2, 4)}, "gated_delta_rule_step: k must be"),
        ({"state": torch.zeros(1, 4, 3, 5).double()}, "state must be torch.float32"),
        ({"state": torch.zeros(1, 4, 5, 3).mT}, "state must be contiguous"),
        ({"state": torch.zeros(1, 4, 3, 5, requires_grad=True)}, "has no gradient"),
        (
            {"v": torch.zeros(1, 1, 3, 5), "g": torch.zeros(1, 1, 3), "beta": torch.zeros(1, 1, 3)},
            "a multiple of the heads of q and k",
        ),
    ],
)
def test_bad_operands(change: dict[str, Tensor], message: str) -> None:
    given = {
        "q": torch.zeros(1, 1, 2, 3),
        "k": torch.zeros(1, 1, 2, 3),
        "v": torch.zeros(1, 1, 4, 5),
        "g": torch.zeros(1, 1, 4),
        "beta": torch.zeros(1, 1, 4),
        "state": torch.zeros(1, 4, 3, 5),
    }
    with pytest.raises(InputError, match=message):
        ops.gated_delta_rule_step(**{**given, **change})
    two = {name: t.expand(-1, 2, *t.shape[2:]) for name, t in given.items() if name != "state"}
    with pytest.raises(InputError, match="q must be"):
        ops.gated_delta_rule_step(**two, state=given["state"])
    with pytest.raises(InputError, match="ancestors must be"):
        ops.gated_delta_rule_tree(**two, state=given["state"], ancestors=torch.ones(3, 3, dtype=torch.bool))


# -- Mamba2, by the same kernels ---------------------------------------------------------------------------------------


def ssd_operands(where: Where, shape: tuple[int, ...], skip: bool, nodes: int | None = None) -> dict[str, Any]:
    """The operands of `ops.ssd`; C, B and x in the place of q, k and v."""
    given = operands(where, shape, nodes)
    dt, heads = given["beta"] * 3, shape[3]
    rates, weights = -torch.rand(heads, device=where.device), torch.randn(heads, device=where.device)
    return {
        "x": given["v"], "dt": dt, "A": rates, "B": given["k"], "C": given["q"], "D": weights if skip else None
    }  # fmt: skip


def widened(given: dict[str, Any]) -> dict[str, Any]:
    return {name: None if t is None else t.double() for name, t in given.items()}


@torch.no_grad()
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ssd_trees_and_steps(where: Where, shape: tuple[int, ...], skip: bool) -> None:
    """Outputs, updates and states against fp64; on a GPU, equal bits in a second run."""
    given, state = ssd_operands(where, shape, skip), a_state(where, shape)
    _, _, ancestors = tree(shape[1], where.device)
    node = torch.randint(shape[1], (shape[0],), device=where.device)

    def results(op: Any, given: dict[str, Any], state: Tensor, commit: bool) -> tuple[Tensor, ...]:
        y, updates = op(*given.values(), state, ancestors)
        after = state.clone() if commit else ops.tree_state(state, updates, node, ancestors)
        if commit:
            ops.commit_tree(after, updates, node, ancestors)
        return y, *updates, after

    truth = results(ops.ssd_tree_reference, widened(given), state.double(), False)
    plain = results(ops.ssd_tree_reference, given, state, False)
    runs = [results(ops.ssd_tree, given, state, True) for _ in range(2 if state.is_cuda else 1)]
    assert runs[0][0].dtype == where.dtype and runs[0][1].dtype == torch.float64
    for i, (ours, again, other, true) in enumerate(zip(runs[0], runs[-1], plain, truth, strict=True)):
        assert torch.equal(ours, again)
        assert_as_good(f"result {i}", ours, other, true)

    exact, other, address = state.double(), state.clone(), state.data_ptr()
    for _ in range(3):
        given = ssd_operands(where, shape, skip, nodes=1)
        y = ops.ssd_step(**given, state=state)
        true = ops.ssd_step_reference(**widened(given), state=exact)
        plain_y = ops.ssd_step_reference(**given, state=other)
        assert y.dtype == where.dtype and y.is_contiguous() and state.data_ptr() == address
        assert_as_good("y", y, plain_y, true)
        assert_as_good("state", state, other, exact)


@torch.no_grad()
@pytest.mark.parametrize("initial", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("lengths", [[1], [64], [65, 3, 0, 70], [200]], ids=str)
def test_ssd_over_texts(where: Where, lengths: list[int], initial: bool) -> None:
    """By the kernels for chunks, where there are such; packed documents end within chunks."""
    shape = (1, sum(lengths), 2, 4, *((40, 70) if initial else (16, 40)))
    given, state = ssd_operands(where, shape, skip=initial), a_state(where, shape)
    given["dt"] = given["dt"] / 20  # states that last
    bounds = torch.tensor([0, *lengths], device=where.device).cumsum(0).int()
    options: Any = {"cu_seqlens": bounds if len(lengths) > 1 else None}

    def results(op: Any, given: dict[str, Any], state: Tensor) -> tuple[Tensor, Tensor]:
        return op(**given, initial_state=state if initial else None, **options)

    runs = [results(ops.ssd, given, state) for _ in range(2 if state.is_cuda else 1)]
    truth = results(ops.ssd_reference, widened(given), state.double())
    plain = results(ops.ssd_reference, given, state)
    assert runs[0][0].dtype == where.dtype and runs[0][1].dtype == torch.float32
    for name, ours, again, other, true in zip(("y", "state"), runs[0], runs[-1], plain, truth, strict=True):
        assert torch.equal(ours, again)
        error, theirs = ((x.double() - true).norm().item() for x in (ours, other))
        assert error <= 1.2 * theirs + CHUNKS[where.dtype] * true.norm().item(), name
    assert ops.ssd(**given, final_state=False)[1].numel() == 0
