"""The chunked kernels of the gated delta rule against the rule in float64: texts, packed documents, all gradients, one
decay for a head or a decay for each key channel.

Errors are within 1.2 times the errors of the reference, which computes in float32, and the rounding of operands of
products, which only bfloat16 has (`delta_chunks_forward`).
"""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Where
from gpus import GPUS
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import BackendError
from ligermodels.ops.linear_attention import delta_channels, delta_chunks

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
BY_CHANNEL = pytest.mark.parametrize("by_channel", [False, True], ids=["one decay", "by channel"])
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 8e-3}


class Sizes(NamedTuple):
    batch: int
    tokens: int
    groups: int
    heads: int
    key_dim: int
    value_dim: int


def operands(sizes: Sizes, where: Where, decay: float = 0.02, *, by_channel: bool = False) -> dict[str, Tensor]:
    """q, k and v are slices of one row, as the convolution gives them."""
    b, t, groups, heads, key_dim, value_dim = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where.device)

    rows = normal(b, t, 2 * groups * key_dim + heads * value_dim).to(where.dtype)
    q, k, v = rows.split([groups * key_dim, groups * key_dim, heads * value_dim], dim=-1)
    g = -decay * normal(b, t, heads, *[key_dim] * by_channel).mul(2).exp()
    return {
        "q": q.unflatten(-1, (groups, key_dim)), "k": k.unflatten(-1, (groups, key_dim)),
        "v": v.unflatten(-1, (heads, value_dim)), "g": g,
        "beta": normal(b, t, heads).sigmoid(), "initial_state": normal(b, heads, key_dim, value_dim),
    }  # fmt: skip


def run(
    given: dict[str, Tensor], backend: str, dtype: torch.dtype | None = None, bounds: Tensor | None = None
) -> dict[str, Tensor]:
    """o, the last state and all gradients, for random gradients of both; computed in `dtype`."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in given.items()}
    o, state = ops.gated_delta_rule(**leaves, cu_seqlens=bounds, backend=backend)
    generator = torch.Generator(o.device).manual_seed(7)
    narrow = given["q"].dtype
    do = torch.randn(o.shape[::-1], generator=generator, device=o.device).to(narrow).permute(3, 2, 1, 0)
    dstate = torch.randn(state.shape, generator=generator, device=o.device)
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [do.to(o.dtype), dstate.to(state.dtype)])
    return {"o": o.detach(), "state": state.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_right(
    given: dict[str, Tensor], bounds: Tensor | None = None, run: Callable[..., dict[str, Tensor]] = run
) -> None:
    """The kernels against float64, with the reference's error as the measure; on a GPU, equal bits in a second run. The
    first of the operands has the dtype of the results."""
    operand = next(iter(given.values()))
    found = run(given, "triton", bounds=bounds)
    again = run(given, "triton", bounds=bounds) if operand.is_cuda else found  # the interpreter has no races
    reference = run(given, "reference", bounds=bounds)
    truth = run(given, "reference", torch.float64, bounds)
    for name, true in truth.items():
        ours, other = found[name], reference[name]
        assert ours.dtype == other.dtype and ours.shape == true.shape, name
        assert torch.equal(ours, again[name]), f"{name}: a second run gave other bits"
        size = true.norm().item()
        error, theirs = ((x.double() - true).norm().item() for x in (ours, other))
        bound = 1.2 * theirs + ROUNDING[operand.dtype] * size
        assert error <= bound, f"{name}: error {error / size:.2e}, reference {theirs / size:.2e}"


CASES = {
    "one token": (Sizes(2, 1, 1, 2, 16, 16), None),
    "a chunk": (Sizes(1, 64, 1, 1, 16, 16), None),
    "odd sizes, three heads a group": (Sizes(1, 67, 2, 6, 10, 7), None),
    "blocks of values": (Sizes(1, 66, 1, 2, 16, 70), None),
    "blocks of keys, two rows": (Sizes(2, 70, 1, 1, 40, 16), None),
    "packed": (Sizes(1, 140, 1, 2, 16, 16), [13, 1, 50, 0, 64, 10, 2]),
    "ends at chunks": (Sizes(1, 128, 1, 1, 16, 16), [0, 64, 63, 1, 0]),
}


@BY_CHANNEL
@pytest.mark.parametrize("case", CASES)
def test_is_the_rule(where: Where, case: str, by_channel: bool) -> None:
    if where.place == "reference":
        pytest.skip("its own tests have it")
    sizes, lengths = CASES[case]
    bounds = None if lengths is None else torch.tensor([0, *lengths], device=where.device).cumsum(0).int()
    given = operands(sizes, where, by_channel=by_channel)
    if refusal := delta_chunks.refuses(given["q"]):
        pytest.skip(refusal)
    assert_right(given, bounds)


@BY_CHANNEL
@pytest.mark.kernels
def test_operands_of_16_bits(kernels_device: torch.device, by_channel: bool) -> None:
    """Only operands of products are rounded, to float16 in the interpreter: gradients of gates are sums of parts that
    cancel."""
    given = operands(Sizes(1, 130, 1, 2, 32, 16), Where(kernels_device, torch.bfloat16), by_channel=by_channel)
    found, truth = run(given, "triton"), run(given, "reference", torch.float64)
    for name in ("g", "beta", "initial_state", "state"):
        bound = ROUNDING[torch.bfloat16] if kernels_device.type == "cuda" else 6.5e-4
        assert (found[name].double() - truth[name]).norm() <= bound * truth[name].norm(), name
    for name in ("o", "q", "k", "v"):
        assert (found[name].double() - truth[name]).norm() <= 8e-3 * truth[name].norm(), name


@BY_CHANNEL
@pytest.mark.kernels
def test_extreme_decays_and_equal_keys(kernels_device: torch.device, by_channel: bool) -> None:
    """A state that is kept, or gone at once, or any of both, each in a head of its own; and triangular systems whose
    powers would overflow."""
    decays = [[0.0], [-1e-4], [-80.0], *[[0.0, -1e-3, -2.0, -80.0, -3e4]] * by_channel]  # the last: for each channel
    sizes = Sizes(1, 140, len(decays), len(decays), 16, 16)
    given = operands(sizes, Where(kernels_device, torch.float32), by_channel=by_channel)
    for head, values in enumerate(decays):
        levels, g = torch.tensor(values, device=kernels_device), given["g"][:, :, head]
        g.copy_(levels[torch.randint(len(levels), g.shape, device=kernels_device)])
    given["k"] = given["k"][:, :1].expand_as(given["k"])
    given["beta"] = torch.ones_like(given["beta"]) * 0.999
    found, truth = run(given, "triton"), run(given, "reference", torch.float64)
    for head, name in product(range(len(decays)), truth):
        ours, true, o = (
            x[:, head] if "state" in label else x[:, :, head]
            for label, x in ((name, found[name].double()), (name, truth[name]), ("o", truth["o"]))
        )
        size = max(true.norm().item(), 1e-3 * o.norm().item())
        assert (ours - true).norm().item() <= 2e-5 * size, (decays[head], name)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strong_decays_of_a_few_tokens(kernels_device: torch.device, dtype: torch.dtype) -> None:
    """Sums of gates are large in these channels, and decays after them are as exact as in the others: for operands of
    16 bits, sums are stored in float32. Three heads of a group, each with its gate; channels that fill no tile, no
    first state."""
    given = operands(Sizes(1, 130, 1, 3, 80, 70), Where(kernels_device, dtype), by_channel=True)
    strong = torch.rand(given["g"].shape, generator=torch.Generator().manual_seed(1)) < 0.1
    gates = torch.tensor([-20.0, -200.0, -1e6], device=kernels_device)[:, None]
    given["g"] = torch.where(strong.to(kernels_device), gates, given["g"] / 50)
    del given["initial_state"]
    bounds = torch.tensor([0, 70, 130], dtype=torch.int32, device=kernels_device)
    found, truth = run(given, "triton", bounds=bounds), run(given, "reference", torch.float64, bounds)
    for name, true in truth.items():
        bound = ROUNDING[dtype] if kernels_device.type == "cuda" or dtype == torch.float32 else 1e-3
        bound = max(bound, 4e-3) if found[name].dtype == torch.bfloat16 else bound
        heads = range(true.shape[2]) if name in ("o", "v", "g", "beta") else [slice(None)]
        for head in heads:
            ours, wanted = found[name].double()[:, :, head], true[:, :, head]
            assert (ours - wanted).norm() <= bound * wanted.norm(), (name, head)


@BY_CHANNEL
@pytest.mark.kernels
def test_a_gate_that_is_not_a_number(kernels_device: torch.device, by_channel: bool) -> None:
    """It is in the outputs from there on, and is no decay."""
    given = operands(Sizes(1, 70, 1, 1, 16, 16), Where(kernels_device, torch.float32), by_channel=by_channel)
    given["g"][:, 3] = torch.nan
    found = run(given, "triton")
    assert found["o"][:, 3:].isnan().all()


@BY_CHANNEL
@pytest.mark.kernels
def test_in_autocast(kernels_device: torch.device, by_channel: bool) -> None:
    """Also of the backward pass: products of the rule are not narrowed."""
    given = operands(Sizes(1, 9, 1, 2, 16, 16), Where(kernels_device, torch.float32), by_channel=by_channel)
    wanted = run(given, "triton")
    with torch.autocast(kernels_device.type, torch.bfloat16):
        found = run(given, "triton")
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


@BY_CHANNEL
@pytest.mark.kernels
def test_documents_do_not_meet(kernels_device: torch.device, by_channel: bool) -> None:
    """Decays in one document do not round those of the next, and no gradient crosses a bound."""
    lengths = [30, 100, 3]
    given = operands(Sizes(1, 133, 1, 1, 16, 16), Where(kernels_device, torch.float32), by_channel=by_channel)
    given["g"][:, :30] *= 1e6
    bounds = torch.tensor([0, *lengths], device=kernels_device).cumsum(0).int()
    together = ops.gated_delta_rule(**given, cu_seqlens=bounds, backend="triton")[0]
    for start, end in pairwise(bounds.tolist()[1:]):
        part = {name: x[:, start:end] for name, x in given.items() if name != "initial_state"}
        alone = ops.gated_delta_rule(**part, backend="triton")[0]
        assert (together[:, start:end] - alone).norm() <= 1e-6 * alone.norm()
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o = ops.gated_delta_rule(**leaves, cu_seqlens=bounds, backend="triton")[0]
    for name, gradient in zip(NAMES, torch.autograd.grad(o[:, 130:].sum(), list(leaves.values())), strict=True):
        assert not (gradient if name == "initial_state" else gradient[:, :130]).any(), name


@BY_CHANNEL
@pytest.mark.kernels
def test_parts_of_the_gradient(kernels_device: torch.device, by_channel: bool) -> None:
    """Of the outputs alone, of the state alone, and of one operand alone."""
    given = operands(Sizes(1, 70, 1, 1, 16, 16), Where(kernels_device, torch.float32), by_channel=by_channel)
    weights = torch.randn(given["v"].shape, device=kernels_device)

    def gradients(backend: str, output: int, *names: str) -> tuple[Tensor, ...]:
        leaves = {name: x.detach().requires_grad_(name in names) for name, x in given.items()}
        found = ops.gated_delta_rule(**leaves, backend=backend)[output]
        loss = (found * weights).sum() if output == 0 else found.square().sum()
        return torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)

    every: tuple[Tensor, ...] = ()
    for output, names in ((1, NAMES[1:]), (0, NAMES)):
        every = gradients("triton", output, *names)
        for name, ours, wanted in zip(names, every, gradients("reference", output, *names), strict=True):
            assert (ours - wanted).norm() <= 1e-5 * wanted.norm(), (output, name)
    for name, wanted in zip(NAMES, every, strict=True):
        (ours,) = gradients("triton", 0, name)
        assert (ours - wanted).norm() <= 1e-6 * wanted.norm(), name
    o, state = ops.gated_delta_rule(**given, final_state=False, backend="triton")
    assert state.numel() == 0 and torch.equal(o, ops.gated_delta_rule(**given, backend="triton")[0])
    with pytest.raises(RuntimeError, match="no second derivatives"):
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        o, _ = ops.gated_delta_rule(**leaves, backend="triton")
        first = torch.autograd.grad(o.square().sum(), leaves["v"], create_graph=True)[0]
        first.sum().backward()


@pytest.mark.kernels
def test_which_calls_they_serve(kernels_device: torch.device) -> None:
    where = Where(kernels_device, torch.float32)
    narrow = operands(Sizes(1, 3, 1, 1, 16, 16), where)
    assert torch.equal(ops.gated_delta_rule(**narrow)[0], ops.gated_delta_rule(**narrow, backend="triton")[0])
    wide = operands(Sizes(1, 3, 1, 1, delta_chunks.MAX_KEY_DIM + 1, 16), where)
    with pytest.raises(BackendError, match="'triton' cannot serve this call: queries and keys of 129 channels"):
        ops.gated_delta_rule(**wide, backend="triton")
    assert torch.equal(ops.gated_delta_rule(**wide)[0], ops.gated_delta_rule(**wide, backend="reference")[0])
    with pytest.raises(BackendError, match="'triton' cannot serve this call: it needs Triton, CUDA tensors"):
        ops.gated_delta_rule(**{name: x.double() for name, x in narrow.items()}, backend="triton")


def test_what_gpus_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in GPUS.values():
        monkeypatch.setattr(delta_chunks, "gpu_of", lambda device, gpu=gpu: gpu)
        served = not gpu.hip and gpu.capability[0] != 10
        for width, dtype, reason in (
            (128, torch.bfloat16, None),
            (129, torch.bfloat16, "129 channels are more than 128"),
            (40, torch.bfloat16, "40 channels: not a multiple of 16"),
            (40, torch.float32, None),
        ):
            found = delta_chunks.refuses(torch.zeros(1, 3, 1, width, dtype=dtype))
            wanted = reason if served else f"do not run on {gpu.name}"
            assert found is None if wanted is None else wanted in str(found)


# -- at the sizes of models --------------------------------------------------------------------------------------------

LARGE = {
    "Qwen3.5-9B": (Sizes(1, 2085, 16, 32, 128, 128), None),
    "several rows": (Sizes(3, 700, 2, 4, 128, 128), None),
    "packed": (Sizes(1, 1500, 4, 12, 128, 128), [700, 1, 63, 64, 0, 500, 172]),
    "one chunk": (Sizes(1, 50, 2, 4, 128, 128), None),
    "a token a row": (Sizes(2, 1, 2, 4, 128, 128), None),
    "narrow keys": (Sizes(1, 300, 1, 2, 64, 256), None),
    "narrow": (Sizes(1, 300, 2, 4, 32, 32), None),
    "no powers of two": (Sizes(2, 200, 1, 2, 112, 40), None),
}


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", [pytest.param("Qwen3.5-9B", marks=pytest.mark.large), *list(LARGE)[1:]])
@BY_CHANNEL
def test_large(case: str, dtype: torch.dtype, by_channel: bool) -> None:
    sizes, lengths = LARGE[case]
    bounds = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    given = operands(sizes, Where(torch.device("cuda"), dtype), decay=0.002, by_channel=by_channel)
    if refusal := delta_chunks.refuses(given["q"]):
        pytest.skip(refusal)
    assert_right(given, bounds)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in (delta_chunks, delta_channels) for name in module.TILES]
)
@pytest.mark.parametrize("change", [{"STAGES": 1}, {"STAGES": 2}, {"num_warps": 4}, {"num_warps": 8}])
def test_other_launches_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: dict[str, int]
) -> None:
    """A kernel that the compiler got wrong shows by how it differs from its other form."""
    tiles = module.TILES[name]
    if not set(change) <= set(tiles) or change.items() <= tiles.items():
        pytest.skip("nothing to change")
    if name.startswith("states") and change == {"STAGES": 1}:
        pytest.skip("ptxas makes wrong code of it, and no call launches it; see MIN_WIDTH")
    where, by_channel = Where(torch.device("cuda"), torch.bfloat16), module is delta_channels
    given = operands(Sizes(1, 700, 2, 4, 128, 128), where, decay=0.002, by_channel=by_channel)
    wanted = run(given, "triton")
    monkeypatch.setitem(module.TILES, name, {**tiles, **change})
    for what, found in run(given, "triton").items():
        difference = (found.double() - wanted[what].double()).norm() / wanted[what].double().norm()
        assert difference < (2e-3 if found.dtype == torch.bfloat16 else 1e-5), what


@BY_CHANNEL
@pytest.mark.gpu
@pytest.mark.kernels
def test_in_a_graph_without_waits(by_channel: bool) -> None:
    where = Where(torch.device("cuda"), torch.bfloat16)
    given = operands(Sizes(1, 300, 2, 4, 128, 128), where, by_channel=by_channel)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    bounds = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)

    def both() -> list[Any]:
        o, state = ops.gated_delta_rule(**leaves, cu_seqlens=bounds)
        return [o, state, *torch.autograd.grad(o.float().square().sum() + state.square().sum(), list(leaves.values()))]

    wanted = [x.detach().clone() for x in both()]
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
    assert all(torch.equal(a.detach(), b) for a, b in zip(found, wanted, strict=True))
