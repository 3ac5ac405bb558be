"""`ParallelPlan.fsdp_unit` "model": FSDP2 gathers and reduces the whole model at once. Every kind of layer:
test_every_kind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_parallel import batch, build, check_training, families, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.parallel.fsdp import check_one_unit
from ligermodels.training import FusedAdamW

PLANS = [
    lm.ParallelPlan(fsdp_unit="model"),
    lm.ParallelPlan(fsdp_unit="model", replicate=2),
    lm.ParallelPlan(fsdp_unit="model", reshard_after_forward=False),
]


def collectives(model: nn.Module, rank: int) -> dict[str, int]:
    """How often a step gathers parameters and reduces gradients."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(**batch(rank)).loss.backward()
    events = [event.name for event in profile.events()]
    names = "all_gather", "post_backward_reduce"
    return {name: sum(event.split(" ")[0] == f"FSDP::{name}" for event in events) for name in names}


def training(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    families(rank, folder, mesh, ("gemma2", "llama-3", "qwen3_moe"), *PLANS)  # the first is tied
    plain, model = build("llama-3"), lm.parallelize(build("llama-3"), PLANS[0])
    assert [module for module in model.modules() if isinstance(module, FSDPModule)] == [model]
    found = collectives(model, rank)
    print(found, flush=True)
    assert found == {"all_gather": 1, "post_backward_reduce": 1}, found
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with torch.no_grad():
        logits = model.eval()(batch(0)["input_ids"]).logits
    torch.testing.assert_close(logits, plain.eval()(batch(0)["input_ids"]).logits)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    ids = batch(0)["input_ids"]
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    blocks = lm.parallelize(build("llama-3"))
    found = collectives(blocks, rank)
    assert found["post_backward_reduce"] == 3 + len(blocks.decoder.blocks), found

    model = lm.parallelize(build("llama-3"), lm.ParallelPlan(fsdp_unit="model", context=2))
    check_training(model, build("llama-3"), torch.optim.SGD, tensor=2)

    # Experts that ranks divide are gathered by none, and the others of all blocks once.
    for mode in ("none", "full"):
        plan = lm.ParallelPlan(fsdp_unit="model", expert=2, activation_checkpointing=mode)
        model = lm.parallelize(build("qwen3_moe"), plan)
        check_training(model, build("qwen3_moe"), torch.optim.SGD)
        assert collectives(model, rank) == {"all_gather": 1, "post_backward_reduce": 1}

    # Mixed precision, of gathered parameters and sums; and bfloat16.
    for name, options in (("llama-3", {"param_dtype": "bfloat16", "reduce_dtype": "float32"}), ("gemma2", {})):
        dtype = torch.float32 if options else torch.bfloat16
        losses = []
        for unit in ("block", "model"):
            model = lm.parallelize(build(name, dtype), lm.ParallelPlan(fsdp_unit=unit, **options))
            optimizer: Any = FusedAdamW(model.parameters(), lr=1e-2)
            optimizer.step_in_backward()
            for step in range(3):
                losses.append(model(**batch(2 * step + rank)).loss)
                losses[-1].backward()
        first, second = torch.stack(losses).chunk(2)
        torch.testing.assert_close(first, second, rtol=2e-2, atol=2e-2)

    # Heads beside a frozen base: both are whole models, and users call the base alone too.
    several: list[lm.MedusaModel] = []
    for spread in (False, True):
        medusa = lm.MedusaModel.from_base(build("llama-3"), num_heads=2)
        several.append(lm.parallelize(medusa, PLANS[0]) if spread else medusa)
    check_training(several[1], several[0], torch.optim.SGD)
    base: Any = several[1].base
    with torch.no_grad():
        found: Tensor = base(batch(0)["input_ids"]).logits
    torch.testing.assert_close(found, several[0].base(batch(0)["input_ids"]).logits)
    names = {name for name, p in several[1].named_parameters() if not torch.isfinite(whole(p)).all()}
    assert not names

    for name, options, message in (
        ("qwen3_moe", {"expert": 2, "param_dtype": "bfloat16"}, "give expert 2 .*and no param_dtype"),
        ("qwen3_moe", {"expert": 2, "replicate": 1, "shard": 2, "param_dtype": "bfloat16"}, "give expert 2"),
    ):
        with pytest.raises(ConfigError, match=f"fsdp_unit: .*{message}"):
            lm.parallelize(refused := build(name), lm.ParallelPlan(fsdp_unit="model", **options))
        assert not any(isinstance(module, FSDPModule) for module in refused.modules())


def test_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(training, tmp_path)


def test_models_and_degrees_of_several_groups() -> None:
    """FSDP2 reduces gradients of one dtype in a group, and gathers experts by themselves where replicas have them."""
    degrees = {"replicate": 1, "shard": 2, "context": 1, "expert": 1}
    adapted = lm.add_lora(build("qwen3", torch.bfloat16), 3, modules_to_save=["embed_tokens"], dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"fsdp_unit: .*decoder\.embed\.weight torch.bfloat16 and .* torch.float32; "):
        check_one_unit(adapted, degrees, None)
    check_one_unit(lm.add_lora(build("qwen3", torch.bfloat16), 3, dtype=torch.float32), degrees, None)  # a frozen base
    mixture = build("qwen3_moe")
    check_one_unit(mixture, degrees | {"expert": 2}, None)
    with pytest.raises(ConfigError, match=r"fsdp_unit: .*give expert 4 \(shard x context\), replicate 1"):
        check_one_unit(mixture, degrees | {"expert": 2, "replicate": 2}, None)
