"""The model that samples completions: the trained model itself, or a whole copy of its current weights on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ligermodels.errors import InputError
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors, skip_init
from ligermodels.layers.quantized import quantized_weights
from ligermodels.layers.sharding import gathered, is_sharded, reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.tensors import dtype_named
from ligermodels.parallel.plan import DtypeName
from ligermodels.parallel.ranks import parallelism_of


class SamplingModel:
    """The weights that completions are sampled from, which are always the current weights of the trained model.

    An unsharded model samples by itself. A sharded model is copied: each parameter is gathered once, whole on each
    rank, so that decoding exchanges nothing between ranks and may record CUDA graphs. The copy has the dtype of the
    computation (`param_dtype` of the plan, else the parameters' dtype), and memory only while it samples.

    Args:
        model: the trained model.
        prepare: makes on a copy, on the meta device, the changes that the base model had before it was loaded, such as
            LoRA. It may quantise the copy where the model is not: the weights are then rounded while they are copied.
        quantizes: whether `prepare` quantises the copy, which is then made of an unsharded model too. Default: False.

    Raises:
        InputError: `prepare` raises it, for a layer that has no quantised form.
    """

    def __init__(self, model: CausalLM, prepare: Callable[[CausalLM], object], *, quantizes: bool = False) -> None:
        self.model = model
        spread = parallelism_of(model)
        dtype = None if spread is None else spread.plan.param_dtype
        self._copy = empty_copy(model, prepare, dtype) if quantizes or is_sharded(model) else None

    @contextmanager
    def __call__(self) -> Iterator[CausalLM]:
        """Context manager with the model to sample from. All ranks of a sharded model enter it together.

        Raises:
            InputError: a weight that is to be quantised is not finite.
        """
        if (copy := self._copy) is None:
            yield self.model
            return
        reshard(self.model)
        try:
            copy.to_empty(device=self.model.device)
            initialize_buffers(copy, copy.config.initializer_range)
            _fill(copy, self.model)
            yield copy
        finally:
            copy.to_empty(device="meta")  # frees the memory


def empty_copy(
    model: CausalLM, prepare: Callable[[CausalLM], object], param_dtype: DtypeName | None = None
) -> CausalLM:
    """The copy of a `SamplingModel`, on the meta device; with `param_dtype` in the dtype of a plan's computation."""
    with torch.device("meta"), skip_init():
        copy = CausalLM(model.config, model.export_spec)
    prepare(copy)
    allocate(copy, dtype_named(param_dtype) or model.dtype, "meta")
    return copy.requires_grad_(False).eval()


@torch.no_grad()
def _fill(copy: CausalLM, model: CausalLM) -> None:
    """Copy the weights of a model, gathered one by one. Weights that are quantised in the copy alone are rounded."""
    sources = persistent_tensors(model)
    rounded = {} if quantized_weights(model) else quantized_weights(copy)
    for name, codes in rounded.items():
        try:
            codes.fill(gathered(sources[name]))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    codes_of_rounded = {id(tensor) for codes in rounded.values() for tensor in codes.parameters()}
    for name, tensor in persistent_tensors(copy).items():
        if id(tensor) not in codes_of_rounded:
            tensor.copy_(gathered(sources[name]))
