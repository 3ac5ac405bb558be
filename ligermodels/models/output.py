"""The output of a causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, overload

from torch import Tensor
from torch.utils._pytree import register_dataclass


class ModelOutput:
    """Base of the dataclasses that models return: also indexed by key and by position, as transformers' `ModelOutput`.

    `out["loss"]` and `out.loss` are the same; `out[0]`, `out[:2]` and `to_tuple()` are over the fields that are not
    None, in their order, as are `keys()`, `values()`, `items()`, `len(out)` and iteration, which is over the keys.

    Raises KeyError for a name that is no field or is None, IndexError for a position past the last.
    """

    # No collections.abc.Mapping: libraries that move tensors between devices build a Mapping anew from a dict.

    def keys(self) -> list[str]:
        """Names of the fields that are not None."""
        values = vars(self)
        return [field.name for field in fields(self) if values[field.name] is not None]  # type: ignore[arg-type]

    def values(self) -> tuple[Any, ...]:
        """The fields that are not None."""
        return self.to_tuple()

    def items(self) -> list[tuple[str, Any]]:
        """(name, value) of the fields that are not None."""
        return [(key, vars(self)[key]) for key in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are not None."""
        return tuple([vars(self)[key] for key in self.keys()])

    def get(self, key: str, default: Any = None) -> Any:
        """The field of this name; `default` where it is None or there is none."""
        return vars(self)[key] if key in self else default

    @overload
    def __getitem__(self, key: str | int) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self:
            raise KeyError(f"{key}: this output has {', '.join(self.keys())}")
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in [field.name for field in fields(self)]:  # type: ignore[arg-type]
            raise KeyError(f"{key}: is no field of {type(self).__name__}")
        setattr(self, key, value)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class CausalLMOutput(ModelOutput):
    """The output of a `CausalLM`. Results that were not asked for are None.

    loss: fp32 scalar, or (B, T) with reduction "none".
    logits: (B, T, V), or (1, n, V) of `token_indices`.
    aux_loss: with labels, the load-balancing loss of mixtures of experts, unweighted; None if layers have different
        numbers of experts.
    last_hidden_state: (B, T, H) after the final norm, or (1, n, H) of `token_indices`.
    ranks: of the deprecated argument `last_hidden_state` with `return_rank`, long: how many tokens are likelier than
        the target, -1 without a target.
    log_probs: (B, T) fp32, at each token the log-probability of the label that follows it; 0 where that label is
        ignored or missing.
    entropy: (B, T) fp32, at each token the entropy of the prediction; 0 where the label is ignored or missing.
    log_kept_mass: with `return_log_kept_mass`, (B, T) fp32, at each token the log of the probability of the tokens that
        a sampler keeps; 0 where the label is ignored or missing.
    z_loss: with `return_z_loss`, the z-loss within the loss, reduced in the same way, without a gradient.
    predicted: with `return_predicted`, long (B, T), at each token the likeliest next one; -1 where the label that
        follows is ignored or missing.
    router_z_loss: with labels, in training mode, the z-loss of the routers of mixtures of experts, unweighted, if the
        model's `router_z_loss_coef` is above 0.
    tokens_per_expert: with labels, long (layers with experts, experts): how many tokens each expert computed, without
        padding; None if layers have different numbers of experts.
    routing: with `return_routing`, int16 (B, T, layers with experts, experts per token): the experts of each token; -1
        on padding.
    hidden_states: with `return_hidden_states`, the residual streams (B, T, H) at these boundaries, in the order given.
    """

    # Any: whether they are None depends on the call, and type checkers would want a check before `out.loss.backward()`.
    loss: Any = None
    logits: Any = None
    aux_loss: Tensor | None = None
    last_hidden_state: Tensor | None = None
    ranks: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_kept_mass: Tensor | None = None
    z_loss: Tensor | None = None
    predicted: Tensor | None = None
    router_z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    routing: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


register_dataclass(CausalLMOutput)  # so that FSDP2 finds the tensors in it
