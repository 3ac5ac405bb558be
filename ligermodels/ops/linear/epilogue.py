"""A gated activation after a linear layer, as an argument of the layer's op."""

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.glu.glu import GLUOptions, gated_activation


def check_activation(op: str, out_features: int, activation: GLUOptions | None) -> None:
    """Raise InputError, naming `op`, if `out_features` is odd and a gated activation follows."""
    if activation is not None and out_features % 2:
        raise InputError(
            f"{op}: a gated activation needs pairs of channels, and the layer before it has {out_features}"
        )


def activated(y: Tensor, activation: GLUOptions | None) -> Tensor:
    """The result y (..., N) of a linear layer, or its gated activation (..., N / 2) by an op of its own."""
    return y if activation is None else gated_activation(y, activation)
