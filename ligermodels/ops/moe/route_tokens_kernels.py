"""Kernels of `ops.route_tokens`: see `ops.moe.route_tokens` for the formulas.

Each program computes one token, so that its bits do not depend on the other tokens. Experts are a tile of groups and
places within a group, both padded to powers of two; without groups there is one.
"""

from ligermodels.ops.runtime.dispatch import tl, triton
from ligermodels.ops.runtime.launcher import kernel, wait_for_previous


@triton.jit
def _order(x):
    """int32 numbers that order like float32 values; NaN is the largest, -0 equals 0, and none is -2147483648."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # floats order like their bits, except for the sign
    return tl.where(x != x, 0x7FFFFFFF, order)


@triton.jit
def _sigmoid(x):
    """The sigmoid of x, and its slope."""
    e = tl.exp(-tl.abs(x))  # no overflow, and no loss where the sigmoid nears 0 or 1
    r = 1.0 / (1.0 + e)
    return tl.where(x < 0, e * r, r), e * r * r


@triton.jit
def _scores(x, largest, total, SOFTMAX: tl.constexpr):
    """Scores of logits x. largest, total: of all logits of the token the largest, and the sum of exp(x - largest)."""
    if SOFTMAX:
        scores = tl.exp(x - largest) / total
    else:
        scores, _ = _sigmoid(x)
    return scores


@triton.jit
def _softmax_numbers(x, SOFTMAX: tl.constexpr):
    """`largest` and `total` for `_scores`; x is -inf where there is no expert."""
    largest, total = 0.0, 1.0
    if SOFTMAX:
        largest = tl.max(x)
        total = tl.sum(tl.exp(x - largest))
    return largest, total


@triton.jit
def _best_groups(
    choice, exists, expert, num_groups, TOP_K_GROUPS: tl.constexpr, SCORES_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """`choice` (groups, places) with -inf for the experts outside of the best groups."""
    order = tl.where(exists, _order(choice), -2147483648)
    scores = tl.zeros((GROUPS,), tl.float32)
    for _ in tl.static_range(SCORES_PER_GROUP):
        best = tl.max(order, axis=1)
        bits = tl.where(best < 0, best ^ 0x7FFFFFFF, best)
        scores += bits.to(tl.float32, bitcast=True)
        first = tl.min(tl.where(order == best[:, None], expert, 0x7FFFFFFF), axis=1)
        order = tl.where(expert == first[:, None], -2147483648, order)
    group = tl.arange(0, GROUPS)
    order_of_groups = tl.where(group < num_groups, _order(scores), -2147483648)
    outside = group >= 0
    for _ in tl.static_range(TOP_K_GROUPS):
        best = tl.max(order_of_groups, axis=0)
        first = tl.min(tl.where(order_of_groups == best, group, 0x7FFFFFFF), axis=0)
        order_of_groups = tl.where(group == first, -2147483648, order_of_groups)
        outside = outside & (group != first)
    return tl.where(outside[:, None], float("-inf"), choice)


@triton.jit
def _divisor(total, eps, min_sum):
    """What weights are divided by, and whether it changes with their sum `total`."""
    if eps is not None:
        total = total + eps
    changes = total == total
    if min_sum is not None:
        changes = total >= min_sum
        total = tl.maximum(total, min_sum, propagate_nan=tl.PropagateNan.ALL)
    return total, changes


@kernel
def route_tokens_kernel(
    logits, logits_row, bias, given, weights, experts, E, num_groups, size, K, eps, min_sum, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, TOP_K_GROUPS: tl.constexpr, SCORES_PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """size: experts of a group. TOP_K_GROUPS: 0 for all. A number without effect, and a tensor that is not given, are
    None."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    logits += token * logits_row
    place = tl.arange(0, SIZE)[None, :]
    expert = tl.arange(0, GROUPS)[:, None] * size + place
    exists = (place < size) & (expert < E)
    x = tl.load(logits + expert, mask=exists, other=float("-inf")).to(tl.float32)
    largest, total = _softmax_numbers(x, SOFTMAX)

    choice = x
    if bias is not None or TOP_K_GROUPS > 0:
        choice = _scores(x, largest, total, SOFTMAX)
    if bias is not None:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    if TOP_K_GROUPS > 0:
        choice = _best_groups(choice, exists, expert, num_groups, TOP_K_GROUPS, SCORES_PER_GROUP, GROUPS)
    order = tl.where(exists, _order(choice), -2147483648)
    at = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(0, K):
        # The largest, then the first expert that has it: a warp finds each of both integers in one instruction.
        best = tl.max(order)
        first = tl.min(tl.where(order == best, expert, 0x7FFFFFFF))
        order = tl.where(expert == first, -2147483648, order)
        chosen = tl.where(at == i, first, chosen)

    chosen = chosen.to(tl.int64)
    if given is not None:
        own = tl.load(given + token * K + at, mask=at < K, other=0).to(tl.int64)
        chosen = tl.where(own == -1, chosen, own)
    known = (at < K) & (chosen >= 0) & (chosen < E)  # a given expert that does not exist has the weight NaN
    x = tl.load(logits + chosen, mask=known, other=float("nan")).to(tl.float32)
    found = tl.where(at < K, _scores(x, largest, total, SOFTMAX), 0.0)
    if NORMALIZE:
        divisor, _ = _divisor(tl.sum(found), eps, min_sum)
        found = tl.div_rn(found, divisor)  # 1 for one expert, which `/` may miss by a rounding error
    if scale is not None:
        found = found * scale
    tl.store(weights + token * K + at, found, mask=at < K)
    tl.store(experts + token * K + at, chosen, mask=at < K)


@kernel
def route_tokens_gradient_kernel(
    dweights, logits, logits_row, experts, dlogits, E, K, eps, min_sum, scale, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """An expert that a token was given twice gets the sum of both gradients."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * logits_row
    dweights += token * K
    experts += token * K
    expert = tl.arange(0, BLOCK)
    x = tl.load(logits + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    largest, total = _softmax_numbers(x, SOFTMAX)

    at = tl.arange(0, BLOCK_K)
    chosen = tl.load(experts + at, mask=at < K, other=0)
    known = (at < K) & (chosen >= 0) & (chosen < E)
    of_chosen = tl.load(logits + chosen, mask=known, other=float("nan")).to(tl.float32)
    scores = tl.where(at < K, _scores(of_chosen, largest, total, SOFTMAX), 0.0)
    # The gradient of a chosen score is factor * (its weight's gradient - shift).
    factor, shift = 1.0, 0.0
    if scale is not None:
        factor = scale
    if NORMALIZE:
        divisor, changes = _divisor(tl.sum(scores), eps, min_sum)
        of_weights = tl.load(dweights + at, mask=at < K, other=0.0)
        mean = tl.sum(tl.div_rn(scores, divisor) * of_weights)  # exactly that of one expert, which has no gradient then
        factor, shift = factor / divisor, tl.where(changes, mean, 0.0)
    d = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, K):
        of_score = factor * (tl.load(dweights + i) - shift)
        d += tl.where(expert == tl.load(experts + i).to(tl.int32), of_score, 0.0)

    if SOFTMAX:
        scores = _scores(x, largest, total, SOFTMAX)
        d = scores * (d - tl.sum(scores * d))
    else:
        _, slope = _sigmoid(x)
        d = d * slope
    tl.store(dlogits + token * E + expert, d.to(dlogits.dtype.element_ty), mask=expert < E)
