"""Functions of logits inside kernels: effective logits, exponentials, and the classes that a sampler drops."""

from ligermodels.ops.runtime.dispatch import HAS_TRITON, tl, triton

NEAR = tl.constexpr(0.8) if HAS_TRITON else None
LOG2_E = tl.constexpr(1.4426950408889634) if HAS_TRITON else None
VANISHED = tl.constexpr(-128.0) if HAS_TRITON else None  # exp of it is 0 in float32


@triton.jit
def _tanh_near(x):
    """tanh(x) for |x| < NEAR: an odd polynomial (a minimax fit of relative error 7e-9), without cancellation."""
    z = x * x
    p = 0.0015847518 * z - 0.0074095489
    p = p * z + 0.021302985
    p = p * z - 0.05385233
    p = p * z + 0.13332221
    p = p * z - 0.33333297
    return x + x * z * p


@triton.jit
def effective(x, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):
    """Effective logits in float32, accurate to a few units in the last place, and, if CAPPED, their slope 1 - tanh^2,
    accurate to 1e-5 of itself even where tanh is near 1.

    Args:
        x: logits, of any floating dtype.
        scale: logit_scale, divided by softcap if CAPPED; read with SCALED or CAPPED.
        softcap: bound of the logits; read with CAPPED.
        SCALED: whether the logits are scaled.
        CAPPED: whether they have a softcap.
    """
    x = x.to(tl.float32)
    if SCALED or CAPPED:
        x = x * scale
    slope = x
    if CAPPED:
        e = tl.exp(-2.0 * tl.abs(x))
        share = 1.0 / (1.0 + e)
        far = 1.0 - 2.0 * e * share
        slope = 4.0 * e * share * share
        x = softcap * tl.where(tl.abs(x) < NEAR, _tanh_near(x), tl.where(x < 0, -far, far))
    return x, slope


@triton.jit
def tempered(inverse_temperature, scale, softcap, logit_scale, CAPPED: tl.constexpr):
    """scale, softcap and logit_scale of effective logits over a temperature, which follows the softcap.

    Args:
        inverse_temperature: 1 / temperature.
        scale, softcap: of `effective`.
        logit_scale: derivative of effective logits by plain ones, at 0.
        CAPPED: whether the logits have a softcap.
    """
    if CAPPED:
        softcap *= inverse_temperature
    else:
        scale *= inverse_temperature
    return scale, softcap, logit_scale * inverse_temperature


@triton.jit
def exp(x):
    """exp(x), flushed to 0 below 1e-38; tl.exp takes three instructions more to keep such results."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def below(x, maximum):
    """x - maximum, but finite where x is -inf, to be multiplied by its exp, which is 0 there."""
    return tl.maximum(x - maximum, VANISHED)


@triton.jit
def next_above(x):
    """The least float32 above x; of inf, and of NaN, NaN."""
    bits = x.to(tl.int32, bitcast=True)
    above = tl.where(x == 0, 1, tl.where(bits < 0, bits - 1, bits + 1)).to(tl.float32, bitcast=True)
    return tl.where(x == x, above, x)  # the highest NaN, to which GPUs convert, would wrap around to -0.0


@triton.jit
def dropped(bits, classes, mask):
    """Whether a sampler drops classes, by the bits of their row (`LogitRows`). Classes outside of the mask count as
    dropped; None is a full mask."""
    other = None if mask is None else 255
    byte = tl.load(bits + classes // 8, mask=mask, other=other)
    return (byte.to(tl.int32) >> (classes % 8).to(tl.int32)) & 1 != 0
