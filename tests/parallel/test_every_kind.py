"""FSDP2, context and tensor parallelism of every kind of layer with every option, on two ranks beside one process; and
decoding with tensor parallelism, in which ranks exchange other tensors than in training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import by_first_rank, in_two_ranks, own_parts, tokens_of_first_rank
from zoo import CONFIGS, OF_EACH_KIND

import ligermodels as lm
from ligermodels.layers import offload

PLANS = [lm.ParallelPlan(context=2), lm.ParallelPlan(tensor=2)]
"""With `context`, FSDP2 shards the parameters over both ranks too; a third of the models also have a plan of FSDP2
alone."""
AT_ONCE = lm.ParallelPlan(fsdp_unit="model")
"""The whole model at once."""
MODES: tuple[Any, ...] = ("none", "selective", "full", "offload")
"""Of activation checkpointing: each kind of layer has two of them, by turns."""
DECODING: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": [], "pad_token_id": 0}


def divisible(config: dict[str, Any]) -> dict[str, Any]:
    """The config with sizes that two ranks divide."""
    found = {key: size + size % 2 if "intermediate_size" in key and size else size for key, size in config.items()}
    counts = ("mamba_n_groups", "n_groups", "num_key_value_heads", "num_global_key_value_heads")
    return found | {key: 2 for key in counts if (found.get(key) or 2) % 2}


def train(rank: int, folder: Path, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    offload.DEVICES = ("cuda", "cpu")  # in this process; the inputs of blocks are copied on the CPU too
    ids = torch.randint(3, 120, (2, 14), generator=torch.Generator().manual_seed(0))
    for name in names:
        plain, turn = build(name), OF_EACH_KIND.index(name)
        plans = [*([lm.ParallelPlan(shard=2)] if turn % 3 == 0 else []), *PLANS]
        plans.insert(0, AT_ONCE)
        models = [copy.deepcopy(plain) for _ in plans]
        wanted_loss = by_first_rank(plain, lambda plain: plain(ids, labels=ids).loss)
        for number, (plan, model) in enumerate(zip(plans, models, strict=True)):
            lm.parallelize(model, plan.model_copy(update={"activation_checkpointing": MODES[(turn + number) % 4]}))
            loss = model(ids, labels=ids).loss
            loss.backward()
            torch.testing.assert_close(loss.detach(), wanted_loss, msg=lambda m, at=(name, plan): f"{at}: {m}")
            for (key, p), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (wanted.grad is None), (name, plan, key)
                if wanted.grad is not None:  # also gradients of decays, which are tiny
                    found, own = own_parts(p.grad, wanted.grad)
                    assert ((found - own).abs() <= 1e-6 * wanted.grad.abs().max()).all(), (name, plan, key)
        tokens = model.generate(ids, **DECODING)
        assert tokens.equal(tokens_of_first_rank(lambda plain=plain: plain.generate(ids, **DECODING))), name


def build(name: str) -> lm.CausalLM:
    """In float64: norms of small latents magnify the rounding of float32."""
    torch.manual_seed(0)
    return lm.from_config(divisible(CONFIGS[name]), dtype=torch.float64)


@pytest.mark.parametrize("names", [OF_EACH_KIND[::2], OF_EACH_KIND[1::2]], ids=["first", "second"])
def test_losses_every_gradient_and_tokens(names: tuple[str, ...], tmp_path: Path) -> None:
    in_two_ranks(train, tmp_path, names)
