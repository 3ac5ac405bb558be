"""Context parallelism: each rank of a group has a part of the tokens of every row (`layers.tokens.ContextShard`).

Keys and values are gathered from all ranks, and each chunk of queries attends to the keys up to its end, as in the
training of Llama 3 (2024, https://arxiv.org/abs/2407.21783, section 3.3.2). This is exact for everything that
`ops.attention` supports (windows, packed documents, sinks, softcap), with any backend. Keys and values have few heads,
so they are small beside the scores that are computed from them.

The backward pass of each exchange is its transpose: the gradient of a gather is the sum over ranks. So a result that
all ranks have alike, such as a loss, may be differentiated on each rank, and the mean of the gradients over ranks, as
FSDP2 takes it, is the gradient.

A layer supports it if it declares `context_parallel`, or, a feed-forward layer, `token_wise`: see `layers.layer.Layer`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import ops
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.tokens import ContextShard


def shard_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, shard: ContextShard, **options: Any
) -> Tensor:
    """`ops.attention` of this rank's queries over the keys and values of all ranks.

    Args:
        q: queries (rows, 2 * chunk, Hq, D) of the tokens of the `shard`.
        k: keys (rows, 2 n * chunk, Hkv, D), a result of `shard.all_tokens`.
        v: values (rows, 2 n * chunk, Hkv, D), a result of `shard.all_tokens`.
        cu_seqlens: int32 (n + 1,), bounds of the documents packed into the whole row, or None.
        shard: this rank's part of the tokens.
        options: other arguments of `ops.attention`.

    Returns:
        (rows, 2 * chunk, Hq, D).
    """
    chunks, window = [], options.get("window")
    for chunk, queries in zip(shard.chunks, q.split(shard.chunk, dim=1), strict=True):
        end = (chunk + 1) * shard.chunk
        # The first query of the chunk sees no key before `start`.
        start = 0 if window is None else max(0, end - shard.chunk - window + 1)
        bounds = None
        if cu_seqlens is not None:  # bounds of the keys, with padding as a document of its own
            bounds = F.pad(cu_seqlens, (0, 1), value=end).clamp(start, end) - start
        chunks.append(ops.attention(queries, k[:, start:end], v[:, start:end], cu_seqlens=bounds, **options))
    return torch.cat(chunks, dim=1)


def check_context_parallel(decoder: Any, ranks: int) -> None:
    """Check that each layer supports context parallelism.

    Args:
        decoder: the `Decoder`.
        ranks: ranks of context parallelism, times those of tensor parallelism.

    Raises:
        ConfigError: for the first layer that does not.
    """
    for i, block in enumerate(decoder.blocks):
        for name, layer in block.declarations().items():
            if not layer.context_parallel and (name == "mixer" or not layer.token_wise):
                layer_class = type(block.get_submodule(name)).__name__
                raise ConfigError(
                    f"context: blocks[{i}].{name} ({layer_class}) cannot be given a part of a sequence; its class "
                    "has no `context_parallel`, see ligermodels.layers.Layer. Spread the model by shard and replicate"
                )
            try:
                layer.check_context_parallel(ranks)
            except (ConfigError, InputError) as error:
                raise ConfigError(f"context: blocks[{i}].{name}: {error}") from None
