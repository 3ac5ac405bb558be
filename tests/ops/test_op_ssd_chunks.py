"""The kernels of Mamba2 over sequences against its recurrence in float64: texts, packed documents, all gradients.

Errors are compared as those of the gated delta rule, see `test_op_delta_chunks`.
"""

from typing import Any, NamedTuple

import pytest
import torch
from conftest import Where
from test_op_delta_chunks import assert_right
from torch import Tensor

from ligermodels import ops
from ligermodels.ops.linear_attention import delta_chunks, ssd_chunks

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")


class Sizes(NamedTuple):
    batch: int
    tokens: int
    groups: int
    heads: int
    state: int
    width: int


def operands(sizes: Sizes, where: Where, step: float = 0.1) -> dict[str, Tensor]:
    """x, B and C are slices of one row, as the convolution gives them."""
    b, t, groups, heads, state, width = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where.device)

    rows = normal(b, t, 2 * groups * state + heads * width).to(where.dtype)
    x, B, C = rows.split([heads * width, groups * state, groups * state], dim=-1)
    return {
        "x": x.unflatten(-1, (heads, width)), "dt": step * normal(b, t, heads).exp(), "A": -normal(heads).exp(),
        "B": B.unflatten(-1, (groups, state)), "C": C.unflatten(-1, (groups, state)), "D": normal(heads),
        "initial_state": normal(b, heads, state, width),
    }  # fmt: skip


def run(
    given: dict[str, Tensor], backend: Any, dtype: torch.dtype | None = None, bounds: Tensor | None = None,
    needs: tuple[str, ...] = NAMES,
) -> dict[str, Tensor]:  # fmt: skip
    """y, the last state and the gradients of `needs`, for random gradients of both; computed in `dtype`."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_(name in needs) for name, x in given.items()}
    with ops.set_backend(backend):
        y, state = ops.ssd(**leaves, cu_seqlens=bounds)
    generator = torch.Generator(y.device).manual_seed(7)
    dy = torch.randn(y.shape[::-1], generator=generator, device=y.device).to(given["x"].dtype).permute(3, 2, 1, 0)
    dstate = torch.randn(state.shape, generator=generator, device=y.device)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    outputs = [(o, d.to(o.dtype)) for o, d in ((y, dy), (state, dstate)) if o.requires_grad]
    gradients = torch.autograd.grad([o for o, _ in outputs], wanted, [d for _, d in outputs], allow_unused=True)
    found = dict(zip([name for name in leaves if name in needs], gradients, strict=True))
    return {"y": y.detach(), "state": state.detach(), **found}


CASES = {
    "one token": (Sizes(2, 1, 1, 2, 16, 16), None),
    "a chunk": (Sizes(1, 64, 1, 1, 16, 16), None),
    "odd sizes, three heads a group": (Sizes(2, 67, 2, 6, 16, 7), None),
    "slices of a group": (Sizes(1, 3, 1, 18, 16, 5), None),
    "blocks of values": (Sizes(1, 66, 1, 2, 16, 70), None),
    "blocks of the state": (Sizes(1, 70, 1, 1, 48, 16), None),
    "parts of the state": (Sizes(1, 70, 2, 4, 272, 16), None),
    "parts, packed": (Sizes(1, 140, 1, 2, 144, 16), [13, 1, 126]),
    "packed": (Sizes(1, 140, 1, 2, 16, 16), [13, 1, 50, 0, 64, 10, 2]),
    "ends at chunks": (Sizes(1, 128, 1, 1, 16, 16), [0, 64, 63, 1, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_recurrence(where: Where, case: str) -> None:
    if where.place == "reference":
        pytest.skip("its own tests have it")
    sizes, lengths = CASES[case]
    bounds = None if lengths is None else torch.tensor([0, *lengths], device=where.device).cumsum(0).int()
    given = operands(sizes, where)
    if refusal := delta_chunks.refuses(given["C"], in_parts=True):
        pytest.skip(refusal)
    assert_right(given, bounds, run)


@pytest.mark.kernels
@pytest.mark.parametrize("lengths", [[650], [30, 130, 448, 42]], ids=["a text", "packed"])
def test_segments_are_computed_side_by_side(
    kernels_device: torch.device, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In segments of three chunks and a last one of two, and in one segment."""
    given = operands(Sizes(1, 650, 1, 2, 16, 16), Where(kernels_device, torch.float32), step=0.02)
    bounds = torch.tensor([0, *lengths], device=kernels_device).cumsum(0).int()
    counts: list[int] = []
    segments = delta_chunks.Launch.segments

    def counted(*args: Any, **options: Any) -> Any:
        counts.append((found := segments(*args, **options))[0])
        return found

    monkeypatch.setattr(delta_chunks.Launch, "segments", counted)
    for programs, count in ((1000, 4), (0, 1)):
        monkeypatch.setattr(delta_chunks, "PROGRAMS", programs)
        assert_right(given, bounds, run)
        assert set(counts) == {count}
        counts.clear()


@pytest.mark.kernels
@pytest.mark.parametrize("rate", [0.0, -1e-4, -80.0])
def test_extreme_decays(kernels_device: torch.device, rate: float) -> None:
    """A state that is kept, or gone at once."""
    given = operands(Sizes(1, 140, 1, 2, 16, 16), Where(kernels_device, torch.float32), step=1.0)
    given["A"] = torch.full_like(given["A"], rate)
    found, truth = run(given, "triton"), run(given, "reference", torch.float64)
    for name, true in truth.items():
        size = max(true.norm().item(), 1e-3 * truth["y"].norm().item())
        assert (found[name].double() - true).norm().item() <= 2e-5 * size, name


@pytest.mark.kernels
def test_documents_do_not_meet(kernels_device: torch.device) -> None:
    """Decays in one document do not round those of the next, and no gradient crosses a bound."""
    given = operands(Sizes(1, 133, 1, 1, 16, 16), Where(kernels_device, torch.float32))
    given["A"][:] = -1
    given["dt"][:, :30] *= 1e6
    bounds = torch.tensor([0, 30, 130, 133], device=kernels_device, dtype=torch.int32)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    y = ops.ssd(**leaves, cu_seqlens=bounds)[0]
    alone = ops.ssd(**{n: x[:, 30:130] if n in ("x", "dt", "B", "C") else x for n, x in list(given.items())[:6]})[0]
    assert (y[:, 30:130] - alone).norm() <= 1e-6 * alone.norm()
    gradients = dict(zip(leaves, torch.autograd.grad(y[:, 130:].sum(), list(leaves.values())), strict=True))
    assert not gradients["initial_state"].any()
    assert not any(gradients[name][:, :130].any() for name in ("x", "dt", "B", "C"))


@pytest.mark.kernels
def test_frozen_operands(kernels_device: torch.device) -> None:
    """Every operand alone, and all but one: the same bits as with all."""
    given = operands(Sizes(1, 5, 1, 2, 16, 16), Where(kernels_device, torch.float32))
    every = run(given, "triton")
    for name in NAMES:
        for needs in ((name,), tuple(other for other in NAMES if other != name)):
            for what, found in run(given, "triton", needs=needs).items():
                assert torch.equal(found, every[what]), (needs, what)


@pytest.mark.kernels
def test_only_needed_kernels_run(kernels_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(Sizes(1, 5, 1, 2, 16, 16), Where(kernels_device, torch.float32))
    launched: list[str] = []
    for owner, names in (
        (delta_chunks.Launch, ("states_backward", "within_chunks", "with_states", "finish")),
        (ssd_chunks, ("_values", "_groups")),
    ):
        for name in names:
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, real=real, name=name: (launched.append(name), real(*a))[1])
    rest = ["within_chunks", "with_states", "finish"]
    for needs, wanted in (
        (("x",), ["states_backward", "_values"]),
        (("D",), ["_groups"]),
        (("initial_state",), ["states_backward"]),
        (("C",), ["states_backward", "_groups", *rest]),
        (NAMES, ["states_backward", "_values", "_groups", *rest]),
    ):
        launched.clear()
        run(given, "triton", needs=needs)
        assert launched == wanted, needs


@pytest.mark.kernels
def test_parts_of_the_gradient(kernels_device: torch.device) -> None:
    """Of the outputs alone, of the state alone; without D and an initial state; no second derivatives."""
    given = operands(Sizes(1, 70, 1, 2, 16, 16), Where(kernels_device, torch.float32))
    for names in (NAMES, NAMES[:5]):
        for output in (0, 1):
            found = []
            for backend in ("triton", "reference"):
                leaves = [given[name].detach().requires_grad_() for name in names]
                with ops.set_backend(backend):
                    outputs = ops.ssd(**dict(zip(names, leaves, strict=True)))
                found.append(torch.autograd.grad(outputs[output].square().sum(), leaves, materialize_grads=True))
            for name, ours, wanted in zip(names, *found, strict=True):
                assert (ours - wanted).norm() <= 1e-5 * wanted.norm(), (output, name)
    y, state = ops.ssd(**given, final_state=False)
    assert state.numel() == 0 and torch.equal(y, ops.ssd(**given)[0])
    for size in (given["B"].shape[-1], delta_chunks.MAX_KEY_DIM + 16):
        sizes = Sizes(1, 3, 1, 1, size, 16)
        rows = operands(sizes, Where(kernels_device, torch.float32))
        empty = {name: (x[:0] if x.dim() > 1 else x).detach().requires_grad_() for name, x in rows.items()}
        y, state = ops.ssd(**empty)
        assert state.shape == empty["initial_state"].shape
        gradients = torch.autograd.grad(y.sum() + state.sum(), list(empty.values()))
        assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients, empty.values(), strict=True))
    given["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(ops.ssd(**given)[0].square().sum(), given["x"], create_graph=True)


@pytest.mark.kernels
def test_which_calls_they_serve(kernels_device: torch.device) -> None:
    """float64 is computed by the reference."""
    given = operands(Sizes(1, 3, 1, 1, 16, 16), Where(kernels_device, torch.float32))
    given = {name: x.double() for name, x in given.items()}
    found, wanted = (run(given, backend) for backend in ("triton", "reference"))
    assert all(torch.equal(found[name], wanted[name]) for name in found)


# -- at the sizes of models --------------------------------------------------------------------------------------------

LARGE = {
    "Granite 4.0 Tiny": (Sizes(1, 2085, 1, 48, 128, 64), None),
    "Falcon-H1": (Sizes(1, 1029, 1, 48, 256, 64), None),
    "several rows": (Sizes(3, 700, 2, 36, 128, 64), None),
    "packed": (Sizes(1, 1500, 1, 12, 128, 64), [700, 1, 63, 64, 0, 500, 172]),
    "one chunk": (Sizes(1, 50, 2, 4, 128, 64), None),
    "a token a row": (Sizes(2, 1, 2, 4, 128, 64), None),
    "narrow state": (Sizes(1, 300, 1, 2, 64, 256), None),
    "no powers of two": (Sizes(2, 200, 1, 2, 112, 40), None),
}


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE)
def test_large(case: str, dtype: torch.dtype) -> None:
    sizes, lengths = LARGE[case]
    bounds = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    given = operands(sizes, Where(torch.device("cuda"), dtype), step=0.02)
    if refusal := delta_chunks.refuses(given["C"], in_parts=True):
        pytest.skip(refusal)
    assert_right(given, bounds, run)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("name", delta_chunks.TILES)
@pytest.mark.parametrize("change", [{"STAGES": 1}, {"STAGES": 2}, {"num_warps": 4}, {"num_warps": 8}])
def test_other_launches_compute_the_same(monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, int]) -> None:
    """A kernel that the compiler got wrong shows by how it differs from its other form."""
    tiles = delta_chunks.TILES[name]
    if not set(change) <= set(tiles) or change.items() <= tiles.items():
        pytest.skip("nothing to change")
    if name.startswith("states") and change == {"STAGES": 1}:
        pytest.skip("ptxas makes wrong code of it, and no call launches it; see MIN_WIDTH")
    given = operands(Sizes(1, 700, 1, 20, 128, 64), Where(torch.device("cuda"), torch.bfloat16), step=0.02)
    wanted = run(given, "triton")
    monkeypatch.setitem(delta_chunks.TILES, name, {**tiles, **change})
    for what, found in run(given, "triton").items():
        difference = (found.double() - wanted[what].double()).norm() / wanted[what].double().norm()
        assert difference < (2e-3 if found.dtype == torch.bfloat16 else 1e-5), what


@pytest.mark.gpu
@pytest.mark.kernels
def test_in_a_graph_without_waits() -> None:
    given = operands(Sizes(1, 300, 2, 4, 128, 64), Where(torch.device("cuda"), torch.bfloat16))
    bounds = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    wanted = run(given, None, bounds=bounds)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    dy, dstate = torch.ones_like(wanted["y"]), torch.ones_like(wanted["state"])

    def both() -> list[Tensor]:
        y, state = ops.ssd(**leaves, cu_seqlens=bounds)
        return [y, state, *torch.autograd.grad([y, state], list(leaves.values()), [dy, dstate])]

    wanted_tensors = [x.detach().clone() for x in both()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    graph.replay()
    assert all(torch.equal(a.detach(), b) for a, b in zip(found, wanted_tensors, strict=True))
