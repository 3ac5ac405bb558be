"""The language-model head, which computes its own loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.arguments import check_flag, check_number, is_sequence, nearest, parameter_names
from ligermodels.errors import InputError
from ligermodels.layers.config_checks import check_numbers
from ligermodels.layers.linear import Linear
from ligermodels.layers.linear_parts import UNSHARDED, Compute
from ligermodels.layers.sharding import TensorSharding, call_gathered, gather_last, local, used_in_parts
from ligermodels.layers.token_rows import TokenRows
from ligermodels.ops.runtime.checks import check_plain


@dataclass(frozen=True)
class HeadConfig:
    """`tied`: the weight is the embedding's. Logits are scaled by `logit_scale`, then capped by `softcap`."""

    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "softcap", positive=True)


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

INPUTS = ("input_ids", "labels", "attention_mask", "position_ids", "cu_seqlens", "inputs_embeds")
"""Arguments of a model's forward that a name in place of an option of the loss may mean."""
_CACHE = "give state=model.new_state(batch, length) to decode with a cache"
INSTEAD = {
    "use_cache": _CACHE,
    "past_key_values": _CACHE,
    "output_hidden_states": "give return_hidden_states, a list of layers",
    "output_attentions": "attention probabilities are never in memory",
    "return_dict": "outputs have names and positions",
}
"""Arguments of transformers' models -> what to do instead."""

LOSS_RETURNS = {"return_rank": "ranks", "return_z_loss": "z_loss", "return_predicted": "predicted"}
"""Options of `ops.linear_cross_entropy` that add a result, in the order of the results, and their fields in
`HeadLoss`."""


class HeadLoss(NamedTuple):
    """The loss of a head, or the log-probabilities of its targets; None where a result was not asked for.

    loss: the cross entropy, a scalar, or of the targets' shape with the reduction "none".
    ranks: long, of the targets' shape: how many tokens are likelier than the target, -1 without a target.
    z_loss: the z-loss within the loss, reduced alike, without a gradient.
    predicted: long, of the targets' shape: the likeliest token, -1 without a target.
    log_probs: of the targets' shape, fp32 or wider; 0 without a target.
    entropy: of the targets' shape, fp32 or wider; 0 without a target.
    log_kept_mass: of the targets' shape, fp32 or wider, without a gradient; 0 without a target.
    """

    loss: Tensor | None = None
    ranks: Tensor | None = None
    z_loss: Tensor | None = None
    predicted: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_kept_mass: Tensor | None = None


def _check_items(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        check_number(name, value)


def _check_items_of_heads(name: str, value: Any) -> None:
    for each in value if is_sequence(value) else [value]:
        _check_items(name, each)


WITHOUT_TARGET = {**dict.fromkeys(HeadLoss._fields, 0.0), "ranks": -1, "predicted": -1}
"""The values in a `HeadLoss` of tokens without a target, by field."""

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "num_items_in_batch": _check_items,
    "token_weights": check_plain,
    "class_weights": check_plain,
    "token_scaling": check_flag,
    "label_smoothing": check_number,
    "z_loss": check_number,
    "reduction": lambda name, value: None,  # the op checks it
    "memory_budget": partial(check_number, positive=True),
}


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None: None stands for the default."""
    return {name: value for name, value in options.items() if value is not None}


def check_loss_options(
    options: Mapping[str, Any], needed: Tensor | None, needs: str = "labels", *, of_heads: bool = False
) -> dict[str, Any]:
    """Check the options of a loss.

    Args:
        options: the options by name: LOSS_OPTIONS and `num_items_in_batch`; None stands for the default.
        needed: the labels or targets, without which there is no loss.
        needs: name of `needed` in error messages.
        of_heads: whether `num_items_in_batch` may be several numbers, one for each head.

    Returns:
        The options that are not None.

    Raises:
        InputError: an unknown option, an option without `needed`, or a value of a wrong type.
    """
    checks = {**_CHECKS, "num_items_in_batch": _check_items_of_heads} if of_heads else _CHECKS
    for name, value in options.items():
        if name not in checks:
            hint = f"; {INSTEAD[name]}" if name in INSTEAD else nearest(name, (*LOSS_OPTIONS, *INPUTS))
            raise InputError(f"{name}: no such argument{hint}; options of the loss are {', '.join(LOSS_OPTIONS)}")
        if value is None:
            continue
        if needed is None:
            raise InputError(f"{name}: is an option of a loss, which needs {needs}")
        checks[name](name, value)
    return given_options(options)


LOG_PROB_OPTIONS = ("memory_budget", "entropy_in_loss", "temperature", "top_k", "top_p", "min_p")
"""What a caller of a model may choose of its log-probabilities: see `ops.linear_log_probs`."""


def check_log_prob_options(options: Mapping[str, Any], labels: Tensor | None) -> dict[str, Any]:
    """Check the options of log-probabilities.

    Args:
        options: the options by name; None stands for the default.
        labels: the labels, without which there are no log-probabilities.

    Returns:
        The options that are not None.

    Raises:
        InputError: there are no labels; an unknown option, an option of the loss, or a value of a wrong type.
    """
    if labels is None:
        raise InputError("labels: log-probabilities are of labels; give them")
    temperature = options.get("temperature")
    if isinstance(temperature, Tensor) and (
        temperature.shape != labels.shape or temperature.device != labels.device or not temperature.is_floating_point()
    ):
        raise InputError(
            f"temperature: must be a number or of the shape of labels, {tuple(labels.shape)}, floating, on "
            f"{labels.device}; got {temperature.dtype} {tuple(temperature.shape)} on {temperature.device}"
        )
    for name, value in options.items():
        if name in LOG_PROB_OPTIONS or value is None:
            if name == "memory_budget" and value is not None:
                check_number(name, value, positive=True)
            continue
        if name not in (*LOSS_OPTIONS, *LOSS_RETURNS, "num_items_in_batch"):
            raise InputError(f"{name}: no such argument; options of log-probabilities: {', '.join(LOG_PROB_OPTIONS)}")
        raise InputError(f"{name}: is an option of the loss, and log-probabilities take the place of the loss")
    return given_options(options)


def _options_of(op: Callable[..., Any]) -> list[str]:
    """What a caller of a head may choose of an op over hidden states, a weight, targets and a bias."""
    return [name for name in parameter_names(op)[4:] if name not in ("softcap", "logit_scale")]  # the config's


_OPTIONS = {False: _options_of(ops.linear_cross_entropy), True: _options_of(ops.linear_log_probs)}
"""Whether log-probabilities take the place of the loss -> the options."""


def loss_or_log_probs(
    config: HeadConfig,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    *,
    log_probs: bool = False,
    **options: Any,
) -> HeadLoss:
    """The loss or the log-probabilities of a head, without materialised logits.

    Args:
        config: scale and cap of the logits.
        hidden: (..., H), hidden states.
        weight: (V, H).
        targets: long (...), -100 where ignored.
        bias: (V,), or None.
        log_probs: compute `ops.linear_log_probs` instead of `ops.linear_cross_entropy`.
        options: other arguments of the op.

    Returns:
        The op's results by name.

    Raises:
        InputError: an option that the op does not have.
    """
    for name in options:
        if name not in _OPTIONS[log_probs]:
            raise InputError(f"{name}: no such argument; options of the head are {', '.join(_OPTIONS[log_probs])}")
    scaling: dict[str, Any] = {"softcap": config.softcap, "logit_scale": config.logit_scale}
    if log_probs:
        numbers = ops.linear_log_probs(hidden, weight, targets, bias, **scaling, **options)
        if isinstance(numbers, Tensor):
            return HeadLoss(log_probs=numbers)
        return HeadLoss(
            log_probs=numbers.log_probs,
            entropy=numbers.entropy,
            predicted=numbers.predicted,
            log_kept_mass=numbers.log_kept_mass,
        )
    return as_head_loss(ops.linear_cross_entropy(hidden, weight, targets, bias, **scaling, **options), options)


def as_head_loss(result: HeadLoss | Tensor | tuple[Tensor, ...], options: Mapping[str, Any]) -> HeadLoss:
    """The results of a loss by name.

    Args:
        result: a `HeadLoss`; or the result of `ops.linear_cross_entropy`, or of a head of a user's own in that form.
        options: the options of the loss, which say what the result holds.
    """
    if isinstance(result, HeadLoss):
        return result
    names = ["loss", *(field for option, field in LOSS_RETURNS.items() if options.get(option))]
    return HeadLoss(**dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True)))


def scaled_logits(config: HeadConfig, logits: Tensor) -> Tensor:
    """Logits (..., V), scaled by `logit_scale` and then capped by `softcap`."""
    scale, softcap = config.logit_scale, config.softcap
    logits = logits if scale == 1.0 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class LMHead(Linear):
    """Projects hidden states to the vocabulary, and computes its own loss, for which no logits are kept.

    Its weight may be the embedding's (`HeadConfig.tied`) or be quantised (`store`). Its `update` may replace rows
    (`TokenRows`).
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": 0, "bias": 0}

    def __init__(self, hidden_size: int, vocab_size: int, config: HeadConfig | None = None) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.config = config or HeadConfig()
        if self.config.bias:
            self.bias = nn.Parameter(torch.zeros(vocab_size))

    def check_part(self, name: str, part: Any) -> None:
        """The loss of a head is computed from its weight: an `update` replaces rows, and `compute` holds the weight."""
        super().check_part(name, part)
        if part is not None and not (isinstance(part, TokenRows) if name == "update" else part.holds_weight):
            advice = "only a Compute that holds the weight is" if name == "compute" else "train the weight itself"
            raise InputError(f"{name}: a {type(part).__name__} is not supported by a language-model head; {advice}")

    def reset_parameters(self) -> None:
        """Nothing: `init_weights` fills the weight, which is large, once."""

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """Parameters that another module fills: the weight of a tied head is the embedding's."""
        return ("weight",) if self.config.tied else ()

    def init_weights(self, std: float) -> None:
        """normal(0, std), bias zero; a tied weight is the embedding's to fill."""
        if not self.config.tied and self.weight is not None:
            nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]  # a head is called with targets, not with an activation
        self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any
    ) -> Any:
        """The logits, or with targets the loss.

        Args:
            hidden: hidden states (..., H).
            targets: long (...), -100 where ignored.
            loss_options: arguments of `ops.linear_cross_entropy`; or with `log_probs=True` of `ops.linear_log_probs`.

        Returns:
            Logits (..., V); with targets a `HeadLoss`.
        """
        if targets is not None:
            with self.loss_weight(hidden.dtype) as weight:
                return loss_or_log_probs(self.config, hidden, weight, targets, self.bias, **loss_options)
        if self.weight is None:
            return scaled_logits(self.config, self._updated(self._product(hidden, None, self.bias, UNSHARDED), hidden))
        logits = ops.linear(used_in_parts(self, hidden), local(self, self.weight), local(self, self.bias))
        logits = self._updated(logits, hidden)
        return gather_last(self, scaled_logits(self.config, logits), self.out_features)

    def loss_weight(self, dtype: torch.dtype) -> AbstractContextManager[Tensor]:
        """The weight for a loss, as a context manager. A quantised weight is dequantised to `dtype` for the loss."""
        weight = self._dequantized(dtype) if self.weight is None else nullcontext(self.weight)
        return weight if self.update is None else self._with_rows(weight)

    def _updated(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Logits (..., V) of `hidden` (..., H), before they are scaled, with the logits of the update."""
        rows = cast("TokenRows | None", self.update)
        return logits if rows is None else rows.replace_logits(logits, hidden, self.bias)

    @contextmanager
    def _with_rows(self, base: AbstractContextManager[Tensor]) -> Iterator[Tensor]:
        """The weight with the rows of the update."""
        with base as weight:
            yield cast(TokenRows, self.update).replace_rows(weight)

    @contextmanager
    def _dequantized(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Dequantised for the loss, and again where its backward pass needs it: several losses, as of Medusa heads that
        share the lm_head, do not each keep a copy."""
        compute = cast(Compute, self.compute)
        weight: Tensor = call_gathered(compute, compute.dense, dtype)
        if torch.compiler.is_compiling():
            yield weight
            return
        kept = weakref.ref(weight)

        def pack(saved: Tensor) -> Tensor | None:
            return None if saved is kept() else saved

        def unpack(saved: Tensor | None) -> Tensor:
            return call_gathered(compute, compute.dense, dtype) if saved is None else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield weight
