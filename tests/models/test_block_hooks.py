"""Hooks on blocks see and change whole hidden states, with a decoding state as without one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm


@pytest.mark.parametrize("name", ["llama-3", "gemma2", "qwen3_moe", "falcon_h1-norms-and-biases"])
@pytest.mark.parametrize("blocks", [(0,), (1,), (0, 1)], ids=str)
def test_hooks_while_decoding(name: str, blocks: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = lm.from_config(CONFIGS[name], dtype=torch.float32).eval()
    ids = torch.randint(3, model.config.vocab_size, (2, 7))
    seen: list[Tensor] = []

    def halve(block: Any, arguments: Any, output: Any) -> Any:
        seen.append(output.hidden)
        return output._replace(hidden=output.hidden / 2)

    def read(block: Any, arguments: Any) -> None:
        seen.append(arguments[0])

    for i in blocks:
        model.decoder.blocks[i].register_forward_hook(halve)
    model.decoder.blocks[-1].register_forward_pre_hook(read)
    with torch.no_grad():
        wanted = model(ids).logits
        whole, seen[:] = [*seen], []
        state = model.new_state(2, 7)
        parts = [model(part, state=state).logits for part in (ids[:, :4], ids[:, 4:6], ids[:, 6:])]
    torch.testing.assert_close(torch.cat(parts, 1), wanted)
    assert len(seen) == 3 * len(whole) == 3 * (len(blocks) + 1)
    for i, each in enumerate(whole):
        torch.testing.assert_close(torch.cat(seen[i :: len(whole)], 1), each)
