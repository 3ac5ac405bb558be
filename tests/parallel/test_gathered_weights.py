"""Weights that go out of a sharded model, and into it, after a forward pass that no backward pass follows: FSDP2 has
then gathered some of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_parallel import batch, build, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.convert import publish
from ligermodels.errors import CheckpointError, InputError
from ligermodels.integrations import wrap
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.speculative.joint import frozen_copy


def weights(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    ids = batch(0)["input_ids"]
    for name, plan in (("llama-3", lm.ParallelPlan()), ("llama-3.2", lm.ParallelPlan(fsdp_unit="model"))):
        plain, model = build(name), lm.parallelize(build(name), plan)
        wanted = plain.hf_state_dict()

        assert model(ids).logits.requires_grad
        torch.testing.assert_close(model.hf_state_dict(), wanted, rtol=0, atol=0)

        model(ids)
        with mock.patch.object(publish, "publish") as push:
            model.push_to_hub("me/model")
        pushed = push.call_args.args[1].keywords["state"]
        assert all(isinstance(tensor, DTensor) for tensor in pushed.values())
        for key, tensor in persistent_tensors(plain).items():
            assert torch.equal(whole(pushed[key]), tensor)

        model(ids)
        model.load_hf_state_dict({key: tensor + 1 for key, tensor in wanted.items()})
        torch.testing.assert_close(model.hf_state_dict(), {key: x + 1 for key, x in wanted.items()}, rtol=0, atol=0)
        for target in (plain, model):  # several threads copy, and would enter collective calls in different orders
            with pytest.raises(CheckpointError, match="is a DTensor; give whole tensors"):
                target.load_hf_state_dict(pushed)

    # Parameters of heads are in the group of the whole model.
    both: list[lm.MedusaModel] = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append(lm.MedusaModel.from_base(build("llama-3"), num_heads=2, lm_head="shared"))
    plain_heads, heads = both
    lm.parallelize(heads)
    heads(ids)
    heads.save_pretrained(folder / "heads")
    if rank == 0:
        again = lm.MedusaModel.from_pretrained(build("llama-3"), folder / "heads")
        torch.testing.assert_close(again.heads.state_dict(), plain_heads.heads.state_dict(), rtol=0, atol=0)


def changes(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """A model that is gathered as a whole is still a sharded one."""
    ids, plan = batch(0)["input_ids"], lm.ParallelPlan(fsdp_unit="model")
    plain, model = build("llama-3"), lm.parallelize(build("llama-3"), plan)
    adapted = lm.parallelize(lm.add_lora(build("llama-3"), r=2), plan)
    calls: dict[str, Any] = {
        "add_lora": lambda: lm.add_lora(model, r=2),
        "merge_lora": lambda: lm.merge_lora(adapted),
        "quantize": lambda: lm.quantize(model, "int4"),
        "float8": lambda: lm.float8(model),
        "wrap": lambda: wrap(model),
    }
    for name, call in calls.items():
        model(ids), adapted(ids)
        with pytest.raises(InputError, match=f"{name}: the model is sharded"):
            call()
    model(ids)
    with torch.no_grad():
        torch.testing.assert_close(frozen_copy(model)(ids).logits, plain(ids).logits)


def errors(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """An error, which the caller catches, between the backward pass and the step: the next pass has the new weights."""
    bad = torch.full((2, 13), 9999)
    calls: list[Callable[[lm.CausalLM], Any]] = [lambda model: model(bad), lambda model: model.log_probs(bad, bad)]
    for call in calls:
        losses: list[list[torch.Tensor]] = []
        for model in (build("llama-3"), lm.parallelize(build("llama-3"))):
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            losses.append([])
            for i in range(4):
                losses[-1].append(model(**batch(i)).loss)
                losses[-1][-1].backward()
                with pytest.raises(InputError, match="token ids must lie in"), torch.set_grad_enabled(i % 2 == 0):
                    call(model)
                optimizer.step()
                optimizer.zero_grad()
            assert all(isinstance(p, DTensor) for p in model.parameters()) == (len(losses) == 2)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def copies(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """A frozen copy is made from the config: of a model that is not as the config makes it, it is refused."""
    ids = batch(0)["input_ids"]

    def without_a_block(model: lm.CausalLM) -> None:
        model.decoder.blocks = model.decoder.blocks[:1]

    def softer(model: lm.CausalLM) -> None:
        model.decoder.blocks[1].residual_scale = 0.5

    changes: dict[str, Callable[[lm.CausalLM], object]] = {
        r"update\.lora_A": lambda model: lm.add_lora(model, r=2),
        r"compute\.codes": lambda model: lm.quantize(model, "int4"),
        r"decoder\.blocks\.1\.": without_a_block,
        r"model\.decoder\.blocks\.1\.residual_scale": softer,
    }
    for name, change in changes.items():
        model = build("llama-3")
        change(model)
        wanted, before = frozen_copy(model)(ids).logits, frozen_copy(model)
        lm.parallelize(model)
        with pytest.raises(InputError, match=f"frozen_copy: .*{name}.*before lm.parallelize, and distribute"):
            frozen_copy(model)
        torch.testing.assert_close(lm.parallelize(before)(ids).logits, wanted)
    model = lm.parallelize(build("llama-3"))
    model.batch_invariant = True
    assert frozen_copy(model).batch_invariant


def test_frozen_copies(tmp_path: Path) -> None:
    in_two_ranks(copies, tmp_path)


def test_passes_that_end_with_an_error(tmp_path: Path) -> None:
    in_two_ranks(errors, tmp_path)


def test_changes_after_a_forward_pass(tmp_path: Path) -> None:
    in_two_ranks(changes, tmp_path)


def test_after_a_forward_pass(tmp_path: Path) -> None:
    in_two_ranks(weights, tmp_path)
