"""Tensors in the 4 bits of bitsandbytes, in plain scales and in quantised ones."""

import copy
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nf4_files import NF4, STATE, make_pair, named, quantised
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.adapt import quantized_loading
from ligermodels.cli import describe
from ligermodels.convert import dequantize
from ligermodels.convert.dequantize import Dequantized
from ligermodels.convert.files import SINGLE
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.errors import CheckpointError, CheckpointWarning
from ligermodels.layers.quantized import quantized_layers

BITS4 = Quantization("bitsandbytes 4 bits")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(7, 33), (24, 40)])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_reads_whole_tensors_and_slices(
    nested: bool, shape: tuple[int, int], storage: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end within a byte and within a block. `storage`: bnb_4bit_quant_storage, how the bytes are declared."""
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 50)
    parts, wanted = quantised(shape, nested=nested)
    parts[""] = parts[""].view(-1).view(storage)[:, None] if parts[""].numel() % 2 == 0 else parts[""]
    save_file({**named("x.weight", parts), "norm": torch.ones(3)}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, BITS4, torch.float32)
        assert {n: tuple(each.shape) for n, each in reader.headers.items()} == {"norm": (3,), "x.weight": shape}
        assert torch.equal(reader.read("x.weight"), wanted)
        for start, count in ((0, 1), (shape[1] * 3 + 2, 70), (wanted.numel() - 3, 3)):
            assert torch.equal(reader.read_slice("x.weight", start, count), wanted.reshape(-1)[start : start + count])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"absmax": None}, r"missing from the checkpoint: x\.weight\.absmax"),
        ({"nested_absmax": None}, r"missing from the checkpoint: x\.weight\.nested_absmax"),
        ({"": None}, r"missing from the checkpoint: x\.weight$"),
        ({"": torch.zeros(9, 1, dtype=torch.uint8)}, r"do not fit \[7, 33\]: x\.weight$"),
        ({"absmax": torch.ones(8)}, r"absmax float32"),
        ({"quant_map": torch.ones(15)}, r"do not fit \[7, 33\]: x\.weight\.quant_map"),
        ({STATE: torch.zeros(3, dtype=torch.uint8)}, "without readable sizes: x.weight.quant_state"),
        ({STATE: {"shape": [7, 0]}}, "without readable sizes"),
        ({STATE: {"shape": [7, 33, 1]}}, "without readable sizes"),
        ({STATE: {"shape": 231}}, "without readable sizes"),
        ({STATE: {"blocksize": True}}, "without readable sizes"),
        ({STATE: {"nested_offset": math.nan}}, "without readable sizes"),
    ],
)  # fmt: skip
def test_faults_name_the_tensors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts, _ = quantised((7, 33), nested=True)
    for end, value in change.items():
        if isinstance(value, dict):
            sizes = {**json.loads(bytes(parts[end].tolist())), **value}
            change = {end: torch.tensor(list(json.dumps(sizes).encode()), dtype=torch.uint8)}
    save_file(named("x.weight", {e: t for e, t in {**parts, **change}.items() if t is not None}), tmp_path / SINGLE)
    with Checkpoint(tmp_path) as files, pytest.raises(CheckpointError, match=message):
        Dequantized(files, BITS4, torch.float32)


def test_models_load_and_fine_tune(tmp_path: Path) -> None:
    """A checkpoint in nf4 is the model of its dequantised weights; with `quantize=`, LoRA trains over int4."""
    make_pair(tmp_path, CONFIGS["llama-3"], nested=True)
    plain, model = (lm.from_pretrained(tmp_path / folder, dtype=torch.float32) for folder in ("plain", "nf4"))
    wanted = plain.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())

    with pytest.warns(CheckpointWarning, match='rounded to int4: quantize="nf4"'):
        tuned = lm.from_pretrained(tmp_path / "nf4", dtype=torch.float32, quantize="int4")
    lm.add_lora(tuned, r=4)
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    tuned(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in tuned.named_parameters() if p.requires_grad}
    assert gradients and all(grad is not None for grad in gradients.values())
    assert any(grad.any() for grad in gradients.values() if grad is not None)


SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2}


def gradients(model: lm.CausalLM) -> list[Tensor]:
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def with_lora(model: lm.CausalLM) -> lm.CausalLM:
    torch.manual_seed(1)
    lm.add_lora(model, r=4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-3", "phi3", "glm4", "qwen3"])
def test_nf4_is_taken_over(
    family: str, dtype: torch.dtype, nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With quantize="nf4" the layers hold the stored codes and scales; fused layers and reordered rows too."""
    layers = make_pair(tmp_path, {**CONFIGS[family], **SIZES}, nested=nested, **NF4)
    monkeypatch.setattr(quantized_loading, "_fill", lambda *_: pytest.fail("rounded"))
    monkeypatch.setattr(quantized_loading, "CHUNK_BYTES", 2 * 128 * 200)
    steps = list[tuple[int, int]]()
    options: dict[str, Any] = {"dtype": dtype, "quantize": "nf4", "progress": lambda *done: steps.append(done)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        model = lm.from_pretrained(tmp_path / "nf4", **options)
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert len(quantized_layers(model)) == 4 * len(model.decoder.blocks)
    plain = lm.from_pretrained(tmp_path / "plain", dtype=dtype)
    found, wanted = lm.dequantize(copy.deepcopy(model)).state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()) and len(found) == len(wanted)

    down = model.decoder.blocks[1].mlp.down.compute
    parts = layers["model.layers.1.mlp.down_proj.weight"]
    stored = torch.stack([parts[""].view(-1) >> 4, parts[""].view(-1) & 15], 1).view(128, 192)
    codes = down.codes.view(128, 2, 1, 64)
    codes = torch.cat([codes & 15, codes >> 4], 2).view(128, 256)
    assert torch.equal(codes[:, :192], stored)
    if not nested:
        assert torch.equal(down.scales.view(128, 4)[:, :3], parts["absmax"].view(128, 3))

    if dtype == torch.float32:
        for one, two in zip(gradients(with_lora(model)), gradients(with_lora(plain)), strict=True):
            assert (one - two).norm() < 1e-4 * two.norm()


@pytest.mark.parametrize("how", ["quantize=", "prepare="])
def test_layers_that_are_stored_unquantised_stay_so(how: str, tmp_path: Path) -> None:
    """As in transformers. A fused layer stays in the model's dtype if a part of it is stored so."""
    make_pair(tmp_path, {**CONFIGS["llama-3"], **SIZES}, skip="layers.0.self_attn.k_proj", nested=True, **NF4)
    quantizing: dict[str, Any] = {"quantize": "nf4"}
    if how == "prepare=":  # as the command line does
        quantizing = {"prepare": lambda model: lm.quantize(model, "nf4")}
    model = lm.from_pretrained(tmp_path / "nf4", dtype=torch.float32, **quantizing)
    assert len(quantized_layers(model)) == 4 * len(model.decoder.blocks) - 1
    wanted = lm.from_pretrained(tmp_path / "plain", dtype=torch.float32).state_dict()
    assert torch.equal(model.decoder.blocks[0].mixer.qkv.weight, wanted["decoder.blocks.0.mixer.qkv.weight"])
    found = lm.dequantize(model).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("options", "sizes", "count"),
    [({"block": 32}, {}, 8), ({"table": None}, {}, 8), ({}, {"intermediate_size": 150}, 2)],
    ids=["blocks of 32", "other levels", "blocks cross rows"],
)
def test_4_bits_that_nf4_cannot_take_over(
    options: dict[str, Any], sizes: dict[str, Any], count: int, tmp_path: Path
) -> None:
    """They are rounded once more, and a warning says so."""
    make_pair(tmp_path, {**CONFIGS["llama-3"], **SIZES, **sizes}, nested=False, **{**NF4, **options})
    with pytest.warns(CheckpointWarning, match=rf"{count} weights, such as decoder.* rounded to nf4: nf4 keeps only"):
        model = lm.from_pretrained(tmp_path / "nf4", dtype=torch.float32, quantize="nf4")
    wanted = lm.quantize(lm.from_pretrained(tmp_path / "plain", dtype=torch.float32), "nf4").state_dict()
    found = model.state_dict()
    same = [torch.equal(found[name], tensor) for name, tensor in wanted.items() if name.endswith("codes")]
    assert len(same) == 8 and all(same)


def loaded_on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    ids = torch.arange(3, 12)[None]
    plain = lm.from_pretrained(folder / "nf4", dtype=torch.float32, quantize="nf4")
    for plan in (lm.ParallelPlan(shard=2), lm.ParallelPlan(shard=1, tensor=2)):
        options: dict[str, Any] = {"plan": plan, "device": "cpu", "quantize": "nf4"}
        model = lm.from_pretrained(folder / "nf4", dtype=torch.float32, **options)
        for name, layer in quantized_layers(model).items():
            wanted = plain.get_submodule(name).compute
            for part in ("codes", "scales"):
                sharded = getattr(layer.compute, part)
                assert 2 * sharded.to_local().numel() == sharded.numel()
                assert torch.equal(sharded.full_tensor(), getattr(wanted, part)), f"{name} {part}"
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_nf4_is_taken_over_by_shards(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 256, "head_dim": 64}
    make_pair(tmp_path, {**CONFIGS["llama-3"], **sizes}, nested=True, **NF4)
    in_two_ranks(loaded_on_two_ranks, tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_the_dtype_without_one_in_the_config_is_not_that_of_the_scales(nested: bool, tmp_path: Path) -> None:
    make_pair(tmp_path, CONFIGS["llama-3"], nested=nested, block=2)  # so that the scales are most of the numbers
    stored = load_file(tmp_path / "nf4" / SINGLE)
    scales = re.compile(r"absmax|quant_map")
    for name, tensor in stored.items():
        stored[name] = tensor.bfloat16() if tensor.is_floating_point() and not scales.search(name) else tensor
    save_file(stored, tmp_path / "nf4" / SINGLE)
    floats = [tensor for tensor in stored.values() if tensor.is_floating_point()]
    assert nested or sum(t.numel() for t in floats if t.dtype == torch.float32) > sum(t.numel() for t in floats) / 2
    config = json.loads((tmp_path / "nf4" / "config.json").read_text())
    unnamed = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    (tmp_path / "nf4" / "config.json").write_text(json.dumps(unnamed))
    model = lm.from_pretrained(tmp_path / "nf4")
    assert model.dtype == torch.bfloat16
    assert describe.checkpoint_facts(tmp_path / "nf4")["dtype"] == "bfloat16"
    expected = lm.from_pretrained(tmp_path / "nf4", dtype="bfloat16")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
