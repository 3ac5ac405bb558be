"""More of `op_calls`: ops of linear attention, linear layers in all formats, and the optimizer."""

from typing import Any

import torch
from op_calls import BF16, BOTH, F16, F32, FLOATS, GRADS, PRODUCTS, TREES, backward, calls, leaf
from torch import Tensor

from ligermodels import ops
from ligermodels.ops.float8.tail import tail_of
from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.ops.optimizer.adamw import Shard, adamw_step_in_memory
from ligermodels.ops.optimizer.blockwise import Blockwise
from ligermodels.ops.optimizer.foreach_adamw import AdamWUpdate, foreach_adamw_step
from ligermodels.ops.optimizer.muon import apply_update, momentum_step

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# -- linear attention --------------------------------------------------------------------------------------------------


ACTIVATIONS = ("silu", None)


@calls(
    "causal_conv", dtype=FLOATS, width=(2, 4, 7), tokens=(1, 300), kind=("plain", "earlier", "packed"), bias=BOTH,
    grads=GRADS, activation=ACTIVATIONS,
)  # fmt: skip
def causal_conv(
    dtype: torch.dtype, width: int, tokens: int, kind: str, bias: bool, grads: tuple[bool, bool], activation: str | None
) -> None:
    x, weight = leaf(1, tokens, 512, dtype=dtype, grad=grads[0]), leaf(512, width, dtype=dtype, grad=grads[1])
    earlier = leaf(1, width - 1, 512, dtype=dtype, grad=False) if kind == "earlier" else None
    bounds = torch.tensor([0, tokens], dtype=torch.int32) if kind == "packed" else None
    more = leaf(512, dtype=dtype, grad=grads[1]) if bias else None
    backward(ops.causal_conv(x, weight, more, earlier=earlier, cu_seqlens=bounds, activation=activation))


@calls(
    "causal_conv of trees, causal_conv_step, commit_conv_inputs", dtype=FLOATS, width=(2, 4, 7), earlier=BOTH,
    bias=BOTH, activation=ACTIVATIONS,
)  # fmt: skip
def conv_decoding(dtype: torch.dtype, width: int, earlier: bool, bias: bool, activation: str | None) -> None:
    tree, weight = (TREES[1].parent, TREES[1].depth), leaf(512, width, dtype=dtype, grad=False)
    x, inputs = (leaf(2, n, 512, dtype=dtype, grad=False) for n in (len(TREES[1]), width - 1))
    more = leaf(512, dtype=dtype, grad=False) if bias else None
    ops.causal_conv(x, weight, more, earlier=inputs if earlier else None, tree=tree, activation=activation)
    ops.causal_conv_step(x[:, :1], weight, inputs, more, activation)
    ops.commit_conv_inputs(inputs, x, torch.tensor([1, 2]), tree)


def delta_operands(
    dtype: torch.dtype, tokens: int, dims: tuple[int, int], grad: bool, by_channel: bool = False
) -> list[Tensor]:
    q, k = (leaf(1, tokens, 2, dims[0], dtype=dtype, grad=grad) for _ in range(2))
    g = leaf(1, tokens, 4, *dims[: int(by_channel)], dtype=F32, grad=grad)
    v = leaf(1, tokens, 4, dims[1], dtype=dtype, grad=grad)
    return [q, k, v, g, leaf(1, tokens, 4, dtype=F32, grad=grad)]


@calls(
    "delta_gates", dtype=FLOATS, sizes=((32,), (3,), (32, 128), (3, 40)), tokens=(1, 300), bound=(None, -5.0),
    needs=(*GRADS, (False, False)),
)  # fmt: skip
def delta_gates(
    dtype: torch.dtype, sizes: tuple[int, ...], tokens: int, bound: float | None, needs: tuple[bool, bool]
) -> None:
    a, b = (leaf(2, tokens, *shape, dtype=dtype, grad=needs[0]) for shape in (sizes, sizes[:1]))
    parameters = (leaf(*shape, dtype=F32, grad=needs[1]) for shape in (sizes[:1], sizes))
    gates = ops.delta_gates(a, b, *parameters, bound)
    if any(needs):
        backward(*gates)


@calls(
    "gated_delta_rule",
    case=(
        (BF16, (128, 128), True, True, False), (F16, (112, 40), False, False, False),
        (F32, (128, 128), True, True, False), (BF16, (128, 128), True, True, True),
        (F32, (112, 40), False, False, True),
    ),
)  # fmt: skip
def gated_delta_rule(case: tuple[torch.dtype, tuple[int, int], bool, bool, bool]) -> None:
    dtype, dims, packed, state, by_channel = case  # a product would take minutes: its kernels are the largest
    initial = leaf(1, 4, *dims, dtype=F32) if state else None
    bounds = torch.tensor([0, 77, 100], dtype=torch.int32) if packed else None
    operands = delta_operands(dtype, 100, dims, True, by_channel)
    backward(*ops.gated_delta_rule(*operands, initial_state=initial, cu_seqlens=bounds, final_state=state))


@calls("gated_delta_rule_step", dtype=FLOATS, dims=((128, 128), (256, 512), (48, 40)), by_channel=(False, True))
def gated_delta_rule_step(dtype: torch.dtype, dims: tuple[int, int], by_channel: bool) -> None:
    ops.gated_delta_rule_step(
        *delta_operands(dtype, 1, dims, False, by_channel), leaf(1, 4, *dims, dtype=F32, grad=False)
    )


@calls(
    "gated_delta_rule_tree, commit_tree", dtype=FLOATS, dims=((128, 128), (256, 512), (48, 40)), nodes=(3, 20, 64),
    by_channel=(False, True),
)  # fmt: skip
def gated_delta_rule_tree(dtype: torch.dtype, dims: tuple[int, int], nodes: int, by_channel: bool) -> None:
    state, ancestors = leaf(1, 4, *dims, dtype=F32, grad=False), torch.ones(nodes, nodes, dtype=torch.bool).tril()
    _, updates = ops.gated_delta_rule_tree(*delta_operands(dtype, nodes, dims, False, by_channel), state, ancestors)
    ops.commit_tree(state, updates, torch.tensor([1]), ancestors)


def ssd_operands(
    dtype: torch.dtype, tokens: int, dims: tuple[int, int], skip: bool, grad: bool = False
) -> list[Tensor | None]:
    x, dt = leaf(1, tokens, 4, dims[1], dtype=dtype, grad=grad), leaf(1, tokens, 4, dtype=F32, grad=grad)
    b, c = (leaf(1, tokens, 2, dims[0], dtype=dtype, grad=grad) for _ in range(2))
    rates, weights = (leaf(4, dtype=F32, grad=grad) for _ in range(2))
    return [x, dt, rates, b, c, weights if skip else None]


@calls(
    "ssd",
    case=(
        (BF16, (128, 64), True, True, True), (F16, (112, 40), False, True, False), (F32, (128, 64), True, True, True),
        (BF16, (256, 64), True, False, True), (F32, (128, 64), False, False, False),
    ),
)  # fmt: skip
def ssd(case: tuple[torch.dtype, tuple[int, int], bool, bool, bool]) -> None:
    dtype, dims, packed, grad, skip = case  # a product would take minutes: its kernels are large
    initial = leaf(1, 4, *dims, dtype=F32, grad=grad) if skip else None
    tokens = 300 if packed else 100  # in segments, or not
    bounds = torch.tensor([0, 77, tokens], dtype=torch.int32) if packed else None
    operands: Any = ssd_operands(dtype, tokens, dims, skip, grad)
    backward(*ops.ssd(*operands, initial_state=initial, cu_seqlens=bounds, final_state=skip))


@calls("ssd", frozen=("x", "B, C and steps", "all but D", "all but the state"))
def ssd_frozen(frozen: str) -> None:
    operands: Any = ssd_operands(BF16, 100, (128, 64), True, True)
    kept = {"x": (1, 2, 3, 4, 5), "B, C and steps": (0, 5), "all but D": (5,), "all but the state": ()}[frozen]
    for place, tensor in enumerate(operands):
        tensor.requires_grad_(place in kept)
    backward(*ops.ssd(*operands, initial_state=leaf(1, 4, 128, 64, dtype=F32, grad=not kept)))


@calls("ssd_step", dtype=FLOATS, dims=((128, 64), (256, 512), (48, 40)), skip=BOTH)
def ssd_step(dtype: torch.dtype, dims: tuple[int, int], skip: bool) -> None:
    ops.ssd_step(*ssd_operands(dtype, 1, dims, skip), leaf(1, 4, *dims, dtype=F32, grad=False))


@calls("ssd_tree", dtype=FLOATS, dims=((128, 64), (256, 512)), nodes=(3, 64), skip=BOTH)
def ssd_tree(dtype: torch.dtype, dims: tuple[int, int], nodes: int, skip: bool) -> None:
    state, ancestors = leaf(1, 4, *dims, dtype=F32, grad=False), torch.ones(nodes, nodes, dtype=torch.bool).tril()
    ops.ssd_tree(*ssd_operands(dtype, nodes, dims, skip), state, ancestors)


# -- linear layers -----------------------------------------------------------------------------------------------------


@calls(
    "linear", dtype=(BF16, F16), rows=(1, 8), features=((128, 512), (40, 72)), bias=BOTH,
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


for kind in ("int4", "nf4", "mxfp4", "float8"):
    calls(
        f"quantized_linear, {kind}", dtype=(BF16, F16), kind=(kind,), rows=(1, 8, 16, 64),
        features=((128, 4096), (20000, 72)), bias=BOTH,
        activation=(None, GLUOptions("silu")),
    )(quantized_linear)  # fmt: skip


@calls("dequantize_weight", dtype=PRODUCTS, kind=("float8", "int4", "nf4", "mxfp4"))
def dequantize_weight(dtype: torch.dtype, kind: Any) -> None:
    codes, scales = ops.empty_quantized(kind, 40, 300, torch.device("cpu"))
    ops.dequantize_weight(codes, scales.fill_(1), 300, dtype)


@calls(
    "mix_experts, backend few_tokens", dtype=(BF16, F16), kind=(None, "int4", "nf4", "mxfp4", "float8"),
    tokens=(1, 8, 20), sizes=((256, 128), (72, 40), (2048, 768)), bias=BOTH,
)  # fmt: skip
def few_tokens(dtype: torch.dtype, kind: Any, tokens: int, sizes: tuple[int, int], bias: bool) -> None:
    channels, size = sizes
    x, weights = leaf(tokens, channels, dtype=dtype, grad=False), leaf(tokens, 2, dtype=F32, grad=False)
    experts = torch.arange(2).expand(tokens, 2)
    shapes = ((3, 2 * size, channels), (3, channels, size))
    biases = [leaf(*shape[:2], dtype=dtype, grad=False) for shape in shapes] if bias else [None, None]
    activation = GLUOptions("silu")
    if kind is None:
        both = [leaf(*shape, dtype=dtype, grad=False) for shape in shapes]
        ops.mix_experts(x, weights, experts, *both, *biases, activation=activation, backend="few_tokens")
        return
    codes = [ops.empty_quantized(kind, 3 * out, width, torch.device("cpu")) for _, out, width in shapes]
    ops.quantized_mix_experts(x, weights, experts, *codes, 3, *biases, activation=activation)


@calls(
    "route_tokens", dtype=FLOATS,
    sizes=((5, 1, 1), (128, 8, 1), (160, 6, 8), (256, 8, 8), (512, 10, 1), (4096, 64, 1), (4096, 64, 16)),
    scores=("softmax", "sigmoid"), bias=BOTH, given=(None, torch.int64, torch.int32, torch.int16, torch.uint8),
    numbers=((True, 0.0, 0.0, 1.0), (False, 0.0, 0.0, 2.5), (True, 1e-20, 0.1, 1.0)), scores_per_group=(1, 2),
)  # fmt: skip
def route_tokens(
    dtype: torch.dtype, sizes: tuple[int, int, int], scores: Any, bias: bool, given: torch.dtype | None, numbers: Any,
    scores_per_group: int,
) -> None:  # fmt: skip
    num_experts, top_k, groups = sizes
    options = ops.RouterOptions(top_k, scores, groups, max(groups // 2, 1), scores_per_group, *numbers)
    selection_bias = leaf(num_experts, dtype=F32, grad=False) if bias else None
    own = None if given is None else torch.zeros(9, top_k, dtype=given)
    backward(*ops.route_tokens(leaf(9, num_experts, dtype=dtype), selection_bias, own, options=options))


@calls("take_rows, sum_rows", dtype=PRODUCTS, width=(48, 5120), weighted=BOTH, grads=GRADS)
def rows_of_choices(dtype: torch.dtype, width: int, weighted: bool, grads: tuple[bool, bool]) -> None:
    x, weights = leaf(8, width, dtype=dtype, grad=grads[0]), leaf(8, 4, dtype=F32, grad=grads[1])
    chosen = ops.ChosenRows(torch.arange(20), torch.arange(32).view(8, 4))
    rows = ops.take_rows(x, chosen)
    backward(ops.sum_rows(rows, weights if weighted else None, chosen))


# -- float8 ------------------------------------------------------------------------------------------------------------


@calls("float8_cast", dtype=FLOATS, to=(E4M3, E5M2), layouts=GRADS)
def float8_cast(dtype: torch.dtype, to: torch.dtype, layouts: tuple[bool, bool]) -> None:
    x = leaf(300, 64, dtype=dtype, grad=False)
    found = ops.float8_cast(x, to, rows=layouts[0], columns=layouts[1])
    if found.rows is not None:
        ops.float8_transpose(found.rows)


@calls("float8_cast by row", dtype=FLOATS, to=(E4M3, E5M2), width=(64, 2048, 14336), tail=(0, 128))
def float8_cast_by_row(dtype: torch.dtype, to: torch.dtype, width: int, tail: int) -> None:
    ops.float8_cast(leaf(300, width, dtype=dtype, grad=False), to, by_row=True, tail=tail)


@calls(
    "float8_gated_activation", dtype=FLOATS, activation=("silu", "clamped_silu", "gelu_tanh", "gelu"), width=(64, 4096),
    limit=(None, 7.0),
)  # fmt: skip
def float8_gated_activation(dtype: torch.dtype, activation: str, width: int, limit: float | None) -> None:
    options = ops.GLUOptions(activation, limit=limit)
    backward(ops.float8_gated_activation(leaf(300, 2 * width, dtype=dtype), options, E4M3, E5M2).dequantize())


@calls("float8_add_rms_norm", dtype=FLOATS, width=(64, 5120, 32768), add=BOTH, casting=("llama", "gemma"))
def float8_add_rms_norm(dtype: torch.dtype, width: int, add: bool, casting: Any) -> None:
    x, weight = leaf(300, width, dtype=dtype), leaf(width, dtype=dtype)
    residual = leaf(300, width, dtype=dtype) if add else None
    y, total = ops.float8_add_rms_norm(x, residual, weight, 1e-6, E4M3, casting_mode=casting)
    backward(y.dequantize(), total)


@calls("float8_linear", dtype=FLOATS, frozen=BOTH)
def float8_linear(dtype: torch.dtype, frozen: bool) -> None:
    x, weight = leaf(64, 256, dtype=dtype), leaf(128, 256, dtype=dtype, grad=not frozen)
    backward(ops.float8_linear(x, weight, recipe=ops.Float8Recipe()))


@calls("float8_lora_linear", dtype=(BF16,), rank=(4, 200), tail=BOTH, dropped=BOTH)
def float8_lora_linear(dtype: torch.dtype, rank: int, tail: bool, dropped: bool) -> None:
    x, weight = leaf(600, 256, dtype=dtype), leaf(128, 256, dtype=dtype, grad=False)
    tails = {"tail": tail_of(rank)} if tail else {}
    w8 = ops.float8_cast(weight, E4M3, columns=not tail, **tails)
    a, b = leaf(rank, 256, dtype=dtype), leaf(128, rank, dtype=dtype)
    other = leaf(600, 256, dtype=dtype) if dropped else None
    backward(ops.float8_lora_linear(x, w8, a, b, recipe=ops.Float8Recipe(), dropped=other))


# -- optimizer ---------------------------------------------------------------------------------------------------------


DTYPES = ((F32,) * 4, (BF16,) * 4, (BF16, BF16, F32, F32))  # of the parameter, gradient and averages


@calls("adamw_step", dtypes=DTYPES, seeds=(None, (1,)), shard=(None, (16, 3)))
def adamw_step(dtypes: tuple[torch.dtype, ...], seeds: Any, shard: tuple[int, int] | None) -> None:
    tensors = [leaf(8, 60, dtype=dtype, grad=False) for dtype in dtypes]
    whole = None if shard is None else Shard((16, 63), (0, shard[1]))
    ops.adamw_step(
        *tensors, step=1, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, rounding_seeds=seeds, shard=whole
    )


@calls("adamw_step of many parameters", dtypes=DTYPES, seeds=(None, (1,)), columns=(60, 64))
def adamw_steps(dtypes: tuple[torch.dtype, ...], seeds: Any, columns: int) -> None:
    parameters = [[leaf(7, columns, dtype=dtype, grad=False) for dtype in dtypes] for _ in range(2)]
    updates = [AdamWUpdate(*tensors, step=1, rounding_seeds=seeds) for tensors in parameters]
    foreach_adamw_step(updates, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


@calls("adamw_step in CUDA graphs", dtypes=DTYPES, stochastic=BOTH)
def adamw_step_in_graph(dtypes: tuple[torch.dtype, ...], stochastic: bool) -> None:
    numbers, key = torch.ones(4, dtype=torch.float64), torch.ones(2, dtype=torch.int64) if stochastic else None
    tensors = [leaf(8, 60, dtype=dtype, grad=False) for dtype in dtypes]
    adamw_step_in_memory(*tensors, numbers=numbers, key=key, betas=(0.9, 0.99), eps=1e-8)


def blockwise(*shape: int) -> Blockwise:
    scales = torch.ones(*shape[:-1], -(-shape[-1] // 256))
    return Blockwise(torch.zeros(shape, dtype=torch.uint8), scales)


@calls("adamw_step with 8-bit states", dtypes=((F32, F32), (BF16, BF16), (BF16, F32)), seeds=(None, (1,)), graph=BOTH)
def adamw8_step(dtypes: tuple[torch.dtype, ...], seeds: Any, graph: bool) -> None:
    tensors = [leaf(8, 300, dtype=dtype, grad=False) for dtype in dtypes] + [blockwise(8, 300), blockwise(8, 300)]
    options = {"betas": (0.9, 0.99), "eps": 1e-8}
    if graph:
        numbers, key = torch.ones(4, dtype=torch.float64), torch.ones(2, dtype=torch.int64) if seeds else None
        adamw_step_in_memory(*tensors, numbers=numbers, key=key, **options)
    else:
        ops.adamw_step(*tensors, step=1, lr=1e-3, weight_decay=0.1, rounding_seeds=seeds, **options)


@calls("Muon's momentum and update", dtypes=((F32, F32), (BF16, BF16), (BF16, F32)), stochastic=BOTH, graph=BOTH)
def muon(dtypes: tuple[torch.dtype, ...], stochastic: bool, graph: bool) -> None:
    parameter, gradient = (leaf(8, 300, dtype=dtype, grad=False) for dtype in dtypes)
    numbers = torch.ones(4, dtype=torch.float64) if graph else (1.0, 0.1)
    key = (torch.ones(2, dtype=torch.int64) if graph else 1) if stochastic else None
    update = momentum_step(gradient, blockwise(8, 300), beta=0.95, key=key)
    apply_update(parameter, update, numbers=numbers, key=key)
    apply_update(
        parameter[:, :37].contiguous(), update[:, :37], numbers=numbers, key=key, shard=Shard((16, 75), (0, 38))
    )
