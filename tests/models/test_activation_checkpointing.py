"""Activation checkpointing: the same gradients, to the bit, from less memory, and what is computed twice for that."""

import copy
import shutil
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from zoo import CONFIGS, OF_EACH_KIND

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.layers import offload


def make(name: str) -> lm.CausalLM:
    config = CONFIGS[name]
    if name != "laguna" and hasattr(AutoConfig.for_model(config["model_type"]), "router_aux_loss_coef"):
        # The load-balancing loss leaves the blocks by another way; Laguna, DeepSeek and families like it have none.
        config = {**config, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    return lm.from_config(config, dtype=torch.float32)


def gradients(model: lm.CausalLM, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "DEVICES", ("cpu",))  # the copies of "offload", without a GPU
    model, ids = make(name), torch.randint(100, (2, 11))
    wanted = gradients(model, ids)
    for mode in ("selective", "full", "offload"):
        model.activation_checkpointing = mode
        found = gradients(model, ids)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), mode


@pytest.mark.parametrize(("mode", "kept"), [("none", True), ("selective", False), ("full", False), ("offload", False)])
def test_what_is_kept(mode: str, kept: bool) -> None:
    """The results of norms and activations, which are the inputs of projections."""
    model = make("llama-3")
    model.activation_checkpointing = mode
    seen: list[weakref.ref[Tensor]] = []
    for block in model.decoder.blocks:
        for projection in (block.mixer.qkv, block.mlp.gate_up, block.mlp.down):
            projection.register_forward_pre_hook(lambda module, inputs: seen.append(weakref.ref(inputs[0])))
    loss = model(torch.randint(100, (2, 19)), labels=torch.randint(100, (2, 19))).loss
    assert len(seen) == 3 * len(model.decoder.blocks)
    assert [ref() is not None for ref in seen] == [kept] * len(seen)
    loss.backward()


class CountOps(TorchDispatchMode):
    """Counts matrix products, and forward passes of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("mm", "addmm"):
            self.counts["product"] += 1
        elif "attention" in name and "backward" not in name:
            self.counts["attention"] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_twice() -> None:
    """With "selective" no attention, and no matrix product of a model whose projections, but the last, widen."""
    model, ids = make("llama-2"), torch.randint(100, (2, 19))
    layers, counts = len(model.decoder.blocks), {}
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode
        loss = model(ids, labels=ids).loss
        with CountOps() as ops:
            loss.backward()
        counts[mode] = ops.counts
    assert counts["selective"] == counts["none"]
    # Of each block qkv, o and gate_up; down is not needed by any gradient.
    assert counts["full"] == counts["none"] + Counter(product=3 * layers, attention=layers)


def test_a_projection_of_another_kind() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base.requires_grad_(False), nn.Linear(base.in_features, 3, bias=False)
            self.up = nn.Linear(3, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model, ids = make("llama-3"), torch.randint(100, (2, 19))
    for block in model.decoder.blocks:
        block.mlp.down = Adapter(block.mlp.down)
        block.mixer.qkv = Adapter(block.mixer.qkv)
    wanted = gradients(model, ids)
    model.activation_checkpointing = "selective"
    assert all(map(torch.equal, gradients(model, ids), wanted))


def test_old_name() -> None:
    model = make("llama-3")
    for old, new in (("activations", "selective"), ("blocks", "full"), ("nothing", "none")):
        with pytest.warns(DeprecationWarning, match=r"model\.activation_checkpointing"):
            model.recompute = old
        assert (model.activation_checkpointing, model.recompute) == (new, old)


def test_unknown() -> None:
    model = make("llama-3")
    for mode in ("all", "nothing"):
        with pytest.raises(
            InputError, match=f"^activation_checkpointing: must be one of none, selective, full, offload, got '{mode}'"
        ):
            model.activation_checkpointing = mode


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_compiled_blocks(mode: Any) -> None:
    """The checkpoint is within the compiled function: around it, it would keep buffers that Inductor uses again."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = lm.from_config(CONFIGS["llama-3"], device=device).train()
    ids = torch.arange(3, 21, device=device).view(2, 9)
    model(ids, labels=ids).loss.backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    torch._dynamo.reset()
    for block in model.decoder.blocks:
        block.compile()
    for copied in (False, True):
        model.zero_grad()
        model.activation_checkpointing = mode
        model(ids, labels=ids).loss.backward()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
        model = model if copied else copy.deepcopy(model)
