"""Calls of every op that has kernels: dtypes, the sizes that decide a launch (narrow, usual, the widest), and options.

Of each op's product of parameters the calls contain every pair of values. A kernel that none of them launches fails
tests/ops/test_compile_matrix.py: add a call here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from pairwise import cover
from torch import Tensor

from ligermodels import ops
from ligermodels.ops.float8.tail import tail_of
from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.ops.optimizer.adamw import Shard
from ligermodels.speculative.tree import Tree, default_tree

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = BF16, F32  # float16 compiles as bfloat16 does, except for products and the unpacking of int4
PRODUCTS = BF16, F32, F16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

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
    return torch.empty(shape, dtype=dtype).fill_(0.5).requires_grad_(grad)


def backward(*outputs: Any) -> None:
    """Gradients of all outputs."""
    found = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    if found:
        torch.autograd.backward(found, [torch.ones_like(y) for y in found])


# -- norms, activations, rotary positions ------------------------------------------------------------------------------

WIDTHS = (48, 2560, 4096, 32768)
GRADS = ((True, True), (True, False), (False, True))  # of the input, of the weight


@calls("rms_norm", dtype=FLOATS, width=WIDTHS, casting=("llama", "gemma"), after=(False, True), grads=GRADS)
def rms_norm(dtype: torch.dtype, width: int, casting: Any, after: bool, grads: tuple[bool, bool]) -> None:
    x, weight = leaf(300, width, dtype=dtype, grad=grads[0]), leaf(width, dtype=dtype, grad=grads[1])
    residual = leaf(300, width, dtype=dtype) if after else None
    backward(ops.rms_norm(x, weight, 1e-6, casting_mode=casting, residual=residual))
    if grads[0]:
        backward(ops.rms_norm(x, None, 1e-6))


@calls("add_rms_norm", dtype=FLOATS, width=WIDTHS, casting=("llama", "gemma"), grads=GRADS)
def add_rms_norm(dtype: torch.dtype, width: int, casting: Any, grads: tuple[bool, bool]) -> None:
    x, residual = (leaf(300, width, dtype=dtype, grad=grads[0]) for _ in range(2))
    weight = leaf(width, dtype=dtype, grad=grads[1])
    backward(*ops.add_rms_norm(x, residual, weight, 1e-6, casting_mode=casting))


@calls("layer_norm", dtype=FLOATS, width=WIDTHS, affine=((True, True), (True, False), (False, False)), grads=GRADS)
def layer_norm(dtype: torch.dtype, width: int, affine: tuple[bool, bool], grads: tuple[bool, bool]) -> None:
    x = leaf(300, width, dtype=dtype, grad=grads[0])
    weight, bias = (leaf(width, dtype=dtype, grad=grads[1]) if given else None for given in affine)
    backward(ops.layer_norm(x, weight, bias, 1e-6))


@calls("gated_rms_norm", dtype=FLOATS, width=(48, 128, 2048, 8192), grads=GRADS)
def gated_rms_norm(dtype: torch.dtype, width: int, grads: tuple[bool, bool]) -> None:
    x, z = (leaf(100, 4, width, dtype=dtype, grad=grads[0]) for _ in range(2))
    backward(ops.gated_rms_norm(x, z, leaf(width, dtype=dtype, grad=grads[1]), 1e-6))


@calls(
    "swiglu, geglu", dtype=FLOATS, width=(96, 1100, 14336), packed=(True, False), grads=GRADS,
    options=(GLUOptions("silu"), GLUOptions("gelu_tanh"), GLUOptions("gelu"), GLUOptions("silu", 0.5, 2.0, 7.0, 1.0)),
)  # fmt: skip
def glu(dtype: torch.dtype, width: int, packed: bool, grads: tuple[bool, bool], options: GLUOptions) -> None:
    if packed:
        backward(ops.gated_activation(leaf(8, 2 * width, dtype=dtype), options))
        return
    gate, up = (leaf(8, width, dtype=dtype, grad=grad) for grad in grads)
    name, *numbers = options
    names = "gate_multiplier", "down_multiplier", "limit", "up_offset"
    op = ops.swiglu if name == "silu" else partial(ops.geglu, approximate="tanh" if "tanh" in name else "none")
    backward(op(gate, up, **dict(zip(names, numbers, strict=True))))


HEADS = ((8, 4, 128, 64), (1, 1, 80, 20), (4, 2, 256, 128))  # key heads, group, channels, half rotated


@calls("rope", dtype=FLOATS, heads=HEADS, grads=GRADS)
def rope(dtype: torch.dtype, heads: tuple[int, int, int, int], grads: tuple[bool, bool]) -> None:
    count, group, dim, half = heads
    q = leaf(2, 70, count * group, dim, dtype=dtype, grad=grads[0])
    k = leaf(2, 70, count, dim, dtype=dtype, grad=grads[1])
    backward(*ops.rope(q, k, *(leaf(1, 70, half, dtype=dtype, grad=False) for _ in range(2))))


NORMS = ((False, False), (True, True), (False, True), (True, False))


@calls(
    "rope_qkv", dtype=FLOATS, heads=HEADS, norms=NORMS, casting=("llama", "gemma"), rotated=(True, False), grads=GRADS
)
def rope_qkv(
    dtype: torch.dtype, heads: tuple[int, int, int, int], norms: tuple[bool, bool], casting: Any, rotated: bool,
    grads: tuple[bool, bool],
) -> None:  # fmt: skip
    count, group, dim, half = heads
    tables = [leaf(1, 700, half, dtype=dtype, grad=False) if rotated else None for _ in range(2)]
    weights = [leaf(dim, dtype=dtype, grad=grads[1]) if norm else None for norm in norms]
    qkv = leaf(2, 700, (count * group + 2 * count) * dim, dtype=dtype, grad=grads[0])
    backward(*ops.rope_qkv(qkv, *tables, count, group, dim, *weights, casting_mode=casting))


@calls("rope_qkv_cached", dtype=FLOATS, heads=HEADS, norms=NORMS, value_norm=(None, 1e-6), rotated=(True, False))
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

VOCABULARIES = (1000, 32000, 128256)
LOSSES: tuple[dict[str, Any], ...] = (
    {}, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "return_rank": True},
    {"logit_scale": 0.5, "token_scaling": True, "return_predicted": True},
)  # fmt: skip


def class_weights(given: bool, vocabulary: int) -> Tensor | None:
    return torch.ones(vocabulary) if given else None


@calls(
    "cross_entropy", dtype=FLOATS, vocabulary=VOCABULARIES, options=LOSSES, weighted=(False, True), mean=(True, False)
)
def cross_entropy(
    dtype: torch.dtype, vocabulary: int, options: dict[str, Any], weighted: bool, mean: bool
) -> None:  # fmt: skip
    logits, weights = leaf(6, vocabulary, dtype=dtype), class_weights(weighted, vocabulary)
    reduction = "mean" if mean else "none"
    found = ops.cross_entropy(logits, torch.arange(6), class_weights=weights, reduction=reduction, **options)
    backward(*(found if isinstance(found, tuple) else (found,)))


@calls(
    "linear_cross_entropy", dtype=FLOATS, vocabulary=(32000,), options=LOSSES, weighted=(False, True),
    mean=(True, False), grads=GRADS,
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


@calls("linear_log_probs", dtype=FLOATS, vocabulary=VOCABULARIES[:2], softcap=(None, 30.0), entropy=(False, True))
def linear_log_probs(dtype: torch.dtype, vocabulary: int, softcap: float | None, entropy: bool) -> None:
    hidden, weight = leaf(6, 16, dtype=dtype), leaf(vocabulary, 16, dtype=dtype)
    more = dict.fromkeys(
        ("return_entropy", "return_lse", "return_predicted", "return_rank", "entropy_in_loss"), entropy
    )
    found = ops.linear_log_probs(hidden, weight, torch.arange(6), softcap=softcap, **more)
    backward(*(found[:3] if entropy else (found,)))


# -- decoding ----------------------------------------------------------------------------------------------------------


@calls(
    "decode_attention", dtype=PRODUCTS, dim=(80, 128, 256, 512), tokens=(1, 5, 64), length=(40, 8192),
    kind=("plain", "window", "softcap", "tree", "sinks"),
)  # fmt: skip
def decode_attention(dtype: torch.dtype, dim: int, tokens: int, length: int, kind: str) -> None:
    q = leaf(2, tokens, 32, dim, dtype=dtype, grad=False)
    caches = [leaf(2, length + tokens, 8, dim, dtype=dtype, grad=False) for _ in range(2)]
    options: dict[str, Any] = {
        "window": {"window": 32}, "softcap": {"softcap": 50.0}, "sinks": {"sinks": leaf(32, dtype=dtype, grad=False)},
        "tree": {"tree_mask": torch.ones(tokens, tokens, dtype=torch.bool)},
    }.get(kind, {})  # fmt: skip
    ops.decode_attention(q, *caches, torch.tensor([length, 3]), **options)


@calls("compact_kv_cache", dtype=FLOATS, slots=(3, 512))
def compact_kv_cache(dtype: torch.dtype, slots: int) -> None:
    stored = leaf(2, 2, 600, 1024, dtype=dtype, grad=False)
    ops.compact_kv_cache(stored, torch.arange(slots).expand(2, slots).contiguous())


@calls("topk_indices", dtype=FLOATS, vocabulary=(100, 4096, 128256), k=(1, 10, 64))
def topk_indices(dtype: torch.dtype, vocabulary: int, k: int) -> None:
    ops.topk_indices(leaf(4, vocabulary, dtype=dtype, grad=False), k)


TREES = (Tree.from_paths([]), default_tree(5), default_tree(4, 300))


@calls("tree_inputs", tree=TREES, moving=(None, 7))
def tree_inputs(tree: Tree, moving: int | None) -> None:
    root = torch.ones(2, dtype=torch.long)
    best = torch.ones(2, tree.max_depth, tree.width, dtype=torch.long)
    ops.tree_inputs(best, root, root, tree.depth, tree.rank, torch.tensor([9]), moving)


@calls("accept_path", dtype=FLOATS, tree=TREES[:2], hidden=(64, 5120), masked=(False, True))
def accept_path(dtype: torch.dtype, tree: Tree, hidden: int, masked: bool) -> None:
    nodes, ones = len(tree), torch.ones(2, dtype=torch.long)
    zeros = torch.zeros(nodes, tree.max_depth + 1, dtype=torch.long)
    rows = ops.Sequences(
        torch.ones(2, 40, dtype=torch.long), *(ones.clone() for _ in range(4)), leaf(2, hidden, dtype=dtype, grad=False),
        torch.zeros(2, dtype=torch.bool), ones.clone(),
    )  # fmt: skip
    tokens = torch.ones(2, nodes, dtype=torch.long)
    states = leaf(2, nodes, hidden, dtype=dtype, grad=False)
    judged = (torch.ones(2, nodes, dtype=torch.bool), torch.ones(2, nodes)) if masked else ()
    paths = ops.Paths(tree.parent, tree.depth, zeros)
    ops.accept_path(rows, paths, tokens, tokens, tokens, states, torch.tensor([2]), 9, *judged)


# -- linear attention --------------------------------------------------------------------------------------------------


@calls("causal_conv", dtype=FLOATS, width=(2, 4), tokens=(1, 300), kind=("plain", "earlier", "packed"), grads=GRADS)
def causal_conv(dtype: torch.dtype, width: int, tokens: int, kind: str, grads: tuple[bool, bool]) -> None:
    x, weight = leaf(1, tokens, 512, dtype=dtype, grad=grads[0]), leaf(512, width, dtype=dtype, grad=grads[1])
    earlier = leaf(1, width - 1, 512, dtype=dtype, grad=False) if kind == "earlier" else None
    bounds = torch.tensor([0, tokens], dtype=torch.int32) if kind == "packed" else None
    backward(ops.causal_conv(x, weight, earlier=earlier, cu_seqlens=bounds))


@calls("causal_conv of trees, causal_conv_step, commit_conv_inputs", dtype=FLOATS, width=(2, 4), earlier=(False, True))
def conv_decoding(dtype: torch.dtype, width: int, earlier: bool) -> None:
    tree, weight = (TREES[1].parent, TREES[1].depth), leaf(512, width, dtype=dtype, grad=False)
    x, inputs = (leaf(2, n, 512, dtype=dtype, grad=False) for n in (len(TREES[1]), width - 1))
    ops.causal_conv(x, weight, earlier=inputs if earlier else None, tree=tree)
    ops.causal_conv_step(x[:, :1], weight, inputs)
    ops.commit_conv_inputs(inputs, x, torch.tensor([1, 2]), tree)


def delta_operands(dtype: torch.dtype, tokens: int, dims: tuple[int, int], grad: bool) -> list[Tensor]:
    q, k = (leaf(1, tokens, 2, dims[0], dtype=dtype, grad=grad) for _ in range(2))
    gates = (leaf(1, tokens, 4, dtype=F32, grad=grad) for _ in range(2))
    return [q, k, leaf(1, tokens, 4, dims[1], dtype=dtype, grad=grad), *gates]


@calls("delta_gates", dtype=FLOATS, heads=(32, 3))
def delta_gates(dtype: torch.dtype, heads: int) -> None:
    a, b = (leaf(2, 5, heads, dtype=dtype, grad=False) for _ in range(2))
    ops.delta_gates(a, b, *(leaf(heads, dtype=F32, grad=False) for _ in range(2)))


@calls(
    "gated_delta_rule",
    dtype=PRODUCTS,
    dims=((128, 128), (64, 32), (112, 40)),
    packed=(False, True),
    state=(False, True),
)
def gated_delta_rule(dtype: torch.dtype, dims: tuple[int, int], packed: bool, state: bool) -> None:
    operands, bounds = delta_operands(dtype, 200, dims, True), torch.tensor([0, 77, 200], dtype=torch.int32)
    initial = leaf(1, 4, *dims, dtype=F32) if state else None
    bounds_or_none = bounds if packed else None
    backward(*ops.gated_delta_rule(*operands, initial_state=initial, cu_seqlens=bounds_or_none, final_state=state))


@calls("gated_delta_rule_step", dtype=FLOATS, dims=((128, 128), (256, 512), (48, 40)))
def gated_delta_rule_step(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    ops.gated_delta_rule_step(*delta_operands(dtype, 1, dims, False), leaf(1, 4, *dims, dtype=F32, grad=False))


@calls("gated_delta_rule_tree, commit_tree", dtype=PRODUCTS, dims=((128, 128), (256, 512), (48, 40)), nodes=(3, 26, 64))
def gated_delta_rule_tree(dtype: torch.dtype, dims: tuple[int, int], nodes: int) -> None:
    state, ancestors = leaf(1, 4, *dims, dtype=F32, grad=False), torch.ones(nodes, nodes, dtype=torch.bool).tril()
    _, updates = ops.gated_delta_rule_tree(*delta_operands(dtype, nodes, dims, False), state, ancestors)
    ops.commit_tree(state, updates, torch.tensor([1]), ancestors)


# -- linear layers -----------------------------------------------------------------------------------------------------


@calls(
    "linear", dtype=(BF16, F16), rows=(1, 8), features=((128, 512), (40, 72)), bias=(False, True),
    activation=(None, GLUOptions("silu"), GLUOptions("silu", 0.5, 2.0, 7.0, 1.0)),
)  # fmt: skip
def linear(dtype: torch.dtype, rows: int, features: tuple[int, int], bias: bool, activation: GLUOptions | None) -> None:
    n, k = features
    with torch.no_grad():
        more = leaf(n, dtype=dtype) if bias else None
        ops.linear(leaf(rows, k, dtype=dtype), leaf(n, k, dtype=dtype), more, activation=activation)


def quantized_linear(
    dtype: torch.dtype, kind: Any, rows: int, features: tuple[int, int], bias: bool, activation: GLUOptions | None
) -> None:
    n, k = features
    codes, scales = ops.empty_quantized(kind, n, k, torch.device("cpu"))
    scales.fill_(1)
    with torch.no_grad():
        more = leaf(n, dtype=dtype) if bias else None
        ops.quantized_linear(leaf(rows, k, dtype=dtype), codes, scales, more, activation=activation)


for kind in ("int4", "float8"):
    calls(
        f"quantized_linear, {kind}", dtype=(BF16, F16), kind=(kind,), rows=(1, 8, 16, 64),
        features=((128, 4096), (8192, 128), (20000, 72)), bias=(False, True),
        activation=(None, GLUOptions("silu")),
    )(quantized_linear)  # fmt: skip


# -- float8 ------------------------------------------------------------------------------------------------------------


@calls(
    "float8_cast", dtype=FLOATS, to=(E4M3, E5M2), layouts=((True, False), (True, True), (False, True)), width=(64, 4096)
)
def float8_cast(dtype: torch.dtype, to: torch.dtype, layouts: tuple[bool, bool], width: int) -> None:
    x = leaf(300, width, dtype=dtype, grad=False)
    found = ops.float8_cast(x, to, rows=layouts[0], columns=layouts[1])
    if found.rows is not None:
        ops.float8_transpose(found.rows)


@calls("float8_cast by row", dtype=FLOATS, to=(E4M3, E5M2), width=(64, 2048, 14336), tail=(0, 128))
def float8_cast_by_row(dtype: torch.dtype, to: torch.dtype, width: int, tail: int) -> None:
    ops.float8_cast(leaf(300, width, dtype=dtype, grad=False), to, by_row=True, tail=tail)


@calls(
    "float8_swiglu, float8_geglu", dtype=FLOATS, activation=("silu", "tanh", "none"), width=(64, 4096),
    by_row=(False, True), limit=(None, 7.0),
)  # fmt: skip
def float8_glu(dtype: torch.dtype, activation: str, width: int, by_row: bool, limit: float | None) -> None:
    options: dict[str, Any] = {"by_row": by_row, "columns": not by_row, "limit": limit}
    op = ops.float8_swiglu if activation == "silu" else partial(ops.float8_geglu, approximate=activation)
    backward(op(leaf(300, 2 * width, dtype=dtype), E4M3, E5M2, **options).dequantize())


@calls(
    "float8_add_rms_norm", dtype=FLOATS, width=(64, 4096, 5120, 32768), add=(False, True), casting=("llama", "gemma"),
    by_row=(False, True),
)  # fmt: skip
def float8_add_rms_norm(dtype: torch.dtype, width: int, add: bool, casting: Any, by_row: bool) -> None:
    x, weight = leaf(300, width, dtype=dtype), leaf(width, dtype=dtype)
    residual = leaf(300, width, dtype=dtype) if add else None
    options: dict[str, Any] = {"casting_mode": casting, "by_row": by_row, "columns": not by_row}
    y, total = ops.float8_add_rms_norm(x, residual, weight, 1e-6, E4M3, **options)
    backward(y.dequantize(), total)


@calls("float8_linear", dtype=FLOATS, frozen=(False, True))
def float8_linear(dtype: torch.dtype, frozen: bool) -> None:
    x, weight = leaf(64, 256, dtype=dtype), leaf(128, 256, dtype=dtype, grad=not frozen)
    backward(ops.float8_linear(x, weight, recipe=ops.Float8Recipe()))


@calls("float8_lora_linear", dtype=FLOATS, rank=(4, 64, 200), tail=(False, True), dropped=(False, True))
def float8_lora_linear(dtype: torch.dtype, rank: int, tail: bool, dropped: bool) -> None:
    x, weight = leaf(600, 256, dtype=dtype), leaf(128, 256, dtype=dtype, grad=False)
    tails = {"tail": tail_of(rank)} if tail else {}
    w8 = ops.float8_cast(weight, E4M3, columns=not tail, **tails)
    a, b = leaf(rank, 256, dtype=dtype), leaf(128, rank, dtype=dtype)
    other = leaf(600, 256, dtype=dtype) if dropped else None
    backward(ops.float8_lora_linear(x, w8, a, b, recipe=ops.Float8Recipe(), dropped=other))


# -- optimizer ---------------------------------------------------------------------------------------------------------


@calls(
    "adamw_step", dtypes=((F32,) * 4, (BF16,) * 4, (BF16, BF16, F32, F32)), seeds=(None, (1,)), shard=(None, (16, 3))
)
def adamw_step(dtypes: tuple[torch.dtype, ...], seeds: Any, shard: tuple[int, int] | None) -> None:
    tensors = [leaf(8, 60, dtype=dtype, grad=False) for dtype in dtypes]
    whole = None if shard is None else Shard((16, 63), (0, shard[1]))
    ops.adamw_step(
        *tensors, step=1, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, rounding_seeds=seeds, shard=whole
    )


def named_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    return ((name, call) for name, cases in CALLS.items() for call in cases)
