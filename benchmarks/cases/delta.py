"""`python -m benchmarks delta [--out FILE]`: Gated DeltaNet beside its bytes: decoding, trees, and training a layer.

The sizes are from Qwen3.5-9B. `..._of_copy`: the rate of the fewest bytes that a call must move, as a fraction of the
rate of a large device copy. A decode step reads and writes the state in fp32; a tree only reads it. Decode steps run
back to back in a CUDA graph, each with its own state. Training is forward and backward in bf16 by each backend of the
gated delta rule: the rule alone, and one layer with its projections. `limit` is the lower bound of the rule: a device
copy of its operands and results, and its products by cuBLAS, each computed once. Errors are relative to float64. Cases
"by channel" have a decay for each key channel and as many key heads as value heads, as in Kimi Linear: their decoding
and gates are by each backend. `--by-channel` runs these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.reporting import recording
from benchmarks.timing import measure
from ligermodels import ops
from ligermodels.errors import BackendError
from ligermodels.layers import ForwardContext
from ligermodels.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from ligermodels.ops.linear_attention import fla
from ligermodels.speculative.tree import default_tree

HIDDEN, TOKENS = 4096, 8192
CHECKED = 2048
"""Number of tokens for the comparison with float64."""
BACKENDS = ("triton", *(("fla",) if fla.installed() else ()), "reference")
CONFIG = GatedDeltaNetConfig(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
STATE = CONFIG.num_value_heads, CONFIG.key_head_dim, CONFIG.value_head_dim


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=measure.DEVICE)


def operands(batch: int, tokens: int, by_channel: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, decays and betas, as slices of the rows of a projection."""
    config = replace(CONFIG, num_key_heads=CONFIG.num_value_heads) if by_channel else CONFIG
    sizes = [config.key_size, config.key_size, config.value_size]
    rows = normal(batch, tokens, config.conv_channels).split(sizes, dim=-1)
    heads = (config.num_key_heads, config.num_key_heads, config.num_value_heads)
    q, k, v = (row.unflatten(-1, (count, -1)) for row, count in zip(rows, heads, strict=True))
    gates = normal(batch, tokens, config.num_value_heads).float()
    decays = normal(batch, tokens, config.num_value_heads, config.key_head_dim).float() if by_channel else gates
    return q, k, v, -F.softplus(decays), gates.sigmoid()


def candidates(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """parent, depth and mask of the default tree with `nodes` nodes."""
    tree = default_tree(4, nodes - 1)
    parent, depth, mask = (each.to(measure.DEVICE) for each in (tree.parent, tree.depth, tree.mask))
    return parent, depth, mask


def steps(batch: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name of a decode step, fewest bytes that it moves, and a function that creates one call with its own tensors."""
    one = operands(batch, 1)
    weight = normal(CONFIG.conv_channels, CONFIG.conv_width)
    state_bytes = 4 * batch * STATE[0] * STATE[1] * STATE[2]
    conv_bytes = 2 * batch * CONFIG.conv_channels

    def state() -> Tensor:
        return torch.randn(batch, *STATE, device=measure.DEVICE)

    def inputs() -> Tensor:
        return normal(batch, CONFIG.conv_width - 1, CONFIG.conv_channels)

    yield "step", 2 * state_bytes, lambda: partial(ops.gated_delta_rule_step, *one, state())
    x = normal(batch, 1, CONFIG.conv_channels)
    yield "conv step", 8 * conv_bytes, lambda: partial(ops.causal_conv_step, x, weight, inputs())
    z, scale = normal(batch, *STATE[::2]), torch.ones(CONFIG.value_head_dim, device=measure.DEVICE)
    norm_bytes = 3 * 2 * batch * CONFIG.value_size
    yield "gated norm", norm_bytes, lambda: partial(ops.gated_rms_norm, normal(batch, *STATE[::2]), z, scale, 1e-6)
    for nodes in (16, 64):
        parent, depth, above = candidates(nodes)
        several, node = operands(batch, len(above)), torch.full((batch,), len(above) - 1, device=measure.DEVICE)
        tree = partial(ops.gated_delta_rule_tree, *several)
        _, updates = tree(state(), above)
        yield f"tree of {len(above)}", state_bytes, partial(_tree, tree, state, above)
        yield f"commit of {len(above)}", 2 * state_bytes, partial(_commit, state, updates, node, above)
        nodes_x = normal(batch, len(above), CONFIG.conv_channels)
        conv = partial(ops.causal_conv, nodes_x, weight, tree=(parent, depth))
        yield f"conv tree of {len(above)}", (2 * len(above) + 3) * conv_bytes, partial(_conv_tree, conv, inputs)


def channel_steps(batch: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """As `steps`, with a decay for each key channel."""
    heads, key_dim, _ = STATE
    state_bytes = 4 * batch * STATE[0] * STATE[1] * STATE[2]

    def state() -> Tensor:
        return torch.randn(batch, *STATE, device=measure.DEVICE)

    for nodes in (16, 32, 64):
        _, _, above = candidates(nodes)
        several, node = operands(batch, len(above), True), torch.full((batch,), len(above) - 1, device=measure.DEVICE)
        tree = partial(ops.gated_delta_rule_tree, *several)
        _, updates = tree(state(), above)
        count = state_bytes + 3 * several[3].nbytes  # decays are read, and their sums written as float64
        yield f"tree of {len(above)}, by channel", count, partial(_tree, tree, state, above)
        yield f"commit of {len(above)}, by channel", 2 * state_bytes, partial(_commit, state, updates, node, above)
    parameters = torch.randn(heads, device=measure.DEVICE), torch.randn(heads, key_dim, device=measure.DEVICE)
    for tokens in (1, 64):
        a, b = normal(batch, tokens, heads, key_dim), normal(batch, tokens, heads)
        yield f"gates of {tokens}, by channel", 3 * a.nbytes, partial(_gates, a, b, *parameters)


def _gates(a: Tensor, b: Tensor, log_rate: Tensor, bias: Tensor) -> Callable[[], Any]:
    return partial(ops.delta_gates, a.clone(), b, log_rate, bias)


def _tree(tree: Callable[..., Any], state: Callable[[], Tensor], above: Tensor) -> Callable[[], Any]:
    return partial(tree, state(), above)


def _commit(state: Callable[[], Tensor], updates: ops.TreeUpdates, node: Tensor, above: Tensor) -> Callable[[], Any]:
    return partial(ops.commit_tree, state(), updates, node, above)


def _conv_tree(conv: Callable[..., Any], inputs: Callable[[], Tensor]) -> Callable[[], Any]:
    return partial(conv, earlier=inputs())


def decoding(
    batch: int, copy_rate: float, make_steps: Callable[[int], Iterator[tuple[str, int, Callable[[], Any]]]],
    provider: str, most: int = 200,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A record of each call of `make_steps`; at most `most` calls in a row."""
    for name, count, make in make_steps(batch):
        calls = [make() for _ in range(min(measure.row_length(count), most))]
        milliseconds = measure.in_a_row(calls)
        share = count / milliseconds * 1e3 / copy_rate
        yield {"case": f"{name}, batch {batch}", "provider": provider, "us": milliseconds * 1e3, "of_copy": share}


def training(backend: str) -> dict[str, Any]:
    """A record of forward and backward of a layer."""
    config = GatedDeltaNetConfig(**{**vars(CONFIG), "backend": backend})
    layer = GatedDeltaNet(HIDDEN, config).to(measure.DEVICE, torch.bfloat16)
    with torch.no_grad():
        for linear in (layer.in_proj, layer.out):
            linear.weight.normal_(std=0.02)
        for part in (layer.conv, layer.decay, layer.norm):
            part.init_weights(0.02)
    x, dy = normal(1, TOKENS, HIDDEN).requires_grad_(), normal(1, TOKENS, HIDDEN)

    def both() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x, ForwardContext()).backward(dy)

    projections = sum(weight.numel() for weight in (layer.in_proj.weight, layer.out.weight))
    milliseconds = measure.milliseconds(both)
    return {
        "case": f"layer {TOKENS}x{HIDDEN}",
        "provider": f"ligermodels, {backend}",
        "both_ms": milliseconds,
        "projections_tflops": 6 * projections * TOKENS / milliseconds * 1e-9,
        "peak_mib": measure.peak_mib(both),
    }


def rule(backend: str, forward_only: bool, by_channel: bool = False) -> dict[str, Any]:
    """A record of the gated delta rule alone: times of TOKENS, errors of CHECKED.

    Raises BackendError if the backend cannot serve the call."""
    given = [x.detach().requires_grad_(not forward_only) for x in operands(1, TOKENS, by_channel)]
    dout = normal(*given[2].shape)

    def forward() -> Tensor:
        with torch.no_grad():
            return ops.gated_delta_rule(*given, final_state=False, backend=backend)[0]

    def both() -> None:
        o, _ = ops.gated_delta_rule(*given, final_state=False, backend=backend)
        torch.autograd.grad(o, given, dout)

    forward()
    case = f"rule {TOKENS}{', by channel' * by_channel}"
    record = {"case": case, "provider": f"ligermodels, {backend}", **errors(backend, forward_only, by_channel)}
    record["forward_ms"] = measure.milliseconds(forward)
    if not forward_only:
        record |= {"both_ms": measure.milliseconds(both), "peak_mib": measure.peak_mib(both)}
    return record


def errors(backend: str, forward_only: bool, by_channel: bool) -> dict[str, float]:
    """Relative errors of outputs and gradients, with slow decays."""
    q, k, v, g, beta = operands(1, CHECKED, by_channel)
    tensors = [q, k, v, g / 50, beta]
    dout = normal(*v.shape)

    def run(name: str, *tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(not forward_only) for x in tensors]
        o, _ = ops.gated_delta_rule(*leaves, final_state=False, backend=name)
        return [o.detach(), *(() if forward_only else torch.autograd.grad(o, leaves, dout.to(o.dtype)))]

    found, wanted = run(backend, *tensors), run("reference", *(x.double() for x in tensors))
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")[: len(found)]
    pairs = zip(names, found, wanted, strict=True)
    return {f"{name}_error": float((a.double() - b).norm() / b.norm()) for name, a, b in pairs}


def rule_limits(copy_rate: float) -> dict[str, Any]:
    """Times of the operands' and results' bytes, and of the products in chunks of 64, each computed once. The backward
    pass has twice as many products as the forward pass."""
    q, k, v, g, beta = operands(1, TOKENS)
    read, written = sum(x.nbytes for x in (q, k, v, g, beta)), v.nbytes
    heads, key_dim, width = STATE
    products = TOKENS * heads * (6 * key_dim * width + 4 * 64 * (key_dim + width))
    a, b = normal(8192, 8192), normal(8192, 8192)
    rate = 2 * 8192**3 / measure.milliseconds(lambda: a @ b)
    return {
        "case": f"rule {TOKENS}",
        "provider": "limit",
        "copy_forward_ms": (read + written) / copy_rate * 1e3,
        "copy_both_ms": (3 * read + 2 * written) / copy_rate * 1e3,
        "products_forward_ms": products / rate,
        "products_both_ms": 3 * products / rate,
    }


def gates() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Gates with a decay for each key channel in training: name, bytes of both passes, and a call of both passes."""
    heads, key_dim, _ = STATE
    a, b = normal(1, TOKENS, heads, key_dim), normal(1, TOKENS, heads)
    log_rate, bias = torch.randn(heads, device=measure.DEVICE), torch.randn(heads, key_dim, device=measure.DEVICE)
    leaves = [x.requires_grad_() for x in (a, b, log_rate, bias)]
    found = [x.detach().float() for x in (a, b)]

    def both(bound: float | None) -> None:
        torch.autograd.grad(ops.delta_gates(a, b, log_rate, bias, bound), leaves, found)

    yield "gates, by channel", 7 * a.nbytes, partial(both, None)
    yield "bounded gates, by channel", 7 * a.nbytes, partial(both, -5.0)


def parts() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Gated norm in training: name, bytes of both passes, and a call of both passes."""
    heads = 1, TOKENS, CONFIG.num_value_heads, CONFIG.value_head_dim
    o, z, d = normal(*heads).requires_grad_(), normal(*heads).requires_grad_(), normal(*heads)
    scale = torch.ones(CONFIG.value_head_dim, device=measure.DEVICE, requires_grad=True)

    def norm() -> None:
        torch.autograd.grad(ops.gated_rms_norm(o, z, scale, 1e-6), (o, z, scale), d)

    yield "gated norm", 8 * o.nbytes, norm


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--by-channel", action="store_true", help="only decoding and gates of Kimi Delta Attention")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    common, copy_rate = recording.facts(), measure.copy_rate()

    def note(record: dict[str, Any]) -> None:
        recording.write(arguments.out, [{**record, "copy_bytes_per_s": copy_rate, **common}])
        print(record, flush=True)

    with torch.no_grad():
        for batch in arguments.batches:
            for record in () if arguments.by_channel else decoding(batch, copy_rate, steps, "ligermodels"):
                note(record)
            measure.free()
    for kind in ("triton", "reference"):
        with ops.set_backend("triton" if kind == "triton" else "reference"):
            with torch.no_grad():
                for batch in arguments.batches:
                    most = 200 if kind == "triton" else 2
                    for record in decoding(batch, copy_rate, channel_steps, f"ligermodels, {kind}", most):
                        note(record)
                    measure.free()
            for name, count, call in (*gates(), *(() if arguments.by_channel else parts())):
                milliseconds = measure.milliseconds(measure.graphed(call))
                share = count / milliseconds * 1e3 / copy_rate
                note({"case": f"{name}, both", "provider": kind, "both_ms": milliseconds, "of_copy": share})
        measure.free()
    if arguments.by_channel:
        return
    note(rule_limits(copy_rate))

    def tried(case: str, make: Callable[[], dict[str, Any]], backend: str) -> bool:
        """Whether the backend supports the case: fla has no gradients on some GPUs, and kernels do not run on all."""
        try:
            note(make())
        except BackendError as error:
            note({"case": case, "provider": f"ligermodels, {backend}", "failed": str(error)})
            return False
        return True

    for backend in BACKENDS:
        if not tried(f"rule {TOKENS}, both", partial(rule, backend, forward_only=False), backend):
            tried(f"rule {TOKENS}", partial(rule, backend, forward_only=True), backend)
        by_channel = partial(rule, backend, forward_only=False, by_channel=True)
        tried(f"rule {TOKENS}, by channel", by_channel, backend)
        tried(f"layer {TOKENS}x{HIDDEN}", partial(training, backend), backend)
        measure.free()
