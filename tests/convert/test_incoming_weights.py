"""Loading from tensors that arrive one at a time: the same weights as a checkpoint's, in any order and layout."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks, own_parts
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.convert.mappings import rename, transposed
from ligermodels.convert.weight_map import WeightMap
from ligermodels.convert.weight_stream import WeightStream
from ligermodels.errors import CheckpointError
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.families import family_of

LLAMA = CONFIGS["llama-3"]


def random_model(config: dict[str, Any], seed: int, dtype: str = "float32") -> lm.CausalLM:
    torch.manual_seed(seed)
    model = lm.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in persistent_tensors(model).values():
            tensor.normal_()
    return model


def sent(model: lm.CausalLM) -> list[tuple[str, Tensor]]:
    return [weight for bucket in model.iter_hf_weights(bucket_bytes=1000) for weight in bucket]


def stream_into(model: lm.CausalLM, weights: Iterable[tuple[str, Tensor]]) -> WeightStream:
    stream = WeightStream(family_of(model.hf_config).weight_maps(model.config), persistent_tensors(model))
    for name, tensor in weights:
        stream.load(name, tensor)
    return stream


def assert_same(ours: lm.CausalLM, theirs: lm.CausalLM) -> None:
    for name, tensor in persistent_tensors(theirs).items():
        assert torch.equal(persistent_tensors(ours)[name], tensor), name


@pytest.mark.parametrize("name", ["llama-3", "llama-3.2", "phi3", "glm4", "qwen3_moe", "gpt_oss", "deepseek_v3",
                                  "gemma4_text-per-layer-inputs"])  # fmt: skip
@pytest.mark.parametrize("backwards", [False, True])
def test_whole_checkpoints(name: str, backwards: bool) -> None:
    source, target = random_model(CONFIGS[name], 0), random_model(CONFIGS[name], 1)
    addresses = {name: tensor.data_ptr() for name, tensor in persistent_tensors(target).items()}
    weights = sent(source)
    stream = stream_into(target, weights[::-1] if backwards else weights)
    assert stream.missing() == []
    assert stream.loaded() == set(persistent_tensors(target))
    assert_same(target, source)
    assert addresses == {name: tensor.data_ptr() for name, tensor in persistent_tensors(target).items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_layouts_of_transformers_in_memory(name: str) -> None:
    source, target = random_model(CONFIGS[name], 0), random_model(CONFIGS[name], 1)
    assert stream_into(target, source.hf_state_dict().items()).missing() == []
    assert_same(target, source)


def test_parts_of_fused_tensors() -> None:
    """A native tensor counts as loaded once all its parts are; missing names are the checkpoint's."""
    source, target = random_model(LLAMA, 0), random_model(LLAMA, 1)
    weights = dict(sent(source))
    key = weights.pop("model.layers.1.self_attn.k_proj.weight")
    stream = stream_into(target, weights.items())
    assert stream.missing() == ["model.layers.1.self_attn.k_proj.weight"]
    assert set(persistent_tensors(target)) - stream.loaded() == {"decoder.blocks.1.mixer.qkv.weight"}
    stream.load("model.layers.1.self_attn.k_proj.weight", key)
    assert stream.missing() == []
    assert_same(target, source)


def test_casts() -> None:
    source, target = random_model(LLAMA, 0), random_model(LLAMA, 1, "bfloat16")
    stream_into(target, sent(source))
    assert_same(target, source.to(torch.bfloat16))


def test_tied_heads() -> None:
    """The head of a tied model may be sent too, first or last, if it has the same values."""
    config = CONFIGS["llama-3.2"]
    source, target = random_model(config, 0), random_model(config, 1)
    weights = sent(source)
    head = weights[0][1].clone()
    assert weights[0][0] == "model.embed_tokens.weight"
    for order in ([*weights, ("lm_head.weight", head)], [("lm_head.weight", head), *weights]):
        assert stream_into(target, order).missing() == []
        assert_same(target, source)
    assert stream_into(target, [("lm_head.weight", head), *weights[1:]]).missing() == []
    head[3, 5] += 1
    with pytest.raises(CheckpointError, match=r"^lm_head.weight: differs from model.embed_tokens.weight, .*tie_word_"):
        stream_into(target, [*weights, ("lm_head.weight", head)])
    # Sent again under its name, a tied tensor is replaced as others are, and the next one is compared with it.
    before = weights[0][1] + 1
    stream = stream_into(target, [("model.embed_tokens.weight", before), ("lm_head.weight", before), *weights])
    assert_same(target, source)
    with pytest.raises(CheckpointError, match=r"^lm_head.weight: differs from model.embed_tokens.weight"):
        stream.load("lm_head.weight", before)


def test_tensors_that_are_left_out() -> None:
    target = random_model(CONFIGS["exaone_moe"], 1)
    stream = stream_into(target, [("mtp.layers.0.weight", torch.ones(3, 7, dtype=torch.int32))])
    assert stream.loaded() == set()


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("model.layers.9.mlp.up_proj.weight", torch.ones(97, 60), "model.layers.9.mlp.up_proj.weight is not expected"),
    ("model.layers.0.mlp.up_proj.weight", torch.ones(60, 97),
     r"up_proj.weight is of shape \[60, 97\] instead of \[97, 60\]"),
    ("model.norm.weight", torch.ones(60).to(torch.float8_e4m3fn), r"model.norm.weight: torch.float8_e4m3fn is of a"),
])  # fmt: skip
def test_what_does_not_fit_is_named(name: str, tensor: Tensor, message: str) -> None:
    target = random_model(LLAMA, 1)
    before = {name: tensor.clone() for name, tensor in persistent_tensors(target).items()}
    with pytest.raises(CheckpointError, match=message):
        stream_into(target, [(name, tensor)])
    assert all(torch.equal(before[name], tensor) for name, tensor in persistent_tensors(target).items())


def test_layouts_do_not_mix() -> None:
    """A square tensor fits both orders; a later one decides. Too late if the first was taken in the other order."""
    layouts = [WeightMap([kind("a", "x"), kind("b", "y")]) for kind in (rename, transposed)]
    state = {"a": torch.zeros(3, 3), "b": torch.zeros(2, 3)}
    x, y = torch.arange(9.0).view(3, 3), torch.arange(6.0).view(3, 2)
    stream = WeightStream(layouts, state)
    stream.load("y", y)
    stream.load("x", x)
    assert torch.equal(state["a"], x.T) and torch.equal(state["b"], y.T)
    stream = WeightStream(layouts, state)
    stream.load("x", x)
    with pytest.raises(CheckpointError, match="y: is of another layout than x"):
        stream.load("y", y)
    apart = [layouts[0], replace(layouts[1], mappings=[rename("a", "x"), transposed("b", "y")])]
    stream = WeightStream(apart, state)
    stream.load("x", x)
    stream.load("y", y)
    assert torch.equal(state["a"], x) and torch.equal(state["b"], y.T)


SHARDED: dict[str, tuple[str, ...]] = {
    "llama-3.2": ("tensor",),
    "phi3": ("tensor", "rows"),
    "glm4": ("tensor",),
    "mixtral": ("tensor", "expert"),
    "gpt_oss": ("tensor", "rows"),
    "deepseek_v3": ("tensor",),
    "qwen3_next": ("tensor", "rows"),
    "lfm2": ("tensor",),
    "gemma4_text-per-layer-inputs": ("tensor",),
}
"""Tied; q, k and v, and gate and up, in one tensor; rotated neighbours; experts one by one, in one tensor and
transposed; rotated channels last; fused projections of recurrent mixers; convolutions; embeddings of each layer."""
PLANS = {"tensor": lm.ParallelPlan(tensor=2), "rows": lm.ParallelPlan(), "expert": lm.ParallelPlan(expert=2)}


def into_shards(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for name, plans in SHARDED.items():
        config = {**CONFIGS[name]}
        for field in (field for field in config if field.endswith(("intermediate_size", "experts"))):
            config[field] += config[field] % 2
        if name.startswith("gemma4"):
            config["num_key_value_heads"] = 2
        source = random_model(config, 0)
        wanted = persistent_tensors(source)
        for plan in plans:
            target = lm.parallelize(random_model(config, 1), PLANS[plan])
            tensors = persistent_tensors(target)
            for weights in (sent(source)[::-1], source.hf_state_dict().items()):
                with torch.no_grad():
                    for tensor in tensors.values():
                        tensor.zero_()
                stream = stream_into(target, weights)
                assert stream.missing() == [] and stream.loaded() == set(tensors)
                for key, tensor in tensors.items():
                    assert torch.equal(*own_parts(tensor, wanted[key])), (name, plan, key)


def test_each_rank_takes_its_part(tmp_path: Path) -> None:
    """Of tensors divided by heads, channels, rows or experts, which parts of a checkpoint tensor cross."""
    in_two_ranks(into_shards, tmp_path)
