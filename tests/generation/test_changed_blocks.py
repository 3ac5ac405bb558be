"""Models whose blocks a user removed, repeated or moved decode as their forward passes compute, and route as theirs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CONFIGS, NEWER

import ligermodels as lm
from ligermodels.errors import InputError

CHANGES: dict[str, Callable[[Sequence[nn.Module]], Sequence[nn.Module]]] = {
    "first removed": lambda blocks: blocks[1:],
    "second removed": lambda blocks: [blocks[0], *blocks[2:]],
    "only the first": lambda blocks: blocks[:1],
    "repeated": lambda blocks: [*blocks, *blocks],
    "reversed": lambda blocks: blocks[::-1],
}


def greedy(model: lm.CausalLM, ids: Tensor, count: int) -> Tensor:
    """The likeliest tokens, each by a pass over the whole sequence."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize("name", ["llama-3", "gemma4_text", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_blocks_decode_as_they_compute(name: str, change: str) -> None:
    config: dict[str, Any] = {**CONFIGS, **NEWER}[name]
    torch.manual_seed(0)
    model = lm.from_config({**config, "eos_token_id": None}, dtype="float32").eval()
    for parameter in model.decoder.blocks.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4)  # tokens that depend on the ones before
    model.decoder.blocks = nn.ModuleList(CHANGES[change](list(model.decoder.blocks)))
    ids = torch.randint(3, 100, (2, 5))
    assert torch.equal(model.generate(ids, max_new_tokens=8), greedy(model, ids, 8))


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_experts_are_those_of_the_changed_blocks(change: str) -> None:
    torch.manual_seed(0)
    model = lm.from_config(
        {**CONFIGS["qwen3_moe"], "num_hidden_layers": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1}
    ).eval()
    model.decoder.blocks = nn.ModuleList(CHANGES[change](list(model.decoder.blocks)))
    mixtures = sum(block.mlp_has_extra_output for block in model.decoder.blocks)
    ids = torch.randint(3, 100, (2, 5))
    if not mixtures:
        with pytest.raises(InputError, match="no native layer with experts"):
            model(ids, return_routing=True)
        return
    chosen = model(ids, return_routing=True).routing
    assert chosen.shape[2] == mixtures
    given = chosen.flip(1)
    assert torch.equal(model(ids, routing=given, return_routing=True).routing, given)
