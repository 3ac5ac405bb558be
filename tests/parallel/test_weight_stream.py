"""`iter_hf_weights`: the tensors of a checkpoint, bucket by bucket, from one process and from every plan."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert.ranks import Gather
from ligermodels.errors import InputError

MIXTURE = {**CONFIGS["qwen3_moe"], "num_experts": 6, "moe_intermediate_size": 16, "intermediate_size": 96}
PLANS: dict[str, tuple[str, dict[str, int]]] = {
    "shard": ("mixture", {}),
    "expert": ("mixture", {"expert": 2}),
    "tensor": ("mixture", {"tensor": 2}),
    "tied": ("dense", {"tensor": 2}),
}


def check(buckets: list[list[tuple[str, Tensor]]], wanted: dict[str, Tensor], limit: int) -> None:
    found = {name: tensor for bucket in buckets for name, tensor in bucket}
    assert sum(map(len, buckets)) == len(found) and found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
        assert type(tensor) is Tensor and tensor.is_contiguous() and not tensor.requires_grad
    sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in buckets]
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes)
    assert all(sum(one) + two[0] > limit for one, two in pairwise(sizes))


def on_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for family, degrees in PLANS.values():
        model = lm.from_pretrained(folder / family, plan=lm.ParallelPlan(**degrees))
        wanted = load_file(folder / family / "model.safetensors")
        with torch.no_grad():
            model(torch.arange(3, 11)[None])
        check(list(model.iter_hf_weights(bucket_bytes=3000)), wanted, 3000)
        half = {name: tensor.to(torch.bfloat16) for name, tensor in wanted.items()}
        gathered: list[Any] = []
        call = Gather.__call__

        def counted(self: Gather, tensor: Tensor, call: Any = call, gathered: list[Any] = gathered) -> Tensor:
            gathered.append(tensor)
            return call(self, tensor)

        Gather.__call__ = counted  # type: ignore[method-assign]
        buckets = model.iter_hf_weights(dtype=torch.bfloat16, bucket_bytes="3KB")
        assert not gathered
        first = next(buckets)
        assert len(gathered) == len(first)  # nothing beyond the bucket
        Gather.__call__ = call  # type: ignore[method-assign]
        check([first, *buckets], half, 3000)


def test_plans(tmp_path: Path) -> None:
    for name, config in (("mixture", MIXTURE), ("dense", {**CONFIGS["llama-3.2"], "intermediate_size": 96})):
        make_checkpoint(tmp_path / "made" / name, config)
        lm.from_pretrained(tmp_path / "made" / name).save_pretrained(tmp_path / name)
    in_two_ranks(on_ranks, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5_text", "gpt_oss", "gemma4_text-experts"])
def test_one_process(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = lm.from_config(CONFIGS[name], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    check(list(model.iter_hf_weights(bucket_bytes=5000)), wanted, 5000)
    assert len(list(model.iter_hf_weights())) == 1


def test_bad_arguments() -> None:
    model = lm.from_config(CONFIGS["llama-3"], dtype=torch.float32)
    for options, message in (
        ({"bucket_bytes": 0}, r"^bucket_bytes: 0 is not a size"),
        ({"dtype": torch.int8}, r"^dtype: must be one of torch.bfloat16, .*got torch.int8"),
        ({"dtype": "bfloat16"}, r"^dtype: .*got 'bfloat16'"),
    ):
        with pytest.raises(InputError, match=message):
            model.iter_hf_weights(**options)
    with pytest.raises(InputError, match="merge_lora"):
        lm.add_lora(model, 2).iter_hf_weights()
