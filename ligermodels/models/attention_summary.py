"""Which attention backends a model runs on a device, and whether an optional package would be faster."""

from __future__ import annotations

from collections import Counter

import torch

from ligermodels.errors import InputError
from ligermodels.layers.initialization import skip_init
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig
from ligermodels.ops.attention.attention import AttentionRequest, choose, recorded_requests
from ligermodels.ops.attention.flash_attention import FLASH, not_installed

FASTEST = FLASH[0]


def attention_summary(config: DecoderConfig, device: torch.device, dtype: torch.dtype, seq_len: int = 8192) -> str:
    """One line for users, such as "varlen (13 of 26 layers), triton (13 of 26 layers)".

    The model runs once on the meta device, so every kind of layer counts, whatever its config.

    Args:
        config: the model.
        device: device of the model.
        dtype: dtype of queries, keys and values.
        seq_len: tokens in a row of two packed documents.

    Returns:
        Names of backends, with their numbers of layers if there are several; and a package that would be faster.
    """
    with torch.device("meta"), skip_init(), torch.no_grad(), recorded_requests() as calls:
        cu_seqlens = torch.tensor([0, seq_len // 2, seq_len], dtype=torch.int32)
        try:
            CausalLM(config).decoder(torch.zeros(1, seq_len, dtype=torch.long), cu_seqlens=cu_seqlens)
        except InputError as error:  # as of rows that are longer than the attention's chunks
            return f"unknown for rows of {seq_len} tokens: {error}"
        except (NotImplementedError, RuntimeError) as error:  # a layer of the user's own
            return f"unknown: a layer does not run on the meta device ({str(error).splitlines()[0]})"
    requests = [(request._replace(device=device.type, dtype=dtype), name) for request, name in calls]
    count = Counter(choose(request, name).name for request, name in requests)
    if not count:
        return "none: no layer has softmax attention"
    shares = (f"{name} ({n} of {len(calls)} layers)" for name, n in count.items())
    names = ", ".join(shares) if len(count) > 1 else next(iter(count))
    if device.type == "cuda" and any(name == "auto" and _would_be_faster(request) for request, name in requests):
        return f"{names}; {FASTEST.name} is not installed and would be faster (pip install 'ligermodels[flash-attn]')"
    return names


def _would_be_faster(request: AttentionRequest) -> bool:
    """Whether the fastest backend needs only its package. It is tuned for GPUs of compute capability 9.0 and later."""
    is_tuned = torch.cuda.get_device_capability() >= (9, 0)
    return is_tuned and FASTEST.refuses(request) == not_installed(FASTEST.name)
