"""Ops under torch's autocast: results in the dtype of their operands, computed in float32, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels import ops


def operand(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


Q, KEYS, CACHE = operand(2, 5, 4, 16), operand(2, 5, 2, 16), operand(2, 9, 2, 16)
BLOCKS, LENGTHS = operand(1, 3, 2, 2, 16), torch.tensor([3, 1])
CALLS: dict[str, Callable[[], Tensor]] = {
    "attention": lambda: ops.attention(Q, KEYS, KEYS),
    "attention with a softcap": lambda: ops.attention(Q, KEYS, KEYS, softcap=3.0),
    "decode_attention": lambda: ops.decode_attention(Q, CACHE, CACHE, LENGTHS),
    "decode_attention of one token": lambda: ops.decode_attention(Q[:, :1], CACHE, CACHE, LENGTHS[:1].expand(2)),
    "private_key_attention": lambda: ops.private_key_attention(Q, KEYS, KEYS, [KEYS], [KEYS]),
    "block_context_attention": lambda: ops.block_context_attention(
        BLOCKS, BLOCKS, BLOCKS, CACHE[:1], CACHE[:1], torch.tensor([[1, 4, 9]])
    ),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_attention_is_that_without_autocast(where: Where, name: str) -> None:
    if where.device.type != "cpu" or where.dtype != torch.float32:
        pytest.skip("operands are float32 on the CPU")
    alone = CALLS[name]()
    with torch.autocast("cpu", torch.bfloat16):
        found = CALLS[name]()
    assert torch.equal(found, alone)


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "lora_linear": lambda x, w: ops.lora_linear(x, w, w[:3], w[:, :3]),
    "grouped_mm": lambda x, w: ops.grouped_mm(x, w[None], torch.tensor([len(x)], dtype=torch.int32)),
    "linear_log_probs": lambda x, w: ops.linear_log_probs(x, w, torch.arange(len(x))),
    "linear_cross_entropy": lambda x, w: ops.linear_cross_entropy(x, w, torch.arange(len(x)), reduction="none"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_backward_in_autocast_after_a_forward_outside(name: str) -> None:
    gradients = []
    for enabled in (False, True):
        x, w = operand(7, 24).requires_grad_(), operand(40, 24).requires_grad_()
        y = GRADIENTS[name](x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.backward(torch.cos(torch.arange(y.numel()).float()).view_as(y))
        gradients.append((x.grad, w.grad))
    for alone, found in zip(*gradients, strict=True):
        assert torch.equal(found, alone)
