"""The gated delta rule and the convolution before it, against loops over tokens: texts, packed documents, trees."""

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_loop import GROUPS, HEADS, K, V, by_tokens, operands, some_state
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError, InputError
from ligermodels.ops.linear_attention import fla


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


# -- flash-linear-attention --------------------------------------------------------------------------------------------


def as_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None, output_final_state: bool,
    use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What its documentation says of these options, by the loop over tokens: a state for each document."""
    assert use_qk_l2norm_in_kernel and g.dtype == beta.dtype == torch.float32
    assert initial_state is None or cu_seqlens is None
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for start, end in pairwise(bounds):
        state = torch.zeros(q.shape[0], HEADS, K, V) if initial_state is None else initial_state
        if start < end:
            o, state = by_tokens(*(t[:, start:end].float() for t in (q, k, v, g, beta)), state=state)
            outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1).to(q.dtype), torch.cat(states) if output_final_state else None


@pytest.mark.parametrize("lengths", [None, [4, 0, 5, 0]])
def test_how_fla_is_called(monkeypatch: pytest.MonkeyPatch, lengths: list[int] | None) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=as_fla))
    given = operands(1, 9, torch.bfloat16)
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    state = some_state(1) if lengths is None else None
    o, last = fla.run(*given.values(), state, bounds, True)
    wanted, wanted_last = ops.gated_delta_rule(**given, initial_state=state, cu_seqlens=bounds)
    assert o.dtype == torch.bfloat16 and close(o.double(), wanted.double(), 1e-2)
    assert last.shape == wanted_last.shape and close(last, wanted_last, 1e-5)
    assert fla.run(*given.values(), state, bounds, False)[1].numel() == 0


def test_fla_sees_bounds_that_were_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def rule(*operands: Tensor, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.append(cu_seqlens)
        return operands[2], None

    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=rule))
    x, bounds = torch.zeros(1, 6, 1, 2), torch.tensor([0, 2, 6], dtype=torch.int32)
    for _ in range(2):  # two layers of a model
        fla.run(x, x, x, x[..., 0], x[..., 0], None, bounds, False)
    bounds.copy_(torch.tensor([0, 5, 6]))
    fla.run(x, x, x, x[..., 0], x[..., 0], None, bounds, False)
    assert seen[0] is seen[1] and seen[2] is not seen[0]
    assert [each.tolist() for each in seen[1:]] == [[0, 2, 6], [0, 5, 6]]


def test_which_calls_fla_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    request = fla.DeltaRequest("cuda", torch.bfloat16, 128, packed=True, continued=False, compiling=False)
    for change, reason in (
        ({"device": "cpu"}, "on CUDA, not on cpu"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"key_dim": 257}, "more than 256"),
        ({"continued": True}, "after an initial state"),
        ({"compiling": True}, "torch.compile"),
        ({"recording": True}, "a CUDA graph would keep those of the first call"),
        ({"gradient": True}, "gradients are wrong on Hopper"),
    ):
        monkeypatch.setattr(fla, "_wrong_gradients", lambda: True)
        assert reason in str(fla.refuses(request._replace(**change)))
    refusal = fla.refuses(request)
    assert refusal is None if fla.installed() else "fla-core 0.6 or later is not installed" in str(refusal)


def test_backends_by_name() -> None:
    given = operands(1, 3)
    with pytest.raises(BackendError, match="'fla' cannot serve this call: it runs on CUDA, not on cpu"):
        ops.gated_delta_rule(**given, backend="fla")
    with pytest.raises(BackendError, match="'flash' is unknown; there are: auto, triton, fla, reference"):
        ops.gated_delta_rule(**given, backend="flash")
    assert torch.equal(ops.gated_delta_rule(**given, backend="reference")[0], ops.gated_delta_rule(**given)[0])
    assert ops.gated_delta_rule(**given, final_state=False)[1].numel() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not fla.installed(), reason="needs fla-core")
@pytest.mark.parametrize("lengths", [[300], [70, 1, 0, 129, 100]])
def test_fla_is_the_reference(lengths: list[int]) -> None:
    """Outputs, the last state and all gradients, up to what 16 bit operands allow; grouped heads."""
    tokens, packed = sum(lengths), len(lengths) > 1
    shapes = {"q": (2, 64), "k": (2, 64), "v": (4, 128), "g": (4,), "beta": (4,)}
    given = {name: torch.randn(1, tokens, *shape, device="cuda") for name, shape in shapes.items()}
    given |= {"g": -given["g"].exp() / 20, "beta": given["beta"].sigmoid()}
    given = {n: (t.bfloat16() if n in "qkv" else t).requires_grad_() for n, t in given.items()}
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int() if packed else None
    state = None if packed else torch.randn(1, 4, 64, 128, device="cuda")
    found = []
    for backend in ("reference", "fla"):
        try:
            o, last = ops.gated_delta_rule(**given, initial_state=state, cu_seqlens=bounds, backend=backend)
        except BackendError as refusal:
            pytest.skip(str(refusal))
        loss = (o.float().square().sum() + last.square().sum()) / 100
        found.append([o, last, *torch.autograd.grad(loss, list(given.values()))])
    for name, wanted, ours in zip(("o", "state", *given), *found, strict=True):
        error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < 2e-2, f"{name}: {error}"


def test_a_state_alone_that_needs_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla is asked for gradients, which it refuses where they are wrong."""
    requests: list[fla.DeltaRequest] = []
    monkeypatch.setattr(fla, "refuses", lambda request: str(requests.append(request)))
    for need in (True, False):
        with pytest.raises(BackendError):
            state = some_state(2).requires_grad_(need)
            ops.gated_delta_rule(**operands(2, 3), initial_state=state, backend="fla")
    assert [request.gradient for request in requests] == [True, False]
