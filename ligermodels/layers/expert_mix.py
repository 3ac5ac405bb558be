"""The computation of the experts of a mixture, from their weights and parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from ligermodels import ops
from ligermodels.layers.expert_parallel import Experts
from ligermodels.layers.expert_parts import Mix, Product, plain_product
from ligermodels.layers.linear import options_of


def mix_experts(
    tokens: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor | None,
    down: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    product: Product = plain_product,
    num_experts: int | None = None,
    mix: Mix | None = None,
) -> Tensor:
    """The weighted sum of down_e(activation(gate_up_e(x))) over the chosen experts e of each token x.

    Args:
        tokens: (N, H).
        weights: (N, top_k), weights of the chosen experts.
        experts: long (N, top_k) in [0, E), the chosen experts.
        gate_up: (E, 2 * size, H); of experts without a gate (E, size, H).
        down: (E, H, size).
        activation: (R, rows of gate_up) -> (R, size).
        biases: biases (E, rows of gate_up) and (E, H) of down. Default: none.
        product: computes gate_up and down; experts with parts have their own. Default: `plain_product`.
        num_experts: number E of experts. Default: the rows of `gate_up`.
        mix: computes all at once; it may return None. Default: None.

    Returns:
        (N, H), in the dtype of the experts' computation.
    """
    activates = options_of(activation) or activation
    if mix is not None and isinstance(activates, ops.GLUOptions):
        mixed = mix(tokens, weights, experts, activates, biases)
        if mixed is not None:
            return mixed
    if product is plain_product:
        return ops.mix_experts(
            tokens, weights, experts, cast(Tensor, gate_up), cast(Tensor, down), *biases, activation=activates
        )
    count = num_experts or len(cast(Tensor, gate_up))
    return ops.by_expert(tokens, weights, experts, count, of_rows(gate_up, down, activation, biases, product))


def of_rows(
    gate_up: Tensor | None,
    down: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    product: Product,
) -> Experts:
    """A function that computes experts for rows that are sorted by expert.

    Args:
        gate_up: (E, 2 * size, H); of experts without a gate (E, size, H).
        down: (E, H, size).
        activation: (R, rows of gate_up) -> (R, size).
        biases: biases (E, rows of gate_up) and (E, H) of down.
        product: computes gate_up and down; see `mix_experts`.

    Returns:
        The function: rows (R, H) and the offsets (E,) where the rows of each expert end -> (R, H).
    """

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        if product is plain_product:
            return ops.grouped_mlp(
                rows,
                offsets,
                cast(Tensor, gate_up),
                cast(Tensor, down),
                *biases,
                activation=options_of(activation) or activation,
            )
        ops.require_grouped_mm("experts with LoRA, or with weights in 4 or 8 bits,")
        hidden = activation(product("gate_up", rows, offsets, gate_up, biases[0]))
        return product("down", hidden, offsets, down, biases[1])

    return compute
