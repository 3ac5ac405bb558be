import peak_memory
import pytest
import torch
from conftest import Where
from loss_cases import OPTIONS, TERMS, gemms, options_for, plain_loss, targets, two_roundings
from op_harness import check, contiguous, strided_rows, transposed

from ligermodels.errors import InputError
from ligermodels.ops import cross_entropy, linear_cross_entropy, linear_cross_entropy_reference, set_backend
from ligermodels.ops.loss.chunks import GradientSum, chunk_rows

TINY, AMPLE = 1, 2**30  # bytes: one row a chunk (the least), all rows at once


def compare(
    hidden: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None,
    *, memory_budget: int = AMPLE, num_targets: int | None = None, frozen: bool = False, **options: object,
) -> None:  # fmt: skip
    def ours(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return linear_cross_entropy(h, w, y, b, memory_budget=memory_budget, num_targets=num_targets, **options)

    def plain(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.nn.functional.linear(h, w, b)
        result = plain_loss(logits, y, **options)
        if isinstance(result, torch.Tensor):
            return result
        # Ranks and predictions are of the logits as they are rounded, not of the true ones.
        rounded = torch.nn.functional.linear(*(None if t is None else t.to(hidden.dtype) for t in (h, w, b)))
        rounded = plain_loss(rounded, y, **options)
        return tuple(x if x.is_floating_point() else other for x, other in zip(result, rounded, strict=True))

    slack = two_roundings(hidden) if {"class_weights", "token_scaling"} & options.keys() else 1.0
    check(ours, plain, [hidden, weight] if bias is None else [hidden, weight, bias], frozen=frozen, slack=slack)


def head(where: Where, T: tuple[int, ...], H: int, V: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((*T, H), (V, H), (V,))
    return tuple(torch.randn(s, dtype=where.dtype, device=where.device) for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPTIONS | TERMS)
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_options(where: Where, name: str, memory_budget: int) -> None:
    # Enough elements for an error in the root mean square to be more than chance.
    hidden, weight, bias = head(where, (2, 5), 12, 300)
    y = targets((2, 5), 300, where.device)
    options = options_for(name, y, 300)
    y = y.masked_fill(y == -100, options.get("ignore_index", -100))
    compare(hidden, weight, y, bias, memory_budget=memory_budget, **options)


@pytest.mark.parametrize("name", ["mean", "none", "scaled", "mean of all terms"])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_frozen_operands(where: Where, name: str, memory_budget: int) -> None:
    """Each gradient is there, and right, exactly when its own operand needs it."""
    hidden, weight, bias = head(where, (7,), 12, 133)
    y = targets((7,), 133, where.device)
    compare(hidden, weight, y, bias, memory_budget=memory_budget, frozen=True, **options_for(name, y, 133))


@pytest.mark.parametrize("layouts", [(strided_rows, contiguous), (transposed, strided_rows), (contiguous, transposed)])
@pytest.mark.parametrize(("T", "H", "V"), [((3,), 1, 1), ((1,), 9, 2), ((2, 3), 7, 129), ((0,), 3, 5)], ids=str)
def test_layouts_and_sizes(where: Where, layouts: tuple, T: tuple[int, ...], H: int, V: int) -> None:
    hidden, weight, _ = head(where, T, H, V)
    compare(layouts[0](hidden), layouts[1](weight), targets(T, V, where.device), memory_budget=2000)


def test_great_logits(where: Where) -> None:
    hidden, weight, _ = head(where, (4,), 6, 40)
    compare(hidden.sign() * 32, weight.sign() * 64, targets((4,), 40, where.device, ignored=0.0))


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.98])
def test_rows_without_targets_are_left_out(where: Where, ignored: float, memory_budget: int) -> None:
    hidden, weight, bias = head(where, (2, 10), 12, 30)
    y = targets((2, 10), 30, where.device, ignored)
    options = {"num_targets": int((y != -100).sum()), "memory_budget": memory_budget}

    compare(hidden, weight, y, bias, reduction="none", return_rank=True, frozen=memory_budget > TINY, **options)
    compare(hidden, weight, y, bias, **options_for("mean of all terms", y, 30), **options)
    if ignored:  # they are not so much as read
        hidden.view(-1, 12)[y.view(-1) == -100] = float("nan")
        inputs = [t.requires_grad_() for t in (hidden, weight, bias)]
        loss = linear_cross_entropy(hidden, weight, y, bias, **options)
        gradients = torch.autograd.grad(loss, inputs)
        assert all(t.isfinite().all() for t in (loss, *gradients)) and not gradients[0][y == -100].any()


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none", "return_predicted": True}, {"token_scaling": True}], ids=str
)
def test_rows_are_left_out_of_a_compiled_graph(options: dict) -> None:
    """With a number of targets that is known on the host; predicted classes without ranks among the results."""
    y = targets((2, 10), 30, torch.device("cpu"), 0.5)
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 10, 12), (30, 12))]

    def results(call: object) -> list[torch.Tensor]:
        found = call(*inputs, y, num_targets=int((y != -100).sum()), **options)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        return [*found, *torch.autograd.grad(found[0].square().sum(), inputs)]

    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for one, two in zip(results(linear_cross_entropy), results(compiled), strict=True):
        torch.testing.assert_close(one, two)


def test_a_wrong_count_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="num_targets is not the number"):
        linear_cross_entropy(torch.ones(9, 4), torch.ones(5, 4), torch.zeros(9, dtype=torch.long), num_targets=3)


def test_compiled_with_any_count() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    hidden, weight = torch.randn(9, 4), torch.randn(5, 4)
    for count in (6, 4, 3):
        y = torch.where(torch.arange(9) < count, 2, -100)
        torch.testing.assert_close(
            compiled(hidden, weight, y, num_targets=count, softcap=float(count)),
            linear_cross_entropy(hidden, weight, y, softcap=float(count)),
        )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_single_row_without_a_dimension(where: Where, reduction: str) -> None:
    hidden, weight, _ = head(where, (), 4, 5)
    for y, wanted in ((-100, -1), (3, 0)):
        target = torch.tensor(y, device=where.device)
        loss, rank, z_loss = linear_cross_entropy(
            hidden, weight, target, reduction=reduction, return_rank=True, return_z_loss=True, z_loss=0.1
        )
        assert loss.shape == rank.shape == z_loss.shape == ()
        assert (rank == wanted) if y < 0 else rank >= wanted
        assert (loss == 0) == (y < 0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored(where: Where, reduction: str) -> None:
    inputs = [t.requires_grad_() for t in head(where, (5,), 4, 11)]
    y = torch.full((5,), -100, device=where.device)
    loss = linear_cross_entropy(inputs[0], inputs[1], y, inputs[2], reduction=reduction, memory_budget=TINY)
    loss.sum().backward()
    assert not loss.any() and not any(t.grad.any() for t in inputs)


@pytest.mark.every_case
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_repeated_backward(where: Where, reduction: str, memory_budget: int) -> None:
    """Over a retained graph, each backward pass with its own gradient: powers of two, so that they compare by bits."""
    if where.dtype == torch.float16:
        pytest.skip("its small values are subnormal, so that scaling by a power of two rounds")
    inputs = [t.requires_grad_() for t in head(where, (6,), 8, 30)]
    y = targets((6,), 30, where.device)
    loss = linear_cross_entropy(inputs[0], inputs[1], y, inputs[2], reduction=reduction, memory_budget=memory_budget)
    passes = [
        torch.autograd.grad(loss, inputs, torch.full_like(loss, factor), retain_graph=True) for factor in (1, 4, 1)
    ]
    for one, four, again in zip(*passes, strict=True):
        assert torch.equal(one, again) and torch.equal(4 * one, four)
    assert len({t.data_ptr() for gradients in passes for t in gradients}) == 9, "gradients share memory"


def test_a_changed_weight_is_noticed_by_the_second_backward_only(where: Where) -> None:
    """The first hands out what the forward pass computed, so that an optimizer may have stepped in between."""
    if where.dtype == torch.float16:
        pytest.skip("computes its gradients in the backward pass")
    hidden, weight, _ = head(where, (6,), 8, 30)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets((6,), 30, where.device))
    weight.add_(1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_grad_computes_no_gradient(where: Where, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without operands that need one, nor under no_grad."""
    monkeypatch.setattr(GradientSum, "add", lambda *_: pytest.fail("computed a gradient of the weight"))
    hidden, weight, _ = head(where, (6,), 8, 30)
    y = targets((6,), 30, where.device)
    linear_cross_entropy(hidden.requires_grad_(), weight, y, reduction=reduction).sum().backward()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight.requires_grad_(), y, reduction=reduction)
    assert not loss.requires_grad


def test_agrees_with_cross_entropy_on_every_option(where: Where) -> None:
    hidden, weight, bias = head(where, (6,), 8, 30)
    y = targets((6,), 30, where.device)
    options = dict(label_smoothing=0.1, z_loss=0.1, softcap=2.0, logit_scale=0.5, return_rank=True)
    loss, rank = linear_cross_entropy(hidden, weight, y, bias, **options)
    for other in (
        cross_entropy(torch.nn.functional.linear(hidden, weight, bias), y, **options),
        linear_cross_entropy_reference(hidden, weight, y, bias, **options),
    ):
        torch.testing.assert_close(loss, other[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(rank, other[1])


@pytest.mark.parametrize(
    ("options", "frozen", "wanted"),
    [
        ({"class_weights": True}, False, (3, 0)),
        ({"z_loss": 0.1, "return_z_loss": True, "return_predicted": True}, False, (3, 0)),
        ({"z_loss": 0.1, "return_z_loss": True}, True, (2, 0)),
        ({"token_scaling": True}, True, (2, 0)),
        ({"token_scaling": True, "z_loss": 0.1}, True, (1, 2)),
        ({"token_scaling": True}, False, (1, 3)),
        ({"class_weights": True, "label_smoothing": 0.1}, False, (1, 3)),
    ],
    ids=str,
)
def test_number_of_gemms(options: dict, frozen: bool, wanted: tuple[int, int]) -> None:
    """What is only returned costs none; terms that are put together cost one more, or with a frozen head up to one."""
    hidden, weight = torch.randn(24, 16, requires_grad=True), torch.randn(160, 16, requires_grad=not frozen)
    y = targets((24,), 160, hidden.device, ignored=0.0)
    options = {name: torch.rand(160) if name == "class_weights" else value for name, value in options.items()}
    found, forward = gemms(lambda: linear_cross_entropy(hidden, weight, y, memory_budget=5 * 160 * 4, **options), 61440)
    loss = found if isinstance(found, torch.Tensor) else found[0]
    assert (forward, gemms(loss.backward, 61440)[1]) == wanted


def test_any_gradient_of_the_loss(where: Where) -> None:
    """One that is no power of two: scaled afterwards by the first backward pass, multiplied in by the second."""
    inputs = [t.requires_grad_() for t in head(where, (6,), 8, 30)]
    loss = linear_cross_entropy(inputs[0], inputs[1], targets((6,), 30, where.device), inputs[2])
    factor = torch.tensor(0.3, device=where.device)
    first, second = (torch.autograd.grad(loss, inputs, factor, retain_graph=True) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=4 * torch.finfo(where.dtype).eps * two.abs().max().item())


def test_float16_gradients_need_the_loss_scale_before_they_are_rounded(where: Where) -> None:
    """As a loss scaler has it: unscaled, nearly all of the logits' gradients would be too small for float16."""
    hidden, weight, _ = head(where, (64,), 8, 1000)
    y = targets((64,), 1000, where.device)

    def scaled(loss: object) -> object:
        return lambda h, w: loss(h, w) * 2.0**15

    check(
        scaled(lambda h, w: linear_cross_entropy(h * 1e-2, w, y)),
        scaled(lambda h, w: plain_loss(torch.nn.functional.linear(h * 1e-2, w), y)),
        [hidden, weight],
    )


def test_autocast() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    y = targets((5,), 30, hidden.device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, y, memory_budget=TINY)
    loss.backward()
    h, w = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    expected = linear_cross_entropy(h, w, y, memory_budget=TINY)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(hidden.grad, h.grad.float()) and torch.equal(weight.grad, w.grad.float())


def test_gradients_in_float64() -> None:
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (7, 3), (7,))]
    y = targets((4,), 7, inputs[0].device)
    for name in ("mean", "none", "smoothing", "z-loss", "softcap", "weights"):
        options = options_for(name, y)
        for op in (linear_cross_entropy, linear_cross_entropy_reference):
            assert torch.autograd.gradcheck(
                lambda h, w, b, op=op, o=options: op(h, w, y, b, memory_budget=TINY, **o), inputs, fast_mode=True
            )


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("float32", dict(softcap=5.0, return_rank=True, label_smoothing=0.1, reduction="none")),
        ("float32", dict(token_scaling=True, label_smoothing=0.1, z_loss=0.1, return_z_loss=True)),
    ],
)
def test_memory_stays_within_the_budget(dtype: str, options: dict) -> None:
    """Forward and backward, where the logits would be ten times the budget; twice the budget would show."""
    budget = peak_memory.T * peak_memory.V * getattr(torch, dtype).itemsize // 10
    loss = f"ops.linear_cross_entropy(hidden, weight, target, memory_budget=budget, **{options})"
    loss += "[0].sum()" if any(name.startswith("return") for name in options) else ".sum()"
    used = peak_memory.beyond_gradients(loss, dtype, budget, summed="token_scaling" not in options)
    assert budget / 4 < used < budget + peak_memory.ALLOWANCE, f"{used / 2**20:.1f} MiB of {budget / 2**20:.1f} MiB"


def test_chunks_fill_the_budget_evenly() -> None:
    weight = torch.empty(1000, 64, dtype=torch.float32)
    for T, budget in ((8192, 2**30), (1000, 2**24), (100, 2**20), (1, 1), (0, 1), (129, 128 * 4 * 1008)):
        rows = chunk_rows(T, weight, 0, budget, True)
        assert rows == 1 or rows * 1008 * 4 <= budget
        chunks = -(-T // rows)
        assert T == 0 or rows * chunks - T < max(128, rows), "the last chunk is empty"


def test_the_sum_is_part_of_a_budget_that_has_room_for_it() -> None:
    V = 1008

    def memory(H: int, T: int) -> int:
        """Bytes beyond the gradients, as multiples of H * V * 2."""
        rows = chunk_rows(T, torch.empty(V, H, dtype=torch.bfloat16), 0, 2**24, True)
        return rows * (V * 2 + (V + H) * 4) + (V * H * 2 if rows < T else 0)

    with set_backend("reference"):
        assert 2**23 < memory(H=2**11, T=10**6) <= 2**24, "half of it is taken, and not more than all"
        assert 2**24 < memory(H=2**13, T=10**6) <= 2**24 + V * 2**13 * 2, "more than half of it comes on top"
        assert memory(H=2**11, T=1300) > 2**24, "all rows at once take what the sum would"


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "H", "V"), [(2048, 1024, 128256), (1000, 512, 32001), (300, 256, 262144)])
@pytest.mark.parametrize("memory_budget", [2**27, 2**31])
def test_large(dtype: torch.dtype, T: int, H: int, V: int, memory_budget: int) -> None:
    where = Where(torch.device("cuda"), dtype)
    hidden, weight, _ = head(where, (T,), H, V)
    compare(hidden, weight / H**0.5, targets((T,), V, where.device), memory_budget=memory_budget)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.kernels
@pytest.mark.parametrize("memory_budget", [2**28, 2**30])
def test_memory_on_the_gpu(memory_budget: int) -> None:
    T, H, V = 8192, 512, 128256
    hidden, weight, _ = head(Where(torch.device("cuda"), torch.bfloat16), (T,), H, V)
    hidden.requires_grad_(), weight.requires_grad_()
    y = targets((T,), V, hidden.device)
    linear_cross_entropy(hidden[:128], weight, y[:128]).backward()
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, y, memory_budget=memory_budget).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert 2 * weight.nbytes <= memory_budget  # so that what its sum in float32 takes beside it is part of that
    gradients = hidden.nbytes + weight.nbytes
    assert used < gradients + memory_budget + 40 * 2**20, "beyond cuBLAS's own 32 MiB and change"


@pytest.mark.parametrize("value", [30, -7])
def test_target_out_of_range(value: int) -> None:
    with pytest.raises(InputError, match=rf"target\[1\] is {value}"):
        linear_cross_entropy(torch.randn(2, 4), torch.randn(30, 4), torch.tensor([3, value]))


def test_a_budget_of_another_type() -> None:
    hidden, weight, y = torch.randn(40, 8), torch.randn(30, 8), torch.arange(40) % 30
    losses = [linear_cross_entropy(hidden, weight, y, memory_budget=budget) for budget in (1500, 1.5e3)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.ones(5, 3)}, "weight must be torch.float32 of shape \\(V, 4\\)"),
        ({"weight": torch.ones(5, 4).double()}, "weight must be torch.float32 .* on cpu; got torch.float64"),
        ({"bias": torch.ones(4)}, "bias must be torch.float32 of shape \\(5\\)"),
        ({"bias": torch.ones(5).half()}, "bias must be torch.float32"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, "target must be torch.int64 of shape \\(2\\)"),
        ({"class_weights": torch.ones(4)}, "linear_cross_entropy: class_weights must be floating of shape \\(5\\)"),
        ({"memory_budget": 0}, "memory_budget must be a positive"),
        ({"memory_budget": None}, "memory_budget must be a positive number of bytes, got None"),
        ({"memory_budget": "1e9"}, "memory_budget must be a positive number of bytes, got 1e9"),
        ({"hidden": torch.ones(2, 4, dtype=torch.int64)}, "hidden must be floating"),
    ],
    ids=str,
)
def test_bad_input(changed: dict, message: str) -> None:
    good = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "target": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(InputError, match=message):
        linear_cross_entropy(**good | changed)
