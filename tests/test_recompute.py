"""What is computed again in the backward pass: the same gradients, to the bit, of what was not kept."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers import mlp


def gradients(model: lm.CausalLM, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("what", ["activations", "blocks"])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_gradients(name: str, what: str) -> None:
    torch.manual_seed(0)
    model = lm.from_config(CONFIGS[name], dtype=torch.float32, device="cpu")
    ids = torch.randint(100, (2, 19))
    kept = gradients(model, ids)
    model.recompute = what
    assert all(torch.equal(one, two) for one, two in zip(kept, gradients(model, ids), strict=True))


@pytest.mark.parametrize(("what", "kept"), [("nothing", True), ("activations", False), ("blocks", False)])
def test_what_is_kept(what: str, kept: bool) -> None:
    model = lm.from_config(CONFIGS["llama-3"], dtype=torch.float32, device="cpu")
    model.recompute = what
    seen: list[weakref.ref[Tensor]] = []
    for block in model.blocks:
        for projection in (block.attention.qkv, block.mlp.gate_up, block.mlp.down):
            projection.register_forward_pre_hook(lambda module, inputs: seen.append(weakref.ref(inputs[0])))
    loss = model(torch.randint(100, (2, 19)), labels=torch.randint(100, (2, 19))).loss
    assert len(seen) == 3 * len(model.blocks)
    assert [ref() is not None for ref in seen] == [kept] * len(seen)
    loss.backward()


def test_a_projection_of_another_kind() -> None:
    """Whatever takes the result, a low-rank adapter for one, saves the recipe too."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base.requires_grad_(False), nn.Linear(base.in_features, 3, bias=False)
            self.up = nn.Linear(3, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = lm.from_config(CONFIGS["llama-3"], dtype=torch.float32, device="cpu")
    for block in model.blocks:
        block.mlp.down = Adapter(block.mlp.down)
    ids = torch.randint(100, (2, 19))
    kept = gradients(model, ids)
    model.recompute = "activations"
    assert all(torch.equal(one, two) for one, two in zip(kept, gradients(model, ids), strict=True))


def test_a_projection_that_nobody_watches_is_part_of_its_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def glu_linear(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return ops.glu_linear(*arguments)

    monkeypatch.setattr(mlp, "ops", SimpleNamespace(glu_linear=glu_linear))
    model = lm.from_config(CONFIGS["llama-3"], dtype=torch.float32, device="cpu")
    ids = torch.randint(100, (2, 19))
    model(ids, labels=ids)
    assert not calls
    model.recompute = "activations"
    model(ids, labels=ids)
    assert len(calls) == len(model.blocks)
    model.blocks[0].mlp.down.register_forward_hook(lambda *_: None)
    model(ids, labels=ids)
    assert len(calls) == 2 * len(model.blocks) - 1
    with torch.autocast("cpu"), torch.no_grad():
        model(ids, labels=ids)
    assert len(calls) == 2 * len(model.blocks) - 1


def test_unknown() -> None:
    model = lm.from_config(CONFIGS["llama-3"], dtype=torch.float32, device="cpu")
    with pytest.raises(InputError, match=r"^recompute: must be one of nothing, activations, blocks, got 'all'"):
        model.recompute = "all"
