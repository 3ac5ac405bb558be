"""Linear layers of a step of decoding that are computed together with what follows, by one kernel: a gated activation
of their result, or its addition to the residual. Each kernel fewer saves what it takes to begin and to end one."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.glu.glu import GLUOptions
from ligermodels.ops.quantized.few_rows import Epilogue, few_rows

decoding: ContextVar[bool] = ContextVar("decoding", default=False)
_wanted: ContextVar[bool] = ContextVar("pending_linears", default=False)


class PendingLinear:
    """x W^T + bias, of shape (..., N), that is still to be computed: by one of these methods, once.

    Each returns the bits that the layer, and then what follows it, would give.
    """

    def __init__(self, x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        """x (..., K), of up to 16 rows; the others are those of `few_rows`."""
        self._x, self._codes, self._scales, self._bias = x, codes, scales, bias

    def alone(self) -> Tensor:
        """The layer's result (..., N)."""
        return self._computed(self._codes.shape[0], Epilogue())

    def gated(self, activation: str, **options: float | None) -> Tensor:
        """`ops.swiglu` or `ops.geglu`, with their options, of the result as pairs (..., N) -> (..., N / 2).

        activation: "silu", "gelu" (by the error function) or "gelu_tanh". InputError if N is odd."""
        channels = self._codes.shape[0]
        if channels % 2:
            raise InputError(
                f"a gated activation needs pairs of channels, and the linear layer before it has {channels}"
            )
        return self._computed(channels // 2, Epilogue(GLUOptions(activation, **options)))  # type: ignore[arg-type]

    def added_to(self, residual: Tensor) -> Tensor:
        """residual + the result, residual (..., N)."""
        x = self._x
        if residual.shape != (*x.shape[:-1], self._codes.shape[0]) or residual.dtype != x.dtype:
            return residual + self.alone()
        return self._computed(self._codes.shape[0], Epilogue(residual=residual))

    def _computed(self, channels: int, then: Epilogue) -> Tensor:
        y = self._x.new_empty(*self._x.shape[:-1], channels)
        few_rows(self._x.reshape(-1, self._x.shape[-1]), self._codes, self._scales, self._bias, y, then)
        return y


@contextmanager
def pending_linears() -> Iterator[None]:
    """A context for the call of one linear layer, whose result goes nowhere but to who asks: under `DecodeLinears`,
    `decode_linear` and `quantized_linear` may return a PendingLinear."""
    before = _wanted.set(decoding.get())
    try:
        yield
    finally:
        _wanted.reset(before)


def is_decoding() -> bool:
    """Whether `DecodeLinears` holds: a step of decoding is being run or recorded."""
    return not torch.compiler.is_compiling() and decoding.get()


def may_wait() -> bool:
    """Whether a linear layer may return a PendingLinear."""
    return not torch.compiler.is_compiling() and _wanted.get()
