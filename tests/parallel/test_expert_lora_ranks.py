"""LoRA of experts on two ranks: sharded by FSDP2, or with experts spread over ranks, beside one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_lora import draw
from test_parallel import batch, check_training
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.adapt.lora import lora_layers
from ligermodels.errors import ConfigError
from ligermodels.parallel.tensor import modules_with_rules

CONFIG = {**CONFIGS["qwen3_moe-normalised"], "num_experts": 6}
PLANS = {"shard": lm.ParallelPlan(), "expert": lm.ParallelPlan(expert=2, activation_checkpointing="full")}


def build(quantize: Any = None, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(CONFIG, dtype=torch.float32)
    if quantize is not None:
        lm.quantize(model, quantize)
    options = {"target_modules": ["experts", "q_proj"], **options}
    return draw(lm.add_lora(model, 3, **options))


def work(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for name, plan in PLANS.items():
        plain, model = build(), lm.parallelize(build(), plan)
        update = lora_layers(model)["decoder.blocks.1.mlp"]
        assert all(isinstance(p, DTensor) and len(p.to_local()) == 3 for p in update.parameters())
        lm.save_adapter(model, folder / name)
        if rank == 0:
            lm.save_adapter(plain, folder / "plain", overwrite=True)
            found, wanted = (load_file(folder / each / "adapter_model.safetensors") for each in (name, "plain"))
            assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        check_training(model, plain, torch.optim.SGD)
        halves = build(target_modules=["up_proj", "down_proj"])
        lm.save_adapter(lm.parallelize(halves, plan), folder / f"{name}-converted")
    plain, model = build("int4"), lm.parallelize(build("int4"), PLANS["shard"])
    check_training(model, plain, torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"expert: decoder.blocks.0.mlp: experts with quantised .* be spread"):
        lm.parallelize(build("int4"), PLANS["expert"])
    with pytest.raises(ConfigError, match=r"expert: .*LoRA that experts share cannot be spread"):
        lm.parallelize(build(experts_shared_outer_loras=True), PLANS["expert"])
    with pytest.raises(ConfigError, match=r"mlp.update \(ExpertLoRA\): has no rule for tensor parallelism"):
        list(modules_with_rules(build(), "", 2))
    assert torch.isfinite(model(**batch(0)).loss)


def test_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(work, tmp_path)
