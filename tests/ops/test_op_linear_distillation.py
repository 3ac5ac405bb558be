"""`linear_distillation` against the divergences written with torch.distributions, and what it promises of memory."""

from typing import Any

import peak_memory
import pytest
import torch
from conftest import Where
from loss_cases import gemms
from op_harness import check, contiguous, strided_rows, transposed, wide

from ligermodels.errors import InputError
from ligermodels.ops import linear_distillation, linear_distillation_reference
from ligermodels.ops.loss.chunks import GradientSum

TINY, AMPLE = 1, 2**30  # bytes: one row a chunk (the least), all rows at once
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward": {"divergence": "forward_kl"},
    "reverse": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "jsd 0.1": {"divergence": "jsd", "beta": 0.1},
    **{name: {"divergence": name} for name in ("tv", "l1", "nla", "lk")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weighted mean": {"token_weights": True},
    "warm": {"temperature": 2.5, "reduction": "none"},
    "cold": {"temperature": 0.4},
    "student's softcap": {"softcap": 3.0},
    "teacher's": {"teacher_softcap": 2.0, "teacher_logit_scale": 0.3},
    "all": dict(
        reduction="sum", temperature=1.7, softcap=4.0, logit_scale=0.6, teacher_softcap=6.0, teacher_logit_scale=1.5,
        token_weights=True,
    ),
}  # fmt: skip
BOTH = {"return_acceptance": True, "return_agreement": True}


def plain(
    logits: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None, *, divergence: str = "forward_kl",
    beta: float = 0.5, temperature: float = 1.0, reduction: str = "mean", token_weights: torch.Tensor | None = None,
    softcap: float | None = None, logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """From the logits of both, in at least float32."""

    def log_probs(x: torch.Tensor, cap: float | None, scale: float) -> torch.Tensor:
        x = wide(x) * scale
        x = x if cap is None else torch.tanh(x / cap) * cap
        return x.div(temperature).log_softmax(-1)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)

    q, p = log_probs(logits, softcap, logit_scale), log_probs(teacher, teacher_softcap, teacher_logit_scale)
    m = torch.logsumexp(torch.stack([p + torch.tensor(beta).log().to(p), q + torch.tensor(1 - beta).log().to(q)]), 0)
    tv = (p.exp() - q.exp()).abs().sum(-1) / 2
    kl_weight = torch.exp(-3 * (1 - tv.detach()))
    losses = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, m) + (1 - beta) * kl(q, m),
        "tv": lambda: tv,
        "l1": lambda: 2 * tv,
        "nla": lambda: -torch.minimum(p, q).logsumexp(-1),
        "lk": lambda: kl_weight * kl(p, q) + (1 - kl_weight) * tv,
    }[divergence]()
    mask = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
    weights = mask.to(losses) if token_weights is None else mask * token_weights.to(losses)
    kept = torch.where(mask, losses, 0.0) * weights
    return {"none": kept, "sum": kept.sum(), "mean": kept.sum() / weights.sum().clamp(min=1e-9)}[reduction]


class Heads:
    """A student's and a teacher's hidden states and heads, of other widths, and a mask."""

    def __init__(
        self, where: Where, T: tuple[int, ...], H: int, V: int, ignored: float = 0.3, teacher: torch.dtype | None = None
    ) -> None:
        def draw(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype or where.dtype, device=where.device)

        self.student = [draw(*T, H), draw(V, H), draw(V)]
        self.teacher = [draw(*T, H + 3, dtype=teacher), draw(V, H + 3, dtype=teacher), draw(V, dtype=teacher)]
        self.mask = torch.rand(T, device=where.device) >= ignored

    def weighted(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options with numbers for the token weights, the last of them 0."""
        numbers = 1 + torch.arange(self.mask.numel(), device=self.mask.device) % 3 / 2
        numbers[-1:] = 0
        numbers = numbers.view(self.mask.shape)
        return {name: numbers if name == "token_weights" else value for name, value in options.items()}

    def loss(self, *student: torch.Tensor, op: Any = linear_distillation, **options: Any) -> torch.Tensor:
        hidden, weight, *bias = student or self.student
        x, w, b = self.teacher
        return op(hidden, weight, x, w, self.mask, *bias, teacher_bias=b, **options)

    def compare(self, *, frozen: bool = False, memory_budget: int = AMPLE, **options: Any) -> None:
        options = self.weighted(options)

        def truth(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            teacher = [t.to(h.dtype if h.dtype == torch.float64 else t.dtype) for t in self.teacher]
            linear = torch.nn.functional.linear
            return plain(linear(h, w, b), linear(*teacher), self.mask, **options)

        def ours(*student: torch.Tensor) -> torch.Tensor:
            return self.loss(*student, memory_budget=memory_budget, **options)

        check(ours, truth, self.student, frozen=frozen, slack=4.0)  # the eager one is a sample of one order of sums


@pytest.mark.parametrize(
    ("divergence", "name", "memory_budget"),
    [*((d, "all", TINY) for d in DIVERGENCES), *((d, "none", AMPLE) for d in DIVERGENCES)]
    + [("forward", o, AMPLE) for o in OPTIONS],
)
def test_divergences_and_options(where: Where, divergence: str, name: str, memory_budget: int) -> None:
    """1100 classes are two tiles of the kernel, the second one not full."""
    Heads(where, (2, 2), 12, 1100).compare(memory_budget=memory_budget, **DIVERGENCES[divergence], **OPTIONS[name])


@pytest.mark.parametrize(
    ("divergence", "reduction", "memory_budget"), [("reverse", "mean", TINY), ("lk", "none", AMPLE)]
)
def test_frozen_operands(where: Where, divergence: str, reduction: str, memory_budget: int) -> None:
    """Each gradient is there, and right, exactly when its own operand needs it."""
    heads = Heads(where, (9,), 7, 65)
    heads.compare(frozen=True, reduction=reduction, memory_budget=memory_budget, **DIVERGENCES[divergence])


@pytest.mark.parametrize("layouts", [(strided_rows, contiguous), (transposed, strided_rows), (contiguous, transposed)])
@pytest.mark.parametrize(("T", "H", "V"), [((3,), 1, 1), ((2,), 9, 3), ((2, 3), 7, 129), ((0,), 3, 5)], ids=str)
def test_layouts_and_sizes(where: Where, layouts: tuple, T: tuple[int, ...], H: int, V: int) -> None:
    heads = Heads(where, T, H, V)
    for side in (heads.student, heads.teacher):
        side[:2] = [lay(x) for lay, x in zip(layouts, side, strict=False)]
    heads.compare(memory_budget=2000, divergence="jsd")


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_great_logits(where: Where, divergence: str) -> None:
    """Distributions of which one is 0 to the last bit where the other is 1. Their gradients are differences of numbers
    as great as the loss, so that the harness would compare rounding errors."""
    heads = Heads(where, (4,), 6, 40, ignored=0.0)
    for side in (heads.student, heads.teacher):
        side[:] = side[0].sign() * 32, side[1].sign() * 64, torch.zeros_like(side[2])  # logits that no dtype rounds
    truth = [t.double().requires_grad_() for t in heads.student]
    logits, teacher = (torch.nn.functional.linear(*side) for side in (truth, [t.double() for t in heads.teacher]))
    wanted = plain(logits, teacher, None, **DIVERGENCES[divergence])
    found = heads.loss(*(t.requires_grad_() for t in heads.student), **DIVERGENCES[divergence])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2 if where.dtype != torch.float32 else 1e-5, atol=0)
    atol = max(wanted.item(), 1.0) * (4e-7 if where.dtype == torch.float32 else 4e-4)
    sides = ((found / 64, heads.student), (wanted / 64, truth))  # or float16 overflows
    for ours, true in zip(*(torch.autograd.grad(*side) for side in sides), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=2 * torch.finfo(where.dtype).eps, atol=atol)


def test_a_teacher_of_another_dtype(where: Where) -> None:
    """The dtype is read in one place, whatever the divergence."""
    for teacher in {torch.float32, torch.bfloat16} - {where.dtype}:
        for divergence in ("forward", "jsd", "lk"):
            Heads(where, (7,), 12, 300, teacher=teacher).compare(memory_budget=TINY, **DIVERGENCES[divergence])


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("divergence", ["forward", "nla", "lk"])
def test_rows_outside_the_mask_are_left_out(where: Where, ignored: float, memory_budget: int, divergence: str) -> None:
    heads = Heads(where, (2, 10), 12, 30, ignored)
    options: dict[str, Any] = {"num_tokens": int(heads.mask.sum()), "memory_budget": memory_budget}
    options |= {"token_weights": torch.full(heads.mask.shape, 0.5, device=where.device)} | DIVERGENCES[divergence]
    options["token_weights"][~heads.mask] = float("nan")
    wanted = heads.loss(reduction="none", op=linear_distillation_reference, **options)
    for side in (heads.student, heads.teacher):
        side[0][~heads.mask] = float("nan")  # they are not so much as read
    inputs = [t.requires_grad_() for t in heads.student]
    loss = heads.loss(reduction="none", **options)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    for found in (loss.sum(), heads.loss(**options)):
        gradients = torch.autograd.grad(found, inputs)
        assert all(t.isfinite().all() for t in (found, *gradients)) and not gradients[0][~heads.mask].any()
        assert bool(gradients[1].any()) == bool(heads.mask.any())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("skipped", [True, False], ids=["rows skipped", "all rows"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_acceptance_and_agreement(
    where: Where, reduction: str, memory_budget: int, skipped: bool, divergence: str
) -> None:
    """Of every token of the mask, beside the same loss and gradients; of logits that no dtype rounds."""
    heads = Heads(where, (2, 5), 6, 5, ignored=0.3 if skipped else 0.0)
    heads.mask[0, 0], heads.mask[1, 2] = True, False  # alone it is too little to skip, also on the CPU, which counts
    heads.teacher[2] = heads.student[2]
    for side in (heads.student, heads.teacher):
        side[:] = [t.mul(2).round().clamp(-4, 4) for t in side]
        side[0][0, 0] = 0  # so that the two agree, and elsewhere they seldom do
    options = {"temperature": 2.0, "softcap": 5.0, "logit_scale": 0.2, "teacher_logit_scale": 0.5}
    logits, teacher = (
        torch.nn.functional.linear(*(t.double() for t in side)) for side in (heads.student, heads.teacher)
    )
    q, p = torch.softmax(torch.tanh(logits * 0.2 / 5) * 5 / 2, -1), torch.softmax(teacher * 0.5 / 2, -1)
    wanted = torch.where(heads.mask, torch.minimum(p, q).sum(-1), 0.0)
    agreed = (logits.argmax(-1) == teacher.argmax(-1)) & heads.mask
    assert 0 < agreed.sum() < heads.mask.sum()
    options |= {"reduction": reduction, "memory_budget": memory_budget, **DIVERGENCES[divergence]}
    if skipped:
        options["num_tokens"] = int(heads.mask.sum())
        heads.student[0][~heads.mask] = float("nan")
    inputs = [t.requires_grad_() for t in heads.student]
    loss, acceptance, agreement = heads.loss(**options, **BOTH)
    torch.testing.assert_close(acceptance, wanted.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(agreement, agreed) and not acceptance.requires_grad and not agreement.requires_grad
    alone = heads.loss(**options)
    assert torch.equal(alone, loss)
    for one, two in zip(*(torch.autograd.grad(x.sum(), inputs) for x in (loss, alone)), strict=True):
        assert torch.equal(one, two)
    for name, expected in (("return_acceptance", acceptance), ("return_agreement", agreement)):
        assert torch.equal(heads.loss(**options, **{name: True})[1], expected)


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("skipped", [True, False], ids=["rows skipped", "all rows"])
def test_acceptance_where_the_teacher_has_more_classes(where: Where, memory_budget: int, skipped: bool) -> None:
    """By its distribution over all classes; the loss compares the shared classes, as without `teacher_lse`."""
    heads, rows = Heads(where, (2, 5), 6, 9, ignored=0.4 if skipped else 0.0), torch.tensor([1, 2, 5, 8])
    heads.mask[1, 2] = False
    for side in (heads.student, heads.teacher):
        side[:] = [t.mul(2).round().clamp(-4, 4) for t in side]
    logits, teacher = (
        torch.nn.functional.linear(*(t.double() for t in side)) for side in (heads.student, heads.teacher)
    )
    teacher = torch.tanh(teacher * 0.5 / 6) * 6 / 2
    q, p = torch.softmax(logits[..., rows] / 2, -1), teacher.softmax(-1)[..., rows]
    for side in (heads.student, heads.teacher):
        side[1:] = [t[rows.to(t.device)] for t in side[1:]]
    options = {"temperature": 2.0, "teacher_softcap": 6.0, "teacher_logit_scale": 0.5, "reduction": "sum"}
    lse = teacher.logsumexp(-1).float().masked_fill(~heads.mask, float("nan"))
    found = {op: heads.loss(op=op, **options, teacher_lse=lse, memory_budget=memory_budget, **BOTH)
             for op in (linear_distillation, linear_distillation_reference)}  # fmt: skip
    wanted = torch.where(heads.mask, torch.minimum(p, q).sum(-1), 0.0)
    for loss, acceptance, _ in found.values():
        torch.testing.assert_close(acceptance.nan_to_num().double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, found[linear_distillation_reference][0])
    assert torch.equal(found[linear_distillation][0], heads.loss(**options, memory_budget=memory_budget))


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("skipped", [True, False], ids=["rows skipped", "all rows"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_several_students_of_one_teacher(where: Where, reduction: str, skipped: bool, memory_budget: int) -> None:
    """As with the teacher's states repeated for each of them; its logits are computed once."""
    heads = Heads(where, (2, 5, 3), 12, 40)
    teacher, heads.mask[0, :4] = heads.teacher[0][:, :, 0], not skipped
    heads.teacher[0] = teacher[:, :, None].expand(-1, -1, 3, -1)
    weights = torch.rand(2, 5, 3, device=where.device)
    options: dict[str, Any] = {"reduction": reduction, "token_weights": weights, "return_losses": True, **BOTH}
    # Over more classes than these; each state's own, and near enough for an acceptance that can be compared.
    lse = torch.nn.functional.linear(teacher, *heads.teacher[1:]).float().logsumexp(-1) + torch.rand(2, 5).to(teacher)
    lse = lse.float()
    inputs = [t.requires_grad_() for t in heads.student]
    wanted = heads.loss(op=linear_distillation_reference, **options, teacher_lse=lse[:, :, None].expand(-1, -1, 3))
    heads.teacher[0] = teacher
    count = int(heads.mask.any(-1).sum()) if skipped else None
    for found in (
        heads.loss(op=linear_distillation_reference, **options, teacher_lse=lse),
        heads.loss(**options, teacher_lse=lse, num_tokens=count, memory_budget=memory_budget),
    ):
        atol = 40 * torch.finfo(where.dtype).eps
        for ours, true in zip(found, wanted, strict=True):
            assert ours.shape == true.shape
            torch.testing.assert_close(ours.float(), true.float(), rtol=atol, atol=atol)
        gradients = (torch.autograd.grad(x[0].sum(), inputs, retain_graph=True) for x in (found, wanted))
        for ours, true in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, true, rtol=atol, atol=atol * max(true.abs().max().item(), 1))
    with pytest.raises(InputError, match=r"token_weights must be \(2, 5, 3\)"):
        heads.loss(**options | {"token_weights": weights[:, :, :2]})


@pytest.mark.parametrize("divergence", ["tv", "l1", "nla", "lk"])
def test_equal_probabilities(divergence: str) -> None:
    """Losses that have a kink where student and teacher agree: the gradient is in the middle, as autograd's is."""
    hidden, weight = torch.randn(200, 8, requires_grad=True), torch.randn(300, 8)
    options: dict[str, Any] = {"divergence": divergence, **BOTH}
    loss, acceptance, agreement = linear_distillation(hidden, weight, hidden, weight, **options)
    assert loss.abs() < 1e-6 and (acceptance - 1).abs().max() < 1e-6 and acceptance.max() <= 1 and agreement.all()
    assert torch.autograd.grad(loss, hidden)[0].abs().max() < 1e-6
    logits = torch.tensor([[3.0, 1.0, 2.0]], requires_grad=True)  # the third class is as probable on both sides
    sides = logits, torch.eye(3), logits.detach()[:, [1, 0, 2]], torch.eye(3)
    losses = [op(*sides, divergence=divergence) for op in (linear_distillation, linear_distillation_reference)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))


def test_a_wrong_count_is_an_error() -> None:
    heads = Heads(Where(torch.device("cpu"), torch.float32), (9,), 4, 5, ignored=0.0)
    with pytest.raises(RuntimeError, match="num_tokens is not the number"):
        heads.loss(num_tokens=3)


@pytest.mark.every_case
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
@pytest.mark.parametrize("divergence", ["jsd", "nla", "lk"])
def test_repeated_backward(where: Where, reduction: str, memory_budget: int, divergence: str) -> None:
    """Over a retained graph, each backward pass with its own gradient: powers of two, so that they compare by bits."""
    if where.dtype == torch.float16:
        pytest.skip("its small values are subnormal, so that scaling by a power of two rounds")
    heads = Heads(where, (6,), 8, 30)
    inputs = [t.requires_grad_() for t in heads.student]
    loss = heads.loss(reduction=reduction, memory_budget=memory_budget, divergence=divergence)
    passes = [
        torch.autograd.grad(loss, inputs, torch.full_like(loss, factor), retain_graph=True) for factor in (1, 4, 1)
    ]
    for one, four, again in zip(*passes, strict=True):
        assert torch.equal(one, again) and torch.equal(4 * one, four)
    assert len({t.data_ptr() for gradients in passes for t in gradients}) == 9, "gradients share memory"


def test_what_needs_no_gradient_gets_none(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher never, though its weight may be the student's own."""
    heads = Heads(where, (6,), 8, 30)
    for t in heads.teacher:
        t.requires_grad_()
    heads.student[0].requires_grad_()
    monkeypatch.setattr(GradientSum, "add", lambda *_: pytest.fail("computed a gradient of the weight"))
    heads.loss().backward()
    assert all(t.grad is None for t in heads.teacher)
    with torch.no_grad():
        heads.student[1].requires_grad_()
        assert not heads.loss().requires_grad


@pytest.mark.parametrize(
    ("needs", "reduction", "wanted"),
    [
        ("", "mean", (2, 0)),
        ("hidden", "mean", (3, 0)),
        ("hidden", "none", (2, 3)),
        ("weight", "sum", (3, 0)),
        ("hidden weight", "mean", (4, 0)),
        ("hidden weight", "none", (2, 4)),
    ],
)
def test_number_of_gemms(needs: str, reduction: str, wanted: tuple[int, int]) -> None:
    """The logits of both sides, and the gradients that are needed; acceptance and agreement cost none."""
    T, H, V = 24, 16, 160
    student = {"hidden": torch.randn(T, H), "weight": torch.randn(V, H)}
    for name in needs.split():
        student[name].requires_grad_()
    teacher = torch.randn(T, H), student["weight"]
    options: dict[str, Any] = {"divergence": "lk", "reduction": reduction, "memory_budget": 20 * V * 4, **BOTH}
    (loss, *_), forward = gemms(lambda: linear_distillation(*student.values(), *teacher, **options), T * H * V)
    assert (forward, gemms(loss.sum().backward, T * H * V)[1] if needs else 0) == wanted


def test_float16_gradients_need_the_loss_scale_before_they_are_rounded(where: Where) -> None:
    heads, truth = (Heads(Where(where.device, dtype), (64,), 8, 1000) for dtype in (where.dtype, torch.float64))
    truth.student, truth.teacher = ([t.double() for t in side] for side in (heads.student, heads.teacher))
    truth.mask = heads.mask
    for each in (heads, truth):
        (each.loss(*(t.requires_grad_() for t in each.student)) * 2.0**15).backward()
    for ours, true in zip(heads.student, truth.student, strict=True):
        allowed = 16 * torch.finfo(where.dtype).eps * true.grad.abs().max().item()
        torch.testing.assert_close(ours.grad.double(), true.grad, rtol=0, atol=allowed)


def test_autocast() -> None:
    heads = Heads(Where(torch.device("cpu"), torch.float32), (5,), 8, 30)
    inputs = [t.requires_grad_() for t in heads.student]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = heads.loss(memory_budget=TINY)
    gradients = torch.autograd.grad(loss, inputs)
    heads.student = [t.detach().bfloat16().requires_grad_() for t in inputs]
    heads.teacher = [t.bfloat16() for t in heads.teacher]
    expected = heads.loss(memory_budget=TINY)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, heads.student), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())


def test_gradients_in_float64() -> None:
    heads = Heads(Where(torch.device("cpu"), torch.float64), (4,), 3, 7)
    inputs = [t.requires_grad_() for t in heads.student]
    for name in OPTIONS:
        for divergence in DIVERGENCES.values():
            if divergence["divergence"] == "lk":  # its gradient leaves out the weight's: no finite difference shows it
                continue
            options = heads.weighted(OPTIONS[name] | divergence)
            for op in (linear_distillation, linear_distillation_reference):
                loss = lambda *x, op=op, o=options: heads.loss(*x, op=op, memory_budget=TINY, **o)  # noqa: E731
                assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("float32", {"divergence": "reverse_kl", "reduction": "none"}),
        ("float32", {"divergence": "jsd", "softcap": 5.0}),
        ("float32", {"divergence": "tv"}),
        ("float32", {"divergence": "nla", "reduction": "none"}),
        ("float32", {"divergence": "lk", **BOTH}),
    ],
    ids=str,
)
def test_memory_stays_within_the_budget(dtype: str, options: dict[str, Any]) -> None:
    """Forward and backward, where the logits would be five times the budget; twice the budget would show."""
    budget = peak_memory.T * peak_memory.V * getattr(torch, dtype).itemsize // 5
    first = "[0]" if "return_acceptance" in options else ""
    loss = f"ops.linear_distillation(hidden, weight, *teacher, memory_budget=budget, **{options}){first}.sum()"
    used = peak_memory.beyond_gradients(loss, dtype, budget)
    assert budget / 4 < used < budget + peak_memory.ALLOWANCE, f"{used / 2**20:.1f} MiB of {budget / 2**20:.1f} MiB"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"divergence": "kl"}, "divergence must be one of forward_kl, reverse_kl, jsd, tv, l1, nla, lk; got 'kl'"),
        ({"divergence": "tv", "beta": 0.5}, "beta belongs to the jsd; divergence 'tv' has none"),
        ({"beta": 0.3}, "beta belongs to the jsd"),
        ({"divergence": "jsd", "beta": 1.0}, r"beta must be in \(0, 1\), got 1.0; its ends are"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": torch.inf}, "temperature must be positive and finite, got inf"),
        ({"temperature": None}, "temperature must be positive and finite, got None"),
        ({"teacher_softcap": -1.0}, "teacher_softcap must be positive"),
        ({"softcap": torch.inf}, "softcap must be positive and finite, got inf"),
        ({"divergence": "jsd", "beta": "0.5"}, "beta must be in"),
        ({"return_losses": "no"}, "return_losses: must be True or False, got 'no'"),
        ({"reduction": "batchmean"}, "reduction must be"),
        ({"memory_budget": 0}, "memory_budget must be a positive"),
        ({"mask": torch.ones(2)}, r"mask must be torch.bool of shape \(2\)"),
        ({"token_weights": torch.ones(2, 1)}, r"token_weights must be floating of shape \(2\)"),
        ({"teacher_hidden": torch.ones(3, 6)}, r"teacher_hidden must be floating of shape \(2, G\)"),
        ({"teacher_weight": torch.ones(4, 6)}, r"teacher_weight must be torch.float32 of shape \(5, 6\)"),
        ({"teacher_weight": torch.ones(5, 6).double()}, "teacher_weight must be torch.float32 .* got torch.float64"),
        ({"weight": torch.ones(5, 3)}, r"weight must be torch.float32 of shape \(V, 4\)"),
        ({"teacher_bias": torch.ones(4)}, r"teacher_bias must be torch.float32 of shape \(5\)"),
        ({"teacher_hidden": None}, "teacher_hidden must be a tensor, got"),
        ({"hidden": None}, "hidden must be a tensor, got"),
        ({"hidden": torch.ones(2, 3, 4), "mask": [True]}, "mask must be a tensor, got"),
    ],
    ids=str,
)
def test_bad_input(changed: dict[str, Any], message: str) -> None:
    good = {
        "hidden": torch.ones(2, 4),
        "weight": torch.ones(5, 4),
        "teacher_hidden": torch.ones(2, 6),
        "teacher_weight": torch.ones(5, 6),
    }
    with pytest.raises(InputError, match=message):
        linear_distillation(**good | changed)
