import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Where
from loss_cases import plain_loss, targets
from op_harness import check, strided_rows, transposed
from torch import Tensor
from torch.nn.functional import linear, silu

from ligermodels.errors import InputError
from ligermodels.layers import shift_labels
from ligermodels.ops import multi_head_linear_cross_entropy as op
from ligermodels.ops import multi_head_linear_cross_entropy_reference as reference
from ligermodels.ops.gradient_sum import GradientSum

TINY, SEVERAL, AMPLE = 1, 8000, 2**30  # bytes: a row a chunk (the least), several, all rows at once
DOUBLE = Where(torch.device("cpu"), torch.float64)


@dataclass(frozen=True)
class Heads:
    """K heads of L blocks, with or without biases, on a shared language model head or one each; their tensors flat."""

    K: int = 3
    L: int = 1
    shared: bool = False
    biased: bool = True
    H: int = 12
    V: int = 100

    def tensors(self, where: Where, tokens: tuple[int, ...]) -> list[Tensor]:
        """hidden, then parameters as the op's own functions order them; logits of about unit variance."""
        lm_heads, blocks = 1 if self.shared else self.K, self.K * self.L
        shapes = [(*tokens, self.H)] + [(self.V, self.H)] * lm_heads + [(self.V,)] * lm_heads * self.biased
        shapes += [(self.H, self.H)] * blocks + [(self.H,)] * blocks * self.biased
        return [
            torch.randn(s, dtype=where.dtype, device=where.device).div_(s[-1] ** 0.5 if i and len(s) == 2 else 1)
            for i, s in enumerate(shapes)
        ]

    def arguments(self, flat: Sequence[Tensor], y: Tensor) -> tuple[Any, ...]:
        """The op's positional arguments."""
        rest = list(flat[1:])

        def take(n: int) -> list[Tensor]:
            taken, rest[:] = rest[:n], rest[n:]
            return taken

        lm_heads, blocks = 1 if self.shared else self.K, self.K * self.L
        weights, biases = take(lm_heads), take(lm_heads * self.biased)
        block_weights = take(blocks)
        pairs = list(zip(block_weights, take(blocks) if self.biased else [None] * blocks, strict=True))
        chains = [pairs[k * self.L : (k + 1) * self.L] for k in range(self.K)]
        bias = (biases[0] if self.shared else biases) if self.biased else None
        return flat[0], weights[0] if self.shared else weights, y, chains, bias


def eager(
    hidden: Tensor, weight: Any, y: Tensor, blocks: Any, bias: Any, *, head_weights: Any = None,
    token_weights: Tensor | None = None, normalizer: Any = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Head by head, by torch's own operations."""
    losses = []
    for k in range(len(y)):
        x = hidden
        for w, b in blocks[k]:
            x = x + silu(linear(x, w, b))
        w = weight if isinstance(weight, Tensor) else weight[k]
        b = bias if bias is None or isinstance(bias, Tensor) else bias[k]
        t = None if token_weights is None else token_weights[k]
        reduction = "mean" if normalizer is None else "sum"
        loss = plain_loss(linear(x, w, b), y[k], reduction=reduction, token_weights=t, **options)
        losses.append(loss if normalizer is None else loss / torch.as_tensor(normalizer).expand(len(y))[k].item())
    weights = [1.0] * len(y) if head_weights is None else list(head_weights)
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)), torch.stack(losses).detach()


def compare(heads: Heads, flat: list[Tensor], y: Tensor, memory_budget: int = AMPLE, **options: Any) -> None:
    """The op against the eager computation: losses, and gradients of everything."""
    num_targets = options.pop("num_targets", None)

    def ours(*flat: Tensor) -> tuple[Tensor, Tensor]:
        return op(*heads.arguments(flat, y), memory_budget=memory_budget, num_targets=num_targets, **options)[:2]

    check(ours, lambda *flat: eager(*heads.arguments(flat, y), **options), flat)


def decay(K: int) -> list[float]:
    return [0.8**k for k in range(K)]


def gradients(f: Callable[..., Any], heads: Heads, flat: list[Tensor], y: Tensor, **options: Any) -> list[Tensor]:
    """Losses, and gradients of what requires one."""
    loss, head_losses, *_ = f(*heads.arguments(flat, y), **options)
    assert not head_losses.requires_grad
    return [loss.detach(), head_losses, *torch.autograd.grad(loss, [t for t in flat if t.requires_grad])]


assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("memory_budget", [TINY, SEVERAL, AMPLE])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("L", [0, 1, 2])
@pytest.mark.parametrize("K", [1, 3, 5])
def test_in_float64(K: int, L: int, shared: bool, memory_budget: int) -> None:
    heads = Heads(K, L, shared, H=6, V=20)
    flat = [t.requires_grad_() for t in heads.tensors(DOUBLE, (2, 7))]
    for ignored in (0.0, 0.5):
        y = targets((K, 2, 7), 20, DOUBLE.device, ignored)
        truth = gradients(eager, heads, flat, y, head_weights=decay(K))
        for f in (partial(op, memory_budget=memory_budget), reference):
            assert_close(gradients(f, heads, flat, y, head_weights=decay(K)), truth)


@pytest.mark.parametrize("memory_budget", [TINY, SEVERAL, AMPLE])
@pytest.mark.parametrize("heads", [Heads(1, 0), Heads(3, 1), Heads(3, 2, shared=True, biased=False)], ids=str)
def test_as_good_as_eager(where: Where, heads: Heads, memory_budget: int) -> None:
    flat = heads.tensors(where, (2, 4))
    y = targets((heads.K, 2, 4), heads.V, where.device)
    compare(heads, flat, y, memory_budget, head_weights=decay(heads.K), softcap=30.0, label_smoothing=0.1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_every_set_of_trained_operands(shared: bool, memory_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is there, and computed, exactly when its own operand needs it."""
    heads, products, add = Heads(2, 2, shared, H=4, V=9), [], GradientSum.add
    monkeypatch.setattr(GradientSum, "add", lambda self, *gx: (products.append(gx[1] is not None), add(self, *gx)))
    flat = [t.requires_grad_() for t in heads.tensors(DOUBLE, (3,))]
    y = targets((2, 3), 9, DOUBLE.device, ignored=0.0)
    truth = gradients(eager, heads, flat, y)[2:]
    lm = 1 if shared else 2
    blocks = 1 + 2 * lm  # hidden, a language model head, its bias, the first head's two blocks and their biases
    subjects = [0, 1, 1 + lm, blocks, blocks + 1, blocks + 4, blocks + 5]
    for chosen in chain.from_iterable(combinations(subjects, n) for n in range(1, 8)):
        for i, t in enumerate(flat):
            t.requires_grad_(i in chosen)
        products.clear()
        found = gradients(partial(op, memory_budget=memory_budget), heads, flat, y)[2:]
        assert_close(found, [truth[i] for i in chosen])
        if memory_budget == AMPLE:
            assert sum(products) == sum(flat[i].dim() == 2 for i in chosen if i)


def test_no_grad_computes_no_gradient(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientSum, "add", lambda *_: pytest.fail("computed a gradient"))
    heads = Heads()
    flat = [t.requires_grad_() for t in heads.tensors(where, (4,))]
    with torch.no_grad():
        loss, *_ = op(*heads.arguments(flat, targets((3, 4), heads.V, where.device)))
    assert not loss.requires_grad and loss > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": dict(softcap=3.0, logit_scale=0.7),
    "smoothing, z-loss": dict(label_smoothing=0.1, z_loss=1e-2),
    "sum": dict(normalizer=1.0, ignore_index=0),
    "normalizer": dict(normalizer=torch.tensor([4, 0.5, 16]), head_weights=torch.tensor([1.0, 0.0, 0.5])),
}


@pytest.mark.parametrize("name", [*OPTIONS, "token weights"])
def test_options(name: str) -> None:
    heads = Heads(shared=True, L=0, V=20)
    y = targets((3, 9), heads.V, DOUBLE.device)
    options = OPTIONS.get(name, {"token_weights": torch.rand(y.shape)})
    y = y.masked_fill(y == -100, options.get("ignore_index", -100))
    flat = [t.requires_grad_() for t in heads.tensors(DOUBLE, (9,))]
    truth = gradients(eager, heads, flat, y, **options)
    for f in (partial(op, memory_budget=SEVERAL), reference):
        assert_close(gradients(f, heads, flat, y, **options), truth)


@pytest.mark.parametrize("layout", [strided_rows, transposed])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_layouts(where: Where, layout: Callable[[Tensor], Tensor], ignored: float) -> None:
    heads = Heads(2, 1)
    flat = [layout(t) if t.dim() > 1 else t for t in heads.tensors(where, (2, 3))]
    compare(heads, flat, targets((2, 2, 3), heads.V, where.device, ignored), SEVERAL)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory_budget", [SEVERAL, AMPLE])
def test_rows_without_targets_are_left_out(where: Where, shared: bool, memory_budget: int) -> None:
    """They are not so much as read: here by any head those that no head has a target for, and a head without any."""
    heads = Heads(shared=shared)
    flat = [t.requires_grad_() for t in heads.tensors(where, (2, 9))]
    y = targets((3, 2, 9), heads.V, where.device, ignored=0.5)
    y[1] = -100
    with torch.no_grad():
        flat[0][(y == -100).all(0)] = float("nan")
    counts = (y != -100).sum((1, 2)).tolist()
    loss, head_losses, ranks = op(
        *heads.arguments(flat, y), return_rank=True, memory_budget=memory_budget, num_targets=counts
    )
    found = torch.autograd.grad(loss, flat)
    assert torch.equal(ranks == -1, y == -100) and head_losses[1] == 0
    assert all(t.isfinite().all() for t in (loss, *found)) and not found[0][(y == -100).all(0)].any()
    clean = [torch.where(t.isnan(), 0, t).detach() for t in flat]
    compare(heads, clean, y, memory_budget, num_targets=counts)


def test_wrong_counts_are_an_error() -> None:
    """Also where their sum is right."""
    heads = Heads(2, 0)
    y = torch.tensor([[1, 2, -100, -100], [3, -100, -100, -100]])
    arguments = heads.arguments(heads.tensors(DOUBLE, (4,)), y)
    for counts in ([1, 1], [1, 2]):
        with pytest.raises(RuntimeError, match="num_targets is not the number"):
            op(*arguments, num_targets=counts)
    for counts in ([2], [2, 5]):
        with pytest.raises(InputError, match="num_targets must be 2 numbers from 0 to 4"):
            op(*arguments, num_targets=counts)


@pytest.mark.parametrize("tokens", [(5,), (0,)])
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_to_predict(where: Where, shared: bool, tokens: tuple[int, ...]) -> None:
    heads = Heads(shared=shared)
    flat = [t.requires_grad_() for t in heads.tensors(where, tokens)]
    y = torch.full((3, *tokens), -100, device=where.device)
    for counts in (None, [tokens[0]] * 3):  # left out, and computed
        loss, head_losses, _ = op(*heads.arguments(flat, y), num_targets=counts, memory_budget=TINY)
        assert not loss and not head_losses.any()
        assert not any(g.any() for g in torch.autograd.grad(loss, flat))


def test_packed_documents() -> None:
    """Targets as the layers shift them: the same as each document alone."""
    heads, bounds = Heads(shared=True), [0, 5, 6, 13]
    flat = [t.requires_grad_() for t in heads.tensors(DOUBLE, (1, 13))]
    labels = targets((1, 13), heads.V, DOUBLE.device, ignored=0.2)
    y = torch.stack([shift_labels(labels, 2 + k, torch.tensor(bounds, dtype=torch.int32)) for k in range(3)])
    packed, *_ = op(*heads.arguments(flat, y), normalizer=4.0, memory_budget=SEVERAL)
    alone = torch.zeros_like(packed)
    for a, b in pairwise(bounds):
        own = torch.stack([shift_labels(labels[:, a:b], 2 + k) for k in range(3)])
        alone += op(*heads.arguments([flat[0][:, a:b], *flat[1:]], own), normalizer=4.0)[0]
    assert_close([packed, *torch.autograd.grad(packed, flat)], [alone, *torch.autograd.grad(alone, flat)])


@pytest.mark.parametrize("memory_budget", [TINY, AMPLE])
def test_ranks(where: Where, memory_budget: int) -> None:
    """Of logits that are whole numbers, many of them equal, through blocks that are the identity."""
    heads = Heads(biased=False)
    flat = [t.sign() if i < 4 else torch.zeros_like(t) for i, t in enumerate(heads.tensors(where, (8,)))]
    y = targets((3, 8), heads.V, where.device)
    _, _, ranks = op(*heads.arguments(flat, y), return_rank=True, memory_budget=memory_budget)
    expected = [plain_loss(flat[0] @ w.t(), t, return_rank=True)[1] for w, t in zip(flat[1:4], y, strict=True)]
    assert torch.equal(ranks, torch.stack(expected))
    assert torch.equal(ranks, reference(*heads.arguments(flat, y), return_rank=True)[2])


def test_repeated_backward(where: Where) -> None:
    """Over a retained graph, each with its own gradient and memory; the others compute again what the first hands out.
    Powers of two compare by bits."""
    if where.dtype == torch.float16:
        pytest.skip("its small values are subnormal, so that scaling by a power of two rounds")
    heads = Heads(2, 1)
    flat = [t.requires_grad_() for t in heads.tensors(where, (6,))]
    loss, *_ = op(*heads.arguments(flat, targets((2, 6), heads.V, where.device)), memory_budget=SEVERAL)
    passes = [torch.autograd.grad(loss, flat, loss.new_tensor(x), retain_graph=True) for x in (1, 4, 1)]
    for one, four, again in zip(*passes, strict=True):
        assert torch.equal(one, again) and torch.equal(4 * one, four)
    assert len({t.data_ptr() for found in passes for t in found}) == 3 * len(flat), "gradients share memory"


def test_float16_gradients_wait_for_the_loss_scale() -> None:
    """Unscaled, the logits' gradients would be too small for float16."""
    heads, small = Heads(2, 1), {"head_weights": [2.0**-12] * 2}
    flat = heads.tensors(Where(DOUBLE.device, torch.float16), (64,))
    y = targets((2, 64), heads.V, DOUBLE.device)
    check(
        lambda *flat: op(*heads.arguments(flat, y), **small)[0] * 2.0**15,
        lambda *flat: eager(*heads.arguments(flat, y), **small)[0] * 2.0**15,
        flat,
    )


def test_autocast() -> None:
    heads = Heads()
    flat = [t.float().requires_grad_() for t in heads.tensors(DOUBLE, (6,))]
    y = targets((3, 6), heads.V, DOUBLE.device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = gradients(partial(op, memory_budget=TINY), heads, flat, y)
    halves = [t.detach().bfloat16().requires_grad_() for t in flat]
    expected = gradients(partial(op, memory_budget=TINY), heads, halves, y)
    assert all(torch.equal(a, b.float()) for a, b in zip(ours, expected, strict=True))


MEMORY = """
import sys, torch
from conftest import Where
from loss_cases import targets
from test_op_multi_head_linear_cross_entropy import Heads, op

torch.backends.mkldnn.enabled = False  # it widens 16-bit operands to memory of its own


def peak(reset=False):
    if reset:
        open("/proc/self/clear_refs", "w").write("5")
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024

T, H, V, budget = map(int, sys.argv[1:])
for K, shared in ((1, False), (1, False), (5, False), (1, True), (5, True)):  # the first is for what torch keeps
    heads = Heads(K, 1, shared, biased=False, H=H, V=V)
    flat = [t.requires_grad_() for t in heads.tensors(Where(torch.device("cpu"), torch.bfloat16), (T,))]
    y = targets((K, T), V, flat[0].device, ignored=0.0)
    before = peak(reset=True)
    op(*heads.arguments(flat, y), memory_budget=budget)[0].backward()
    print("used", peak() - before - sum(t.nbytes for t in flat) - 2 * (V * H + H * H) - 4 * T * H)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of peak memory")
def test_memory_stays_within_the_budget_whatever_the_heads() -> None:
    """The peak above all gradients and half a float32 sum, where the logits would be up to 25 times the budget."""
    T, H, V, budget = 256, 32, 51200, 5 * 2**20
    # Each thread of the matrix library packs its own; and what is freed is given back, so that no hole counts.
    exact = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, (T, H, V, budget))],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | exact,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, *used = (int(found) / 2**20 for found in re.findall(r"used (-?\d+)", done.stdout))
    # A second float32 sum would take 6 MiB; a copy of a head's gradient, or a sum apart from it, 3 MiB.
    assert len(used) == 4 and max(used) < 6 and max(used) - min(used) < 1, f"{used} MiB, of a budget of 5"


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("memory_budget", [2**26, 2**31])
def test_large(shared: bool, memory_budget: int) -> None:
    heads = Heads(3, 1, shared, H=512, V=32001)
    where = Where(torch.device("cuda"), torch.bfloat16)
    y = targets((3, 1000), heads.V, where.device, ignored=0.4)
    counts = (y != -100).sum(1).tolist()
    compare(heads, heads.tensors(where, (1000,)), y, memory_budget, head_weights=decay(3), num_targets=counts)


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("shared", [False, True])
def test_memory_on_the_gpu(shared: bool) -> None:
    heads, T, budget = Heads(4, 1, shared, biased=False, H=512, V=128256), 8192, 2**28
    flat = [t.requires_grad_() for t in heads.tensors(Where(torch.device("cuda"), torch.bfloat16), (T,))]
    y = targets((4, T), heads.V, flat[0].device)
    op(*heads.arguments([flat[0][:128], *flat[1:]], y[:, :128]))[0].backward()
    for t in flat:
        t.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op(*heads.arguments(flat, y), memory_budget=budget)[0].backward()
    used = torch.cuda.max_memory_allocated() - before
    sums = 4 * (flat[1].numel() + 512 * 512 + T * 512)
    assert used < sum(t.nbytes for t in flat) + sums + budget + 40 * 2**20, "beyond cuBLAS's own 32 MiB and change"


GOOD: dict[str, Any] = {
    "hidden": torch.ones(2, 4),
    "weight": [torch.ones(5, 4)] * 3,
    "targets": torch.zeros(3, 2, dtype=torch.int64),
    "blocks": [[(torch.ones(4, 4), torch.ones(4))]] * 3,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": [torch.ones(5, 4)] * 2}, "for targets of 3 heads there must be 1 or 3 weights"),
        ({"weight": torch.ones(5, 3)}, r"weight must be \(5, 4\)"),
        ({"weight": [torch.ones(5, 4), torch.ones(5, 4), torch.ones(6, 4)]}, r"weight must be \(5, 4\)"),
        ({"weight": torch.ones(5, 4).double()}, "weight must be torch.float32 on cpu, as hidden is; got torch.float64"),
        ({"bias": torch.ones(5)}, "no bias or as many"),
        ({"bias": [torch.ones(5), torch.ones(4), torch.ones(5)]}, r"bias must be \(5,\)"),
        ({"blocks": [[(torch.ones(4, 4), None)], [], []]}, r"as many blocks; they have \[1, 0, 0\]"),
        ({"blocks": [[(torch.ones(4, 4), None)]] * 2}, "blocks for 3 heads or none"),
        ({"blocks": [*GOOD["blocks"][:2], [(torch.ones(4, 4), None)]]}, "2 of 3 blocks have a bias"),
        ({"blocks": [[(torch.ones(4, 3), torch.ones(4))]] * 3}, r"block's weight must be \(4, 4\)"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"target must be int64 \(2, 2\)"),
        ({"targets": torch.zeros(0, 2, dtype=torch.int64)}, "K > 0"),
        ({"targets": torch.tensor([[0, 1], [2, 5], [0, 0]])}, r"target\[1, 1\] is 5"),
        ({"head_weights": [1.0, 0.5]}, r"head_weights must be \(3,\)"),
        ({"normalizer": torch.ones(2)}, r"normalizer must be \(3,\)"),
        ({"memory_budget": 0}, "memory_budget must be a positive"),
    ],
    ids=str,
)
def test_bad_input(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        op(**GOOD | changed)
