"""Residual streams of a model on two ranks equal the residual streams of one process."""

from pathlib import Path

import torch
from test_context_parallel import inputs_of_all_kinds
from test_parallel import build, check_equal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_ranks
from zoo import CONFIGS

import ligermodels as lm

CONFIGS["two"] = {**CONFIGS["llama-3"], "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
PLANS = {
    "FSDP2": ("qwen3_5_text", lm.ParallelPlan()),
    "FSDP2, tied": ("gemma2", lm.ParallelPlan(activation_checkpointing="full")),
    "tensor": ("two", lm.ParallelPlan(tensor=2, activation_checkpointing="selective")),
    "context": ("qwen3_moe", lm.ParallelPlan(context=2)),
}
INPUTS = {name: given for name, given in inputs_of_all_kinds().items() if name in ("rows", "packed", "padded")}


def states_of(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for name, (family, plan) in PLANS.items():
        plain, model = build(family), lm.parallelize(build(family), plan)
        sharded = [isinstance(p, DTensor) for p in model.parameters()]
        every = range(len(plain.decoder.blocks) + 1)
        for inputs in INPUTS.values():
            given = {key: value for key, value in inputs.items() if key != "labels"}
            if "FSDP2" in name and rank:  # a batch of its own
                given["input_ids"] = given["input_ids"].flip(1)
            found, wanted = (lm.capture(each, boundaries=every, **given) for each in (model, plain))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            assert not found.states.requires_grad
        assert sharded == [isinstance(p, DTensor) for p in model.parameters()]  # none stays gathered
        assert (model.decoder._sequence_mesh is not None) == (name == "tensor")  # sequence parallelism
        # A loss of states beside the model's own: its gradients reach the parameters before them.
        for each in (plain, model):
            loss_of(each, INPUTS["padded"]).backward()
        check_equal(model, plain, lambda p: p.grad, atol=1e-5)


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(**inputs, return_hidden_states=(0, 2))
    assert not any(state._is_view() for state in out.hidden_states)  # FSDP2 would warn
    return out.loss + sum(state.square().mean() for state in out.hidden_states)


def test_states_of_distributed_models(tmp_path: Path) -> None:
    in_ranks(2, states_of, tmp_path)
