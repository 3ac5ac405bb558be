"""Memory of steps with several forward passes: the gradients of the passes before are there while activations are."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import LLAMA

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.parallel.advice import candidates
from ligermodels.parallel.memory import step_memory

CONFIG = {**LLAMA, "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6, "intermediate_size": 512}


class Allocated(TorchDispatchMode):
    """Bytes of all storages that operations make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.now, self.peak = set[int](), 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("mode", ["none", "full"])
def test_gradients_of_passes_before_are_counted(mode: Any) -> None:
    """What a second pass adds to the peak, against tensors of a real step; a third one adds nothing."""
    model, meta = (lm.from_config(CONFIG, dtype=torch.float32, device=device) for device in ("cpu", "meta"))
    model.activation_checkpointing = meta.activation_checkpointing = mode
    ids, peaks = torch.randint(3, 100, (8, 64)), []
    for passes in (1, 2, 3):
        model.zero_grad()
        with Allocated() as allocated:
            for _ in range(passes):
                model(ids, labels=ids).loss.backward()
        peaks.append(allocated.peak)
    planned = [step_memory(meta, 8, 64, passes=passes) for passes in (1, 2, 3)]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert planned[1].total - planned[0].total == pytest.approx(peaks[1] - peaks[0], abs=0.15 * gradients)
    assert planned[1] == planned[2] and peaks[1] == peaks[2]
    halves = [step_memory(meta, 8, 64, shard=2, passes=passes).total for passes in (1, 2)]
    assert halves[1] - halves[0] < 0.6 * gradients
    with pytest.raises(InputError, match="passes: is 2, and optimizer_in_bwd takes one"):
        step_memory(meta, 2, 32, passes=2, optimizer_in_bwd=True)


def test_plans_count_them() -> None:
    """Plans fit with all their passes; one that takes a step in one pass may fit where more passes do not."""
    meta = lm.from_config(CONFIG, dtype=torch.float32, device="meta")
    one, two = step_memory(meta, 2, 32), step_memory(meta, 1, 32, passes=2)
    for each in candidates(meta, 1, 2**30, 64, 32):
        meta.activation_checkpointing = each.activation_checkpointing
        assert each.memory == step_memory(meta, each.micro_batch, 32, passes=each.passes)
    meta.activation_checkpointing = "none"
    if one.total < two.total:
        (found,) = (
            x for x in candidates(meta, 1, int(one.total * 1.12), 64, 32) if x.activation_checkpointing == "none"
        )
        assert (found.micro_batch, found.passes) == (2, 1)
