"""Ops on DTensors against the same ops on whole tensors, in each of two processes: sharded_ops.py PORT.

The second rank is a fork of the first, which has imported everything and run nothing."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import loss_cases
import torch
import torch.distributed as dist
from interpreter import quicken
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ligermodels import ops
from ligermodels.errors import InputError

R, WORLD = Replicate(), 2
FROZEN: tuple[tuple[int, ...], ...] = ((), (1, 2), (0,))
"""Of hidden states, weight and bias."""


def table(x: torch.Tensor, batch: int = 1) -> torch.Tensor:
    return torch.linspace(-1, 1, batch * x.shape[1] * 4).view(batch, x.shape[1], 4)


# Op, shapes, and the placements to try: those of the inputs, then those expected of the outputs and of the gradients.
CASES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], list[tuple[list[Any], list[Any], list[Any]]]]] = [
    (
        "rms_norm",
        lambda x, w: ops.rms_norm(x, w, 1e-6),
        [(2, 4, 12), (12,)],
        [([s, R], [s], [s, Partial()]) for s in (Shard(0), Shard(1))] + [([R, R], [R], [R, R])],
    ),
    ("rms_norm, odd", lambda x, w: ops.rms_norm(x, w, 1e-6), [(3, 12), (12,)], [([Shard(0), R], [Shard(0)], [])]),
    ("rms_norm, columns", lambda x, w: ops.rms_norm(x, w, 1e-6), [(2, 12), (12,)], [([Shard(1), Shard(0)], [], [])]),
    ("rms_norm, no weight", lambda x: ops.rms_norm(x, None, 1e-6), [(2, 12)], [([Shard(0)], [Shard(0)], [Shard(0)])]),
    (
        "rms_norm and a sum",
        lambda x, r, w: ops.rms_norm(x, w, 1e-6, residual=r, casting_mode="gemma", offset=1.0),
        [(2, 4, 12), (2, 4, 12), (12,)],
        [([Shard(1), Shard(1), R], [Shard(1)], [Shard(1), Shard(1), Partial()]), ([Shard(0), R, R], [], [])],
    ),
    (
        "add_rms_norm",
        lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6),
        [(2, 4, 12), (2, 4, 12), (12,)],
        [([s, s, R], [s, s], [s, s, Partial()]) for s in (Shard(0), Shard(1))],
    ),
    (
        "layer_norm",
        lambda x, w, b: ops.layer_norm(x, w, b, 1e-6),
        [(2, 4, 12), (12,), (12,)],
        [([s, R, R], [s], [s, Partial(), Partial()]) for s in (Shard(0), Shard(1))],
    ),
    ("swiglu", ops.swiglu, [(2, 4, 8)], [([s], [s], [s]) for s in (Shard(0), Shard(1), Shard(2), R)]),
    (
        "swiglu with multipliers",
        lambda x: ops.swiglu(x, gate_multiplier=0.7, down_multiplier=2.0),
        [(2, 4, 8)],
        [([s], [s], [s]) for s in (Shard(0), Shard(2))],
    ),
    ("swiglu, a pair cut", ops.swiglu, [(4, 6)], [([Shard(1)], [], [])]),
    ("geglu of two", ops.geglu, [(2, 8), (2, 8)], [([s, s], [s], [s, s]) for s in (Shard(0), Shard(1))]),
    (
        "rope",
        lambda q, k: ops.rope(q, k, table(q), table(q)),
        [(2, 2, 4, 10), (2, 2, 2, 10)],
        [([s, s], [s, s], [s, s]) for s in (Shard(0), Shard(1), Shard(2))],
    ),
    (
        "rope, each sequence its own",
        lambda q, k: ops.rope(q, k, table(q, 2), table(q, 2)),
        [(2, 2, 4, 10), (2, 2, 2, 10)],
        [([s, s], [s, s], [s, s]) for s in (Shard(0), Shard(2))],
    ),
    (
        "rope_qkv",
        lambda x, q, k: ops.rope_qkv(x, table(x), table(x), 2, 3, 8, q, k),
        [(2, 2, 80), (8,), (8,)],
        [([s, R, R], [s] * 3, [s, Partial(), Partial()]) for s in (Shard(0), Shard(1))],
    ),
]


def run(op: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs = op(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    loss = sum((y * y * (1 + i)).sum() for i, y in enumerate(outputs))
    return outputs, list(torch.autograd.grad(loss, inputs))


def check_cases(mesh: Any, kernels: bool) -> None:
    for name, op, shapes, placements in CASES:
        if name == "swiglu, a pair cut" and not kernels:
            continue  # torch refuses to split a dimension of uneven shards
        torch.manual_seed(0)
        whole = [torch.randn(shape) for shape in shapes]
        outputs, gradients = run(op, [x.clone().requires_grad_() for x in whole])
        for given, of_outputs, of_gradients in placements if kernels else placements[:1]:
            inputs = [distribute_tensor(x, mesh, [p]).requires_grad_() for x, p in zip(whole, given, strict=True)]
            try:
                found, found_gradients = run(op, inputs)
            except Exception as error:
                raise AssertionError(f"{name}, {given}") from error
            for one, two in zip([*found, *found_gradients], [*outputs, *gradients], strict=True):
                assert isinstance(one, DTensor), name
                torch.testing.assert_close(one.full_tensor(), two, rtol=2e-6, atol=2e-6, msg=f"{name}, {given}")
            if kernels:
                for wanted, results in ((of_outputs, found), (of_gradients, found_gradients)):
                    for placement, result in zip(wanted, results, strict=False):
                        assert result.placements == (placement,), (name, given, placement, result.placements)


def check_plain_weights(mesh: Any) -> None:
    """A plain weight beside sharded rows is replicated, and its gradient is the sum over the ranks."""
    x, weight = torch.randn(4, 40), torch.randn(40)
    wanted = run(lambda w: ops.rms_norm(x, w, 1e-6), [weight.clone().requires_grad_()])[1][0]
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    found = run(lambda w: ops.rms_norm(sharded, w, 1e-6), [weight.clone().requires_grad_()])[1][0]
    torch.testing.assert_close(found, wanted)


def check_vocabulary_shards(mesh: Any, kernels: bool) -> None:
    """Losses, log-probabilities and all gradients of heads and logits whose classes are sharded, also where the ranks
    do not divide them: in float64 by torch, in float32 by the kernels."""
    dtype, tolerances = (torch.float32, {"rtol": 1e-4, "atol": 1e-5}) if kernels else (torch.float64, {})
    V, log_probs = 37, dict.fromkeys(("entropy", "lse", "rank", "predicted"), True)
    ops_options: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (ops.linear_log_probs, {}),
        (ops.linear_log_probs, {f"return_{name}": True for name in log_probs} | {"softcap": 3.0, "logit_scale": 0.7}),
    ]
    temperature = torch.linspace(0.5, 2.0, 10).view(2, 5)
    sampler = {"temperature": temperature, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "return_log_kept_mass": True}
    ops_options += [(ops.linear_log_probs, sampler | {"return_entropy": True}), (ops.linear_log_probs, {"top_p": 0.3})]
    torch.manual_seed(0)
    y = loss_cases.targets((2, 5), V, torch.device("cpu"))
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((2, 5, 10), (V, 10), (V,)))
    weight[5] *= 20  # a class of one rank that takes nearly all of some rows
    few = ("mean", "all", "all terms", "mean of all terms")
    cases = [(op, options, ((),) if kernels else FROZEN) for op, options in ops_options]
    for name in few if kernels else (loss_cases.OPTIONS | loss_cases.TERMS):
        options = loss_cases.options_for(name, y, V)
        cases.append((ops.linear_cross_entropy, options, FROZEN if name in few and not kernels else ((),)))
    for op, options, subsets in cases:
        ignored = options.get("ignore_index", -100)
        target = y.masked_fill(y == -100, ignored)
        for frozen in subsets:
            results, gradients = [], []
            for sharded in (False, True):
                given = [hidden.clone(), weight.clone(), bias.clone()]
                if sharded:
                    given = [given[0], *(distribute_tensor(x, mesh, [Shard(0)]) for x in given[1:])]
                operands = [x.requires_grad_(i not in frozen) for i, x in enumerate(given)]
                found = op(operands[0], operands[1], target, operands[2], memory_budget=1000, **options)
                results.append(found if isinstance(found, tuple) else (found,))
                finite = [x.where(x.isfinite(), 0) for x in results[-1] if x is not None and x.requires_grad]
                sum((x * x.sin()).sum() for x in finite).backward()
                gradients.append([x.grad for x in operands])
            check_equal(*results, f"{op.__name__}, {options}", tolerances)
            check_equal(*gradients, f"{op.__name__}, {options}, frozen {frozen}", tolerances)
        if op is not ops.linear_cross_entropy:
            continue
        logits = torch.nn.functional.linear(hidden, weight, bias)
        whole = logits.clone().requires_grad_()
        shards, own = (distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_() for _ in range(2))
        results = [ops.cross_entropy(x, target, **options) for x in (whole, shards)]
        results = [x if isinstance(x, tuple) else (x,) for x in results]
        check_equal(*results, f"cross_entropy, {options}", tolerances)
        for found in results:
            (found[0] * found[0].sin()).sum().backward()
        own.to_local().sum().backward()
        assert shards.grad.placements == own.grad.placements  # Shard(2), where torch keeps it
        check_equal([whole.grad], [shards.grad], f"cross_entropy, {options}", tolerances)


def check_equal(wanted: Any, found: Any, what: str, tolerances: dict[str, float]) -> None:
    for one, two in zip(wanted, found, strict=True):
        assert (one is None) == (two is None), what
        if one is not None:
            two = two.full_tensor() if isinstance(two, DTensor) else two
            torch.testing.assert_close(two, one, msg=lambda m: f"{what}: {m}", **tolerances)


def check_refusals(mesh: Any) -> None:
    def whole(*shape: int, dtype: torch.dtype | None = None) -> DTensor:
        return distribute_tensor(torch.ones(shape, dtype=dtype), mesh, [R])

    ids = whole(4, dtype=torch.long)
    calls: dict[str, Callable[[], Any]] = {
        "cross_entropy": lambda: ops.cross_entropy(whole(4, 9), ids),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(torch.ones(4, 8), whole(9, 8), torch.ones(4).long()),
        "cross_entropy ": lambda: ops.cross_entropy(torch.ones(4, 9), torch.ones(4).long(), class_weights=whole(9)),
        "linear_log_probs": lambda: ops.linear_log_probs(torch.ones(4, 8), whole(9, 8), torch.ones(4).long()),
        "topk_indices": lambda: ops.topk_indices(whole(4, 9), 2),
        "route_tokens": lambda: ops.route_tokens(whole(4, 9), options=ops.RouterOptions(2)),
        "grouped_mm": lambda: ops.grouped_mm(whole(4, 8), whole(1, 9, 8), torch.tensor([4], dtype=torch.int32)),
        "compact_kv_cache": lambda: ops.compact_kv_cache(whole(4, 2, 2), torch.zeros(4, 1).long()),
        "decode_attention": lambda: ops.decode_attention(
            whole(1, 1, 2, 8), whole(1, 4, 2, 8), whole(1, 4, 2, 8), torch.zeros(1).int()
        ),
        "adamw_step": lambda: ops.adamw_step(
            *(whole(4) for _ in range(4)), step=1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
        ),
    }
    for name, call in calls.items():
        try:
            call()
        except InputError as error:
            assert str(error).startswith(f"{name.strip()} takes no DTensors") and "to_local()" in str(error), error
        else:
            raise AssertionError(f"{name} took a DTensor")
    rows = distribute_tensor(torch.ones(9, 8), mesh, [Shard(0)])
    some = torch.ones(4, 8), torch.zeros(4).long()
    for words, call in {
        "bias must be a DTensor on the mesh of weight": lambda: ops.linear_cross_entropy(
            some[0], rows, some[1], torch.ones(9)
        ),
        "weight must be plain or Shard(0), got (Shard(dim=1),)": lambda: ops.linear_log_probs(
            some[0], distribute_tensor(torch.ones(9, 8), mesh, [Shard(1)]), some[1]
        ),
        "logits must be plain or Shard(1), got (Shard(dim=0),)": lambda: ops.cross_entropy(rows, torch.zeros(9).long()),
        "has 1 classes, too few": lambda: ops.cross_entropy(
            distribute_tensor(torch.ones(4, 1), mesh, [Shard(1)]), some[1]
        ),
        "target[0] is 9": lambda: ops.linear_cross_entropy(some[0], rows, some[1] + 9),
        "linear_distillation takes no DTensors": lambda: ops.linear_distillation(some[0], rows, some[0], rows),
    }.items():
        try:
            call()
        except InputError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error: {words}")
    try:
        ops.rms_norm(torch.ones(4, 40), whole(40), 1e-6)
    except InputError as error:
        assert "rms_norm: weight is a DTensor" in str(error), error
    else:
        raise AssertionError("a plain x took a sharded weight")


def main(rank: int, port: str) -> None:
    torch.set_num_threads(1)
    quicken()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,))
    for kernels in (False, True):
        with ops.set_backend("triton" if kernels else "reference"):
            check_cases(mesh, kernels)
            check_plain_weights(mesh)
            check_vocabulary_shards(mesh, kernels)
            check_refusals(mesh)
    dist.barrier()
    if rank == 0 and os.wait()[1]:
        raise RuntimeError("the other rank has failed")
    os._exit(0)  # gloo's threads may crash a process that tears them down


if __name__ == "__main__":
    other = os.fork()
    try:
        main(0 if other else 1, sys.argv[1])
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the other rank
