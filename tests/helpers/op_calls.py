"""Calls of every op that has kernels: dtypes, the sizes that decide a launch (narrow, usual, the widest), and options.

Of each op's product of parameters the calls contain every pair of values. A kernel that none of them launches fails
tests/ops/test_compile_matrix.py: add a call here, or in `layer_calls`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy
import torch
from pairwise import cover
from torch import Tensor

from ligermodels import ops
from ligermodels.ops.attention.triton_attention import triton_attention
from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.speculative.block_loss import SlotLoss, Teacher, block_losses
from ligermodels.speculative.tree import Tree, default_tree

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = BF16, F32  # float16 compiles as bfloat16 does, except for products and the unpacking of int4
PRODUCTS = BF16, F32, F16
BOTH = False, True

CALLS: dict[str, list[Callable[[], Any]]] = {}
"""Op, as the table of docs/gpus.md names it -> its calls."""


def calls(name: str, **parameters: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function calls an op with one value of each parameter."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        cases = list(product(*parameters.values()))
        numbered = list(product(*(range(len(values)) for values in parameters.values())))
        for index in cover(numbered) or range(len(cases)):
            call = partial(function, **dict(zip(parameters, cases[index], strict=True)))
            CALLS.setdefault(name, []).append(call)
        return function

    return register


def leaf(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    """Zeros that take neither time nor memory until they are written."""
    zeros = numpy.zeros(shape, f"i{dtype.itemsize}")
    return torch.from_numpy(zeros).view(dtype).requires_grad_(grad)


def backward(*outputs: Any) -> None:
    """Gradients of all outputs."""
    found = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    if found:
        torch.autograd.backward(found, [leaf(*y.shape, dtype=y.dtype, grad=False) for y in found])


# -- norms, activations, rotary positions ------------------------------------------------------------------------------

WIDTHS = (48, 5120, 32768)  # of 5120 and 8192 padded, the backward pass keeps the most tiles in flight
GRADS = ((True, True), (True, False), (False, True))  # of the input, of the weight


@calls("rms_norm", dtype=FLOATS, width=WIDTHS, casting=("llama", "gemma"), after=BOTH, grads=GRADS)
def rms_norm(dtype: torch.dtype, width: int, casting: Any, after: bool, grads: tuple[bool, bool]) -> None:
    x, weight = leaf(300, width, dtype=dtype, grad=grads[0]), leaf(width, dtype=dtype, grad=grads[1])
    residual = leaf(300, width, dtype=dtype) if after else None
    backward(ops.rms_norm(x, weight, 1e-6, casting_mode=casting, residual=residual))


@calls("rms_norm", dtype=FLOATS, width=(128, 5120))
def rms_norm_without_weight(dtype: torch.dtype, width: int) -> None:
    backward(ops.rms_norm(leaf(300, width, dtype=dtype), None, 1e-6))


@calls("add_rms_norm", dtype=FLOATS, width=WIDTHS, casting=("llama", "gemma"), grads=GRADS[:2])
def add_rms_norm(dtype: torch.dtype, width: int, casting: Any, grads: tuple[bool, bool]) -> None:
    x, residual = (leaf(300, width, dtype=dtype, grad=grads[0]) for _ in range(2))
    weight = leaf(width, dtype=dtype, grad=grads[1])
    backward(*ops.add_rms_norm(x, residual, weight, 1e-6, casting_mode=casting))


@calls("layer_norm", dtype=FLOATS, width=WIDTHS, affine=((True, True), (True, False), (False, False)), grads=GRADS)
def layer_norm(dtype: torch.dtype, width: int, affine: tuple[bool, bool], grads: tuple[bool, bool]) -> None:
    x = leaf(300, width, dtype=dtype, grad=grads[0])
    weight, bias = (leaf(width, dtype=dtype, grad=grads[1]) if given else None for given in affine)
    backward(ops.layer_norm(x, weight, bias, 1e-6))


@calls("gated_rms_norm", dtype=FLOATS, width=(48, 128, 8192), before=BOTH, gate=("silu", "sigmoid"), grads=GRADS)
def gated_rms_norm(dtype: torch.dtype, width: int, before: bool, gate: str, grads: tuple[bool, bool]) -> None:
    x, z = (leaf(100, 4, width, dtype=dtype, grad=grads[0]) for _ in range(2))
    backward(ops.gated_rms_norm(x, z, leaf(width, dtype=dtype, grad=grads[1]), 1e-6, before, gate))


@calls(
    "swiglu, geglu", dtype=FLOATS, width=(96, 14336), packed=BOTH, grads=GRADS,
    options=(
        GLUOptions("silu"), GLUOptions("gelu"), GLUOptions("gelu_tanh", 0.5, 2.0, 7.0, 1.0),
        GLUOptions("clamped_silu", limit=4.0),
    ),
)  # fmt: skip
def glu(dtype: torch.dtype, width: int, packed: bool, grads: tuple[bool, bool], options: GLUOptions) -> None:
    if packed:
        backward(ops.gated_activation(leaf(8, 2 * width, dtype=dtype), options))
        return
    gate, up = (leaf(8, width, dtype=dtype, grad=grad) for grad in grads)
    name, *numbers = options
    names = "gate_multiplier", "down_multiplier", "limit", "up_offset"
    silu = partial(ops.swiglu, limit_activation=name == "clamped_silu")
    op = silu if "silu" in name else partial(ops.geglu, approximate="tanh" if "tanh" in name else "none")
    backward(op(gate, up, **dict(zip(names, numbers, strict=True))))


HEADS = ((8, 4, 128, 64), (1, 1, 80, 20), (4, 2, 256, 128))  # key heads, group, channels, half rotated


@calls("rope", dtype=FLOATS, heads=HEADS, grads=GRADS[:2])
def rope(dtype: torch.dtype, heads: tuple[int, int, int, int], grads: tuple[bool, bool]) -> None:
    count, group, dim, half = heads
    q = leaf(2, 70, count * group, dim, dtype=dtype, grad=grads[0])
    k = leaf(2, 70, count, dim, dtype=dtype, grad=grads[1])
    backward(*ops.rope(q, k, *(leaf(1, 70, half, dtype=dtype, grad=False) for _ in range(2))))


NORMS = ((False, False), (True, True), (False, True))


@calls("rope_qkv", dtype=FLOATS, heads=HEADS, norms=NORMS, casting=("llama", "gemma"), rotated=BOTH, grads=GRADS[:2])
def rope_qkv(
    dtype: torch.dtype, heads: tuple[int, int, int, int], norms: tuple[bool, bool], casting: Any, rotated: bool,
    grads: tuple[bool, bool],
) -> None:  # fmt: skip
    count, group, dim, half = heads
    tables = [leaf(1, 700, half, dtype=dtype, grad=False) if rotated else None for _ in range(2)]
    weights = [leaf(dim, dtype=dtype, grad=grads[1]) if norm else None for norm in norms]
    qkv = leaf(2, 700, (count * group + 2 * count) * dim, dtype=dtype, grad=grads[0])
    backward(*ops.rope_qkv(qkv, *tables, count, group, dim, *weights, casting_mode=casting))


@calls("rope_qkv_cached", dtype=FLOATS, heads=HEADS, norms=NORMS, value_norm=(None, 1e-6), rotated=BOTH)
def rope_qkv_cached(
    dtype: torch.dtype, heads: tuple[int, int, int, int], norms: tuple[bool, bool], value_norm: Any, rotated: bool
) -> None:
    count, group, dim, half = heads
    tables = [leaf(1, 2, half, dtype=dtype, grad=False) if rotated else None for _ in range(2)]
    weights = [leaf(dim, dtype=dtype, grad=False) if norm else None for norm in norms]
    qkv = leaf(3, 2, (count * group + 2 * count) * dim, dtype=dtype, grad=False)
    caches = [leaf(3, 64, count, dim, dtype=dtype, grad=False) for _ in range(2)]
    slots = torch.tensor([0, 5, 9])
    ops.rope_qkv_cached(qkv, *tables, count, group, dim, *caches, slots, *weights, value_norm_eps=value_norm)


# -- losses ------------------------------------------------------------------------------------------------------------

VOCABULARIES = (1000, 128256)
LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "return_rank": True},
    {"logit_scale": 0.5, "token_scaling": True, "return_predicted": True},
)  # fmt: skip


def class_weights(given: bool, vocabulary: int) -> Tensor | None:
    return torch.ones(vocabulary) if given else None


@calls("cross_entropy", dtype=FLOATS, vocabulary=VOCABULARIES, options=LOSSES, weighted=BOTH, mean=BOTH)
def cross_entropy(
    dtype: torch.dtype, vocabulary: int, options: dict[str, Any], weighted: bool, mean: bool
) -> None:  # fmt: skip
    logits, weights = leaf(6, vocabulary, dtype=dtype), class_weights(weighted, vocabulary)
    reduction = "mean" if mean else "none"
    found = ops.cross_entropy(logits, torch.arange(6), class_weights=weights, reduction=reduction, **options)
    backward(*(found if isinstance(found, tuple) else (found,)))


@calls(
    "linear_cross_entropy", dtype=FLOATS, vocabulary=(32000,), options=LOSSES, weighted=BOTH,
    mean=BOTH, grads=GRADS[:2],
)  # fmt: skip
def linear_cross_entropy(
    dtype: torch.dtype, vocabulary: int, options: dict[str, Any], weighted: bool, mean: bool, grads: tuple[bool, bool]
) -> None:
    hidden, weight = leaf(6, 16, dtype=dtype, grad=grads[0]), leaf(vocabulary, 16, dtype=dtype, grad=grads[1])
    found = ops.linear_cross_entropy(
        hidden, weight, torch.arange(6), class_weights=class_weights(weighted, vocabulary),
        reduction="mean" if mean else "none", **options,
    )  # fmt: skip
    backward(*(found if isinstance(found, tuple) else (found,)))


@calls("linear_log_probs", dtype=FLOATS, vocabulary=(1000, 32000), softcap=(None, 30.0), entropy=BOTH, sampler=BOTH)
def linear_log_probs(dtype: torch.dtype, vocabulary: int, softcap: float | None, entropy: bool, sampler: bool) -> None:
    hidden, weight = leaf(6, 16, dtype=dtype), leaf(vocabulary, 16, dtype=dtype)
    names = "return_entropy", "return_lse", "return_predicted", "return_rank", "entropy_in_loss"
    options: dict[str, Any] = {"temperature": torch.ones(6), "top_p": 0.9} if sampler else {}
    for trained in (weight, weight.detach()):
        found = ops.linear_log_probs(
            hidden, trained, torch.arange(6), softcap=softcap, **dict.fromkeys(names, entropy), **options
        )
        backward(*(found[:3] if entropy else (found,)))


@calls(
    "linear_distillation", dtype=FLOATS, vocabulary=(300, 32000),
    divergence=("forward_kl", "reverse_kl", "jsd", "tv", "l1", "nla", "lk"), softcap=(None, 30.0), trained=BOTH,
    extras=BOTH,
)  # fmt: skip
def linear_distillation(
    dtype: torch.dtype, vocabulary: int, divergence: Any, softcap: float | None, trained: bool, extras: bool
) -> None:
    weight, teacher = leaf(vocabulary, 16, dtype=dtype, grad=trained), leaf(vocabulary, 16, dtype=dtype, grad=False)
    shape = (2, 3, 16) if extras else (2, 16)
    hidden, states = leaf(*shape, dtype=dtype, grad=trained), leaf(2, 16, dtype=dtype, grad=False)
    found = ops.linear_distillation(
        hidden, weight, states, teacher, divergence=divergence, softcap=softcap, teacher_softcap=softcap,
        teacher_lse=torch.ones(2) if extras else None, return_acceptance=extras, return_agreement=extras,
    )  # fmt: skip
    backward(*(found if isinstance(found, tuple) else (found,)))


@calls("losses of draft blocks", dtype=FLOATS, vocabulary=(300, 32000), divergence=("l1", "forward_kl"), reduced=BOTH)
def block_loss(dtype: torch.dtype, vocabulary: int, divergence: str, reduced: bool) -> None:
    hidden, weight = leaf(3, 4, 16, dtype=dtype), leaf(vocabulary, 16, dtype=dtype, grad=False)
    teacher = Teacher(
        hidden.detach(), weight, None, None, 1.0, torch.arange(0, vocabulary, 2) if reduced else None
    )  # fmt: skip
    own, targets, mask = weight[: vocabulary // 2] if reduced else weight, torch.ones(3, 4), torch.ones(3, 4)
    found = block_losses(
        hidden, own, None, None, teacher, targets.long(), mask.bool(), torch.ones(3, 4), SlotLoss(0.1, divergence, 0.9)
    )
    found.total.backward()


# -- attention ---------------------------------------------------------------------------------------------------------

ATTENTION: tuple[tuple[torch.dtype, tuple[int, int], dict[str, Any]], ...] = (
    (BF16, (128, 128), {"packed": True, "sinks": True}),
    (F16, (192, 128), {}),
    (BF16, (256, 256), {"softcap": 50.0, "packed": True, "window": 99}),
    (BF16, (512, 512), {}),
    (F32, (64, 64), {"sinks": True, "window": 99}),
)  # fmt: skip


@calls("attention, backend triton", case=ATTENTION)
def attention(case: tuple[torch.dtype, tuple[int, int], dict[str, Any]]) -> None:
    dtype, (dim, value_dim), options = case  # a product would take minutes
    q, k, v = (leaf(1, 300, heads, d, dtype=dtype) for heads, d in ((8, dim), (2, dim), (2, value_dim)))
    bounds = torch.tensor([0, 77, 300], dtype=torch.int32) if "packed" in options else None
    sinks = leaf(8, dtype=dtype) if "sinks" in options else None
    backward(triton_attention(q, k, v, bounds, sinks, 0.1, options.get("window"), options.get("softcap")))


@calls(
    "block_context_attention",
    case=((BF16, 128, {}), (F16, 64, {"causal": True}), (BF16, 256, {"window": 99}), (BF16, 512, {}), (F32, 80, {})),
)
def block_context(case: tuple[torch.dtype, int, dict[str, Any]]) -> None:
    dtype, dim, options = case
    sizes = (1, 20, 16, 8), (1, 20, 16, 2), (1, 20, 16, 2), (1, 300, 2), (1, 300, 2)
    anchors = torch.arange(0, 300, 15)[None]
    backward(ops.block_context_attention(*(leaf(*size, dim, dtype=dtype) for size in sizes), anchors, **options))


@calls("private_key_attention", dtype=FLOATS, dim=(64, 80, 256), heads=((32, 1), (3, 3)), steps=(0, 6))
@calls("private_key_attention", dtype=(BF16,), dim=(512,), heads=((8, 2),), steps=(3,))
def private_keys(dtype: torch.dtype, dim: int, heads: tuple[int, int], steps: int) -> None:
    q, *others = (leaf(1, 70, n, dim, dtype=dtype) for n in (heads[0], *(heads[1],) * (2 + 2 * steps)))
    backward(ops.private_key_attention(q, *others[:2], others[2 : 2 + steps], others[2 + steps :]))


# -- decoding ----------------------------------------------------------------------------------------------------------


@calls(
    "decode_attention", dtype=FLOATS, dim=(80, 256, 512), tokens=(1, 5, 64), length=(40, 8192),
    kind=("plain", "window", "tree"),
)  # fmt: skip
@calls("decode_attention", dtype=(F16,), dim=(128, 256), tokens=(64,), length=(8192,), kind=("plain",))  # largest tiles
def decode_attention(dtype: torch.dtype, dim: int, tokens: int, length: int, kind: str) -> None:
    q = leaf(2, tokens, 32, dim, dtype=dtype, grad=False)
    caches = [leaf(2, length + tokens, 8, dim, dtype=dtype, grad=False) for _ in range(2)]
    options: dict[str, Any] = {
        "window": {"window": 32, "softcap": 50.0, "sinks": leaf(32, dtype=dtype, grad=False)},
        "tree": {"tree_mask": torch.ones(tokens, tokens, dtype=torch.bool)},
    }.get(kind, {})
    ops.decode_attention(q, *caches, torch.tensor([length, 3]), **options)


@calls("linear, batch invariant", dtype=PRODUCTS, size=((100, 72), (32000, 4096), (33, 64)), bias=BOTH)
def batch_invariant_linear(dtype: torch.dtype, size: tuple[int, int], bias: bool) -> None:
    with ops.set_batch_invariant(True):
        ops.linear(
            leaf(5, size[1], dtype=dtype), leaf(*size, dtype=dtype), leaf(size[0], dtype=dtype) if bias else None
        )


@calls(
    "attention, batch invariant", dtype=PRODUCTS, dim=(16, 80, 128, 256), kind=("plain", "packed", "cache"),
    options=({}, {"window": 32, "softcap": 50.0}),
)  # fmt: skip
def batch_invariant_attention(dtype: torch.dtype, dim: int, kind: str, options: dict[str, Any]) -> None:
    tokens = 1 if kind == "cache" else 300
    q, k, v = (leaf(1, t, h, dim, dtype=dtype, grad=False) for t, h in ((tokens, 8), (300, 2), (300, 2)))
    sinks = leaf(8, dtype=dtype, grad=False) if options else None
    with ops.set_batch_invariant(True):
        if kind == "cache":
            ops.decode_attention(q, k, v, torch.tensor([77]), sinks=sinks, **options)
            return
        bounds = torch.tensor([0, 77, 300], dtype=torch.int32) if kind == "packed" else None
        triton_attention(q, k, v, bounds, sinks, 0.1, options.get("window"), options.get("softcap"))


@calls("compact_kv_cache", dtype=FLOATS, slots=(3, 512))
def compact_kv_cache(dtype: torch.dtype, slots: int) -> None:
    stored = leaf(2, 2, 600, 1024, dtype=dtype, grad=False)
    ops.compact_kv_cache(stored, torch.arange(slots).expand(2, slots).contiguous())


@calls("topk_indices", dtype=FLOATS, vocabulary=(100, 128256), k=(10, 64))
def topk_indices(dtype: torch.dtype, vocabulary: int, k: int) -> None:
    ops.topk_indices(leaf(4, vocabulary, dtype=dtype, grad=False), k)


TREES = (Tree.from_paths([]), default_tree(5), default_tree(4, 300))


@calls("tree_inputs", tree=TREES, moving=(None, 7))
def tree_inputs(tree: Tree, moving: int | None) -> None:
    root = torch.ones(2, dtype=torch.long)
    best = torch.ones(2, tree.max_depth, tree.width, dtype=torch.long)
    ops.tree_inputs(best, root, root, tree.depth, tree.rank, torch.tensor([9]), moving)


@calls("accept_path", dtype=FLOATS, tree=TREES[:2], hidden=(64, 5120), masked=BOTH)
def accept_path(dtype: torch.dtype, tree: Tree, hidden: int, masked: bool) -> None:
    nodes, ones = len(tree), torch.ones(2, dtype=torch.long)
    zeros = torch.zeros(nodes, tree.max_depth + 1, dtype=torch.long)
    text, last = torch.ones(2, 40, dtype=torch.long), leaf(2, hidden, dtype=dtype, grad=False)
    done = torch.zeros(2, dtype=torch.bool)
    rows = ops.Sequences(text, *(ones.clone() for _ in range(4)), last, done, ones.clone())
    tokens = torch.ones(2, nodes, dtype=torch.long)
    states = leaf(2, nodes, hidden, dtype=dtype, grad=False)
    judged = (torch.ones(2, nodes, dtype=torch.bool), torch.ones(2, nodes)) if masked else ()
    paths = ops.Paths(tree.parent, tree.depth, zeros)
    ops.accept_path(rows, paths, tokens, tokens, tokens, states, torch.tensor([2]), 9, *judged)
