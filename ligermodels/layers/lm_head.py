"""The language-model head, which computes its own loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.arguments import check_flag, check_number
from ligermodels.errors import InputError
from ligermodels.layers.linear import Linear
from ligermodels.layers.packing import check_plain
from ligermodels.layers.sharding import TensorSharding, call_gathered, gather_last, local, on_all_ranks


@dataclass(frozen=True)
class HeadConfig:
    """`tied`: the weight is the embedding's. Logits are scaled by `logit_scale`, then capped by `softcap`."""

    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0


LOSS_OPTIONS = (
    "token_weights",
    "class_weights",
    "token_scaling",
    "label_smoothing",
    "z_loss",
    "reduction",
    "memory_budget",
)
"""What a caller of a model may choose of its loss: see `ops.linear_cross_entropy`."""

LOSS_RETURNS = ("return_rank", "return_z_loss", "return_predicted")
"""What the loss of a head may return after the loss, in this order."""


def named_results(found: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a head's loss gave with these options: "loss", and those of LOSS_RETURNS that were asked for."""
    names = ["loss", *(name for name in LOSS_RETURNS if options.get(name))]
    return dict(zip(names, found if len(names) > 1 else (found,), strict=True))


def check_loss_options(
    options: Mapping[str, Any], needed: Tensor | None, needs: str = "labels", *, of_heads: bool = False
) -> None:
    """InputError for a name that is not among LOSS_OPTIONS (nor `num_items_in_batch`), for any option without the
    `needed` tensor, called `needs`, and for values of wrong types. `of_heads`: `num_items_in_batch` may be several."""
    for name, value in options.items():
        if name not in (*LOSS_OPTIONS, "num_items_in_batch"):
            raise InputError(f"{name}: no such argument; options of the loss are {', '.join(LOSS_OPTIONS)}")
        if needed is None and value is not None:
            raise InputError(f"{name}: is an option of a loss, which needs {needs}")
        if name in ("label_smoothing", "z_loss") and value is not None:
            check_number(name, value)
        elif name == "memory_budget" and value is not None:
            check_number(name, value, positive=True)
        elif name in ("token_weights", "class_weights") and value is not None:
            check_plain(name, value)
        elif name == "token_scaling" and value is not None:
            check_flag(name, value)
    items = options.get("num_items_in_batch")
    if items is not None and not isinstance(items, Tensor):
        for each in items if of_heads and isinstance(items, list | tuple) else [items]:
            check_number("num_items_in_batch", each)


LOG_PROB_OPTIONS = ("memory_budget", "entropy_in_loss")
"""What a caller of a model may choose of its log-probabilities: see `ops.linear_log_probs`."""


def check_log_prob_options(options: Mapping[str, Any], labels: Tensor | None) -> None:
    """InputError unless log-probabilities may be asked for with these labels and options."""
    if labels is None:
        raise InputError("return_log_probs: are of labels; give them")
    for name, value in options.items():
        if name in LOG_PROB_OPTIONS or value is None:
            if name == "memory_budget" and value is not None:
                check_number(name, value, positive=True)
            continue
        if name not in (*LOSS_OPTIONS, *LOSS_RETURNS, "num_items_in_batch"):
            raise InputError(f"{name}: no such argument; options of log-probabilities: {', '.join(LOG_PROB_OPTIONS)}")
        raise InputError(f"{name}: is an option of the loss, which return_log_probs takes the place of")


def head_loss(
    config: HeadConfig,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    log_probs: bool = False,
    **options: Any,
) -> Any:
    """`ops.linear_cross_entropy` of a head, or with `log_probs` its `ops.linear_log_probs`."""
    op: Callable[..., Any] = ops.linear_log_probs if log_probs else ops.linear_cross_entropy
    return op(hidden, weight, targets, bias, softcap=config.softcap, logit_scale=config.logit_scale, **options)


def scaled_logits(config: HeadConfig, logits: Tensor) -> Tensor:
    """The products of hidden states and weight, scaled and capped as `config` says."""
    scale, softcap = config.logit_scale, config.softcap
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class LMHead(Linear):
    """Projects hidden states to the vocabulary, and computes its own loss, for which no logits are kept.

    Its weight may be the embedding's (`HeadConfig.tied`) or be quantised (`store`).
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": 0, "bias": 0}

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadConfig | None = None) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.config = config or HeadConfig()
        if self.config.bias:
            self.bias = nn.Parameter(torch.zeros(vocab_size))

    def reset_parameters(self) -> None:
        """Nothing: `init_weights` fills the weight, which is large, once."""

    def init_weights(self, std: float) -> None:
        """normal(0, std), bias zero; a tied weight is the embedding's to fill."""
        if not self.config.tied and self.weight is not None:
            nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]  # a head is called with targets, not with an activation
        self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any
    ) -> Any:
        """hidden (..., H) -> logits (..., V); with targets (...) the loss of `ops.linear_cross_entropy` instead.

        `loss_options` (LOSS_OPTIONS, LOSS_RETURNS and others) go to that op. With
        `log_probs=True` the result and the options are those of `ops.linear_log_probs`.
        """
        if targets is not None:
            with self._loss_weight(hidden.dtype) as weight:
                return head_loss(self.config, hidden, weight, targets, self.bias, **loss_options)
        if self.weight is None:
            return scaled_logits(self.config, super().forward(hidden))
        x = on_all_ranks(self, hidden, self.weight)
        logits = ops.linear(x, local(self, self.weight), local(self, self.bias))
        return gather_last(self, scaled_logits(self.config, logits), self.weight)

    @contextmanager
    def _loss_weight(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The weight for a loss. One that is quantised is dequantised for the loss, and again where its backward pass
        needs it: several losses, as of Medusa heads that share the lm_head, do not each keep a copy."""
        compute = self.compute
        if self.weight is not None or compute is None:
            yield self.weight
            return
        weight: Tensor = call_gathered(compute, compute.dense, None, dtype)
        if torch.compiler.is_compiling():
            yield weight
            return
        kept = weakref.ref(weight)

        def pack(saved: Tensor) -> Tensor | None:
            return None if saved is kept() else saved

        def unpack(saved: Tensor | None) -> Tensor:
            return call_gathered(compute, compute.dense, None, dtype) if saved is None else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield weight
