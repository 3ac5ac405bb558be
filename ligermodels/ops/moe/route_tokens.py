"""The experts of each token and their weights, from the logits of a router.

Scores s are the softmax of a token's logits l over all experts (Mixtral, Jiang et al., 2024), or the sigmoid of each
(DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437, section 2.1.2). The experts C of a token are the top_k with the
highest s + b, where b is a bias or 0, within the groups whose highest s + b have the largest sums. Without a bias and
groups they are those with the highest l: its order is the order of s, and no two saturate. Weights are

    w_c = scale * s_c        or, normalised,        w_c = scale * s_c / t,  t = max(sum of s over C + eps, min_sum)

and the gradient of s_c, for gradients g of the weights, is

    scale * g_c              or, normalised,        scale / t * (g_c - sum of g s over C / t)

without the sum where min_sum is the larger. No gradient flows through the choice, or to the bias.

In torch this is about eight kernels for a forward pass, and as many for a backward pass; here each is one.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.arguments import check_count, check_flag, is_number
from ligermodels.errors import InputError, short
from ligermodels.ops.moe.route_tokens_kernels import route_tokens_gradient_kernel, route_tokens_kernel
from ligermodels.ops.runtime.checks import Signature, assert_async, check_eps
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import checked_on_host, use_kernels
from ligermodels.ops.runtime.library import custom_op, is_fake, mark_constants, once_differentiable
from ligermodels.ops.runtime.tensors import as_dtype, contiguous, elementwise, empty_like, rows_and_stride

NOT_ROUTED = -1
"""In given experts: the expert of a token whose experts are not known, such as padding; the router chooses them."""
MAX_K, MAX_EXPERTS = 64, 4096
"""The reference serves larger numbers."""
_TENSORS = Signature(
    logits="N E+", selection_bias="E ?",
    given_experts="N k int64 int32 int16 int8 uint8 uint16 uint32 uint64 ?",
)  # fmt: skip


class RouterOptions(NamedTuple):
    """How a router chooses experts and weighs them, in the order of the registered ops.

    Args:
        top_k: experts per token.
        scores: "softmax" over all experts, or the "sigmoid" of each logit.
        num_groups: number of groups of adjacent experts.
        top_k_groups: groups per token; its experts are chosen from these.
        scores_per_group: the score of a group is the sum of this many of its highest scores.
        normalize: whether the weights of a token's experts are divided by their sum plus `eps`.
        eps: see `normalize`.
        min_sum: the sum of `normalize` counts as at least this number.
        scale: factor of the weights, after normalisation.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_k_groups: int = 1
    scores_per_group: int = 2
    normalize: bool = True
    eps: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0


def route_tokens(
    logits: Tensor, selection_bias: Tensor | None = None, given_experts: Tensor | None = None, *, options: RouterOptions
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, from the logits of a router.

    It computes in float32 (float64 for float64). The backward pass computes the scores again: the logits and the
    experts are saved. Each token is computed by itself, also with `set_batch_invariant`.

    Args:
        logits: (N, E), floating, any strides. The logits of a token with NaN among them give weights of NaN with
            "softmax", and experts in [0, E).
        selection_bias: (E,), floating; counts for the choice of experts, but not for their weights. It has no gradient.
            Default: None.
        given_experts: (N, top_k), integers in [0, E), or `NOT_ROUTED` (-1): experts to use in place of the chosen ones,
            in this order. In place of `NOT_ROUTED` the token keeps the chosen expert. Default: None.
        options: how experts are chosen and weighed.

    Returns:
        weights: (N, top_k), float32, or float64 for logits in float64.
        experts: long (N, top_k), in order of falling choice, NaN first; or as they were given. The kernels order equal
            ones by number, and scores of "softmax" that are rounded to equal ones by their logits; the reference orders
            equal ones as `torch.topk` does.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit; or a given expert is not in [0, E), where values are
            read on the host: see `set_host_checks`. Elsewhere the weight of such an expert is NaN.

    Examples:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
        >>> weights, experts = route_tokens(logits, options=RouterOptions(top_k=2))
        >>> experts
        tensor([[1, 2],
                [0, 1]])
    """
    if not isinstance(options, RouterOptions):
        raise InputError(f"route_tokens: options must be RouterOptions, got {short(options)}")
    _TENSORS.check("route_tokens", logits, selection_bias, given_experts, k=options.top_k)
    num_experts = logits.shape[1]
    check_router_options("route_tokens", options, num_experts)
    _check_given(given_experts, num_experts)
    if use_kernels(logits, selection_bias) and options.top_k <= MAX_K and num_experts <= MAX_EXPERTS:
        return _RouteTokens.apply(logits, selection_bias, given_experts, options)
    return route_tokens_reference(logits, selection_bias, given_experts, options=options)


def check_router_options(op: str, options: RouterOptions, num_experts: int) -> None:
    """Raises InputError, naming `op` and the option, if `options` do not fit together or `num_experts`."""
    if torch.compiler.is_compiling():  # there numbers may be symbols, which have no value yet
        return
    try:
        _check_options(op, num_experts, *options)
    except TypeError:  # an option such as a list cannot be looked up
        _check_options.__wrapped__(op, num_experts, *options)


@functools.lru_cache(typed=True)  # a check takes longer than one kernel runs, and layers repeat their options
def _check_options(op: str, num_experts: int, *options: Any) -> None:
    chosen = RouterOptions(*options)
    if chosen.scores not in ("softmax", "sigmoid"):
        raise InputError(f'{op}: scores must be "softmax" or "sigmoid", got {short(chosen.scores)}')
    groups = check_count(f"{op}: num_groups", chosen.num_groups)
    if num_experts % groups:
        raise InputError(f"{op}: num_groups {groups} does not divide the number of experts, {num_experts}")
    size = num_experts // groups
    check_count(f"{op}: top_k_groups", chosen.top_k_groups, most=groups)
    if chosen.top_k_groups < groups:
        check_count(f"{op}: scores_per_group", chosen.scores_per_group, most=size)
    check_count(f"{op}: top_k", chosen.top_k, most=chosen.top_k_groups * size)
    check_flag(f"{op}: normalize", chosen.normalize)
    check_eps(op, chosen.eps)
    check_eps(op, chosen.min_sum, "min_sum")
    if not is_number(chosen.scale) or not math.isfinite(chosen.scale):
        raise InputError(f"{op}: scale must be a finite number, got {short(chosen.scale)}")


def _check_given(experts: Tensor | None, num_experts: int) -> None:
    """InputError for a given expert that does not exist, where values are read on the host."""
    if experts is None or torch.compiler.is_compiling() or is_fake(experts) or not checked_on_host(experts):
        return
    experts = experts.long()  # torch compares no unsigned numbers with -1
    message = f"route_tokens: given_experts must lie in [0, {num_experts}), or be {NOT_ROUTED}"
    assert_async((experts >= NOT_ROUTED) & (experts < num_experts), message, experts)


# -- reference ---------------------------------------------------------------------------------------------------------


def route_tokens_reference(
    logits: Tensor, selection_bias: Tensor | None = None, given_experts: Tensor | None = None, *, options: RouterOptions
) -> tuple[Tensor, Tensor]:
    """The specification of `route_tokens`, in plain torch, with the same arguments."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if options.scores == "softmax":
        scores = logits.softmax(-1, dtype=wide)
    else:
        logits = as_dtype(logits, wide)
        scores = elementwise(torch.sigmoid, logits)
    choice = _choice(logits, scores, selection_bias, options)
    experts = choice.topk(options.top_k, dim=-1).indices
    if given_experts is not None:
        given_experts = given_experts.long()  # an unsigned number is not NOT_ROUTED
        experts = torch.where(given_experts == NOT_ROUTED, experts, given_experts)
    weights = scores.gather(1, experts)
    if options.normalize:
        total = weights.sum(-1, keepdim=True)
        total = total + options.eps if options.eps else total
        weights = weights / (total.clamp(min=options.min_sum) if options.min_sum else total)
    return weights if options.scale == 1.0 else weights * options.scale, experts


def _choice(logits: Tensor, scores: Tensor, selection_bias: Tensor | None, options: RouterOptions) -> Tensor:
    """Numbers (N, E) whose highest are those of the chosen experts."""
    choice = scores if selection_bias is None else scores + selection_bias
    if options.top_k_groups < options.num_groups:
        return _best_groups(choice, options)
    by_logits = options.scores == "sigmoid" and selection_bias is None
    return logits if by_logits else choice


def _best_groups(choice: Tensor, options: RouterOptions) -> Tensor:
    """`choice` (N, E) with -inf for the experts outside of each token's best groups."""
    groups = choice.unflatten(1, (options.num_groups, -1))
    scores = groups.topk(options.scores_per_group, dim=-1).values.sum(-1)
    best = scores.topk(options.top_k_groups, dim=-1).indices
    outside = torch.ones_like(scores, dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(outside[..., None], float("-inf")).flatten(1)


# -- kernels -----------------------------------------------------------------------------------------------------------


def _numbers(eps: float, min_sum: float, scale: float) -> list[Any]:
    """eps, min_sum and scale as kernels take them: None for a number without effect."""
    pairs = ((eps, 0), (min_sum, 0), (scale, 1))
    return [None if number == neutral else float(number) for number, neutral in pairs]


def _warps(block: int) -> int:
    """Warps of a program for a token with `block` experts: a reduction within one needs no shared memory."""
    return 1 if block <= 512 else 4


@custom_op()
def _route_tokens_forward(
    logits: Tensor, selection_bias: Tensor | None, given_experts: Tensor | None, top_k: int, scores: str,
    num_groups: int, top_k_groups: int, scores_per_group: int, normalize: bool, eps: float, min_sum: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N, E = logits.shape
    weights = logits.new_empty(N, top_k, dtype=torch.float32)
    experts = logits.new_empty(N, top_k, dtype=torch.long)
    if is_fake(logits) or not N:
        return weights, experts
    limited = top_k_groups < num_groups
    groups = num_groups if limited else 1
    tile = power_of_2_above(groups), power_of_2_above(E // groups)
    tile = tile if limited else (1, max(tile[1], 32))  # a whole warp reduces integers in an instruction
    route_tokens_kernel[(N,)](
        *rows_and_stride(logits), contiguous(selection_bias), contiguous(given_experts), weights, experts,
        E, groups, E // groups, top_k, *_numbers(eps, min_sum, scale),
        SOFTMAX=scores == "softmax", NORMALIZE=bool(normalize), TOP_K_GROUPS=top_k_groups if limited else 0,
        SCORES_PER_GROUP=scores_per_group if limited else 0, GROUPS=tile[0], SIZE=tile[1],
        BLOCK_K=power_of_2_above(top_k), num_warps=_warps(tile[0] * tile[1]),
    )  # fmt: skip
    return weights, experts


@custom_op()
def _route_tokens_backward(
    dweights: Tensor, logits: Tensor, experts: Tensor, scores: str, normalize: bool, eps: float, min_sum: float,
    scale: float,
) -> Tensor:  # fmt: skip
    dlogits = empty_like(logits)
    if is_fake(logits) or not dlogits.numel():
        return dlogits
    (N, E), K = logits.shape, experts.shape[1]
    block = power_of_2_above(E)
    route_tokens_gradient_kernel[(N,)](
        dweights.contiguous(), *rows_and_stride(logits), experts, dlogits, E, K, *_numbers(eps, min_sum, scale),
        SOFTMAX=scores == "softmax", NORMALIZE=bool(normalize), BLOCK=block, BLOCK_K=power_of_2_above(K),
        num_warps=_warps(block),
    )  # fmt: skip
    return dlogits


class _RouteTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, selection_bias, given_experts, options):
        weights, experts = _route_tokens_forward(logits, selection_bias, given_experts, *options)
        mark_constants(ctx, (weights, [0]), (experts, []))
        ctx.save_for_backward(logits, experts)
        ctx.options = options
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, dweights, _):
        options = ctx.options
        numbers = options.normalize, options.eps, options.min_sum, options.scale
        return (_route_tokens_backward(dweights, *ctx.saved_tensors, options.scores, *numbers),)
