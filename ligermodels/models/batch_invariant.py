"""The layers of a model that have no form under `ops.set_batch_invariant`."""

from __future__ import annotations

from typing import Any

from ligermodels.layers.linear import Composed
from ligermodels.layers.modules import modules_of
from ligermodels.layers.rope import RotaryEmbedding
from ligermodels.ops import refuse_batch_invariant


def check_batch_invariant(decoder: Any) -> None:
    """Raise BackendError, which names it, for the first part of a `Decoder` that has no batch-invariant form."""
    for i, block in enumerate(decoder.blocks):
        for name, layer in block.declarations().items():
            if not layer.batch_invariant:
                refuse_batch_invariant(f"blocks[{i}].{name} ({type(block.get_submodule(name)).__name__})")
    if decoder._tensor_ranks != 1 or decoder._sequence_mesh is not None or decoder._context_mesh is not None:
        refuse_batch_invariant("tensor, sequence or context parallelism", "spread the model by shard and replicate")
    for rope in modules_of(decoder, RotaryEmbedding):
        scaling = rope.config.scaling
        if scaling is not None and (scaling.context_thresholds.switch or scaling.context_thresholds.moving):
            refuse_batch_invariant(f"rotary scaling by the length of a row ({type(scaling).__name__})")
    for name, module in decoder.named_modules():
        if getattr(module, "_expert_mesh", None) is not None:
            refuse_batch_invariant(f"expert parallelism of {name}")
        if isinstance(module, Composed) and module.compute is not None:
            part = module.compute
            refuse_batch_invariant(f"{name} with {type(part).__name__}", "keep its weight in the model's dtype")
