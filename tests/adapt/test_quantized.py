"""FP8 checkpoints: loaded as the model that they stand for, and written as that."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_keep import HUB, make_gemma3, stored
from test_loading import mapped, upload_on_the_host
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.convert import dequantize, loading
from ligermodels.convert.dequantize import Dequantized
from ligermodels.convert.encoded import ScaledFP8
from ligermodels.convert.files import SINGLE
from ligermodels.convert.quantization import Quantization
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.errors import CheckpointError

LARGEST = 448.0
"""Of float8_e4m3fn."""
BLOCK = (16, 24)
"""That divides no size of the tests' models."""
PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight", "_proj", ".w1.weight", ".w2.weight", ".w3.weight")


def expand(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each element of a matrix, or of each matrix of a stack."""
    rows, columns = (torch.arange(size) // wide for size, wide in zip(shape[-2:], block, strict=True))
    return scales[..., rows[:, None], columns]


def quantise(tensor: Tensor, block: tuple[int, int], *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """A tensor (..., r, c) in FP8, and its scales (..., ceil(r / block[0]), ceil(c / block[1])): absmax / 448."""
    high, wide = block
    rows, columns = tensor.shape[-2:]
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % wide, 0, -rows % high))
    scales = padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high)).abs().amax((-1, -3)) / LARGEST
    if power_of_two:
        scales = scales.log2().ceil().exp2()
    return (tensor.float() / expand(scales, block, tensor.shape)).to(torch.float8_e4m3fn), scales


FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def groups(strategy: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **fields}
    return {**COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


FORMS: dict[str, tuple[dict[str, Any], tuple[int, int] | None, str, str]] = {
    "block": ({**FP8, "weight_block_size": list(BLOCK)}, BLOCK, "float32", "_scale_inv"),
    "block-128": ({**FP8, "modules_to_not_convert": ["lm_head"]}, (128, 128), "bfloat16", "_scale_inv"),
    "ue8m0": ({**FP8, "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}, BLOCK, "uint8", "_scale_inv"),
    "e8m0": ({**FP8, "weight_block_size": [1, 32]}, (1, 32), "float8_e8m0fnu", "_scale_inv"),
    "tensor": ({**FP8, "weight_block_size": None, "activation_scheme": "static"}, None, "bfloat16", "_scale_inv"),
    "channel": (groups("channel"), (1, 10**6), "bfloat16", "_scale"),
    "compressed-tensor": (groups("tensor"), None, "float32", "_scale"),
    "compressed-block": (groups("block", block_structure=list(BLOCK)), BLOCK, "float32", "_scale"),
    "compressed-group": (groups("group", group_size=20), (1, 20), "float16", "_scale"),
}
"""quantization_config, block (None: one scale for the tensor), dtype of the scales, and what they are called."""


def make_quantised(folder: Path, config: dict[str, Any], form: str, *, nested: bool = False) -> dict[str, Tensor]:
    """Turn the checkpoint in `folder` into an FP8 one in shards; returns its tensors, dequantised in plain torch to
    float32. `nested`: the quantization_config is written into text_config."""
    quantization, block, kind, suffix = FORMS[form]
    stored, plain = {}, {}
    for name, tensor in load_file(folder / SINGLE).items():
        if not name.endswith(PROJECTIONS) or "vision" in name:
            stored[name] = plain[name] = tensor
            continue
        rows, columns = tensor.shape[-2:]
        own = (rows, columns) if block is None else (min(block[0], rows), min(block[1], columns))
        codes, scales = quantise(tensor, own, power_of_two="e8m0" in form)
        factors = scales
        if "e8m0" in form:
            scales = (scales.log2() + 127).to(torch.uint8).view(getattr(torch, kind))
        else:
            scales = scales.to(getattr(torch, kind))
            factors = scales.float()
        plain[name] = codes.float() * expand(factors, own, tensor.shape)
        if block is None and tensor.ndim == 2:
            scales = scales.view(())
            if suffix == "_scale_inv":
                stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
        stored |= {name: codes, name + suffix: scales}
    assert stored.keys() != plain.keys()
    save_checkpoint(
        folder, [(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in stored.items()], overwrite=True,
        files={"config.json": json.dumps(config)}, max_shard_size="40KB",
    )  # fmt: skip
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    where = {**config["text_config"]} if nested else {**config}
    where["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps({**config, "text_config": where} if nested else where))
    return plain


def logits(model: Any, vocabulary: int = 131) -> Tensor:
    ids = torch.randint(3, vocabulary, (2, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def plain_twin(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Path:
    """A checkpoint that is not quantised, of these tensors rounded once, but for those that are never rounded."""
    folder.mkdir()
    rounded = {name: t if name.endswith("correction_bias") else t.to(dtype) for name, t in tensors.items()}
    save_file(rounded, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FAMILIES = ("llama-3.2", "phi3", "qwen3_moe", "mixtral", "gemma2", "deepseek_v3")


@pytest.mark.parametrize(
    ("form", "family"),
    [*((form, "llama-3") for form in FORMS), *(("block", name) for name in FAMILIES), ("block-128", "deepseek_v3")],
)
def test_logits_are_those_of_the_dequantised_weights(
    form: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; in float32 and, of one family, in the config's dtype; read in slices that end anywhere."""
    monkeypatch.setattr(loading, "SLICE_ELEMENTS", 250 if family == "llama-3" else 1750)
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 130 if family == "llama-3" else 610)
    config = {**CONFIGS[family], "dtype": "bfloat16"}
    make_checkpoint(tmp_path / "model", config)
    tensors = make_quantised(tmp_path / "model", config, form)
    for dtype in (None, torch.float32) if family == "llama-3" else (torch.float32,):
        model = lm.from_pretrained(tmp_path / "model", dtype=dtype)
        kind = dtype or torch.bfloat16
        twin = lm.from_pretrained(plain_twin(tmp_path / f"plain-{dtype}", config, tensors, kind), dtype=dtype)
        assert model.dtype == kind
        assert all(torch.equal(model.state_dict()[name], each) for name, each in twin.state_dict().items())
        assert torch.equal(logits(model), logits(twin))

    # Out again: not quantised, byte for byte what the twin writes, and open to transformers.
    model.save_pretrained(tmp_path / "out")
    twin.save_pretrained(tmp_path / "wanted")
    for name in ("config.json", SINGLE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float32)
    if "num_experts_per_tok" in config:
        oracle.set_experts_implementation("eager")
    assert getattr(oracle.config, "quantization_config", None) is None
    assert relative_error(logits(model), logits(oracle)) < 1e-5


@pytest.mark.parametrize("form", ["block", "tensor", "ue8m0"])
def test_fused_experts(form: str, tmp_path: Path) -> None:
    """Scales [E, ...] of experts that are one tensor, one scale for gate and one for up among them."""
    config = CONFIGS["qwen3_moe"]
    oracle = make_checkpoint(tmp_path / "model", config)
    save_file({n: t.contiguous() for n, t in oracle.state_dict().items()}, tmp_path / "model" / SINGLE)
    tensors = make_quantised(tmp_path / "model", config, form)
    if form == "tensor":
        halves = {name: tensor for name, tensor in stored(tmp_path / "model").items() if "gate_up_proj" in name}
        assert {tuple(halves[n].shape) for n in halves if n.endswith("_inv")} == {(6, 1, 1)}
        shard = next(path for path in (tmp_path / "model").glob("model-*") if "scale_inv" in str(load_file(path)))
        held = load_file(shard)
        for name in [name for name in held if name.endswith("gate_up_proj_scale_inv")]:
            held[name] = torch.rand(6, 2, 1)
            weight = name.removesuffix("_scale_inv")
            codes = halves[weight].float()
            tensors[weight] = codes * held[name].repeat_interleave(codes.shape[1] // 2, dim=1)
        save_file(held, shard)
    model = lm.from_pretrained(tmp_path / "model")
    twin = lm.from_pretrained(plain_twin(tmp_path / "plain", config, tensors, torch.float32))
    assert torch.equal(logits(model), logits(twin))


@pytest.mark.parametrize(("shape", "block"), [((48, 64), (24, 16)), ((3, 32, 40), (16, 8)), ((7, 20), (7, 20))])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_to_the_bit_as_transformers_dequantises(
    shape: tuple[int, ...], block: tuple[int, int], kind: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    codes, scales = quantise(torch.randn(shape), block)
    codes = codes.float().to(kind)
    save_file({"x.weight": codes, "x.weight_scale_inv": scales}, tmp_path / SINGLE)
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, Quantization("fp8", block), dtype)
        assert list(reader.headers) == ["x.weight"] and reader.headers["x.weight"].shape == shape
        assert torch.equal(reader.read("x.weight"), wanted)
        assert torch.equal(Dequantized(files, Quantization("fp8"), dtype).read("x.weight"), wanted)


def test_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As to a GPU: into memory in the order of the file and in another one, from any element on."""
    upload_on_the_host(monkeypatch)
    codes, scales = quantise(torch.randn(13, 18), (4, 5))
    save_file({"x": codes, "x_scale_inv": scales, "y": torch.randn(13, 18)}, tmp_path / SINGLE)
    views = {"x": (torch.empty(12, 18), torch.empty(13, 2, 9).bfloat16()[:, 1]), "y": (torch.empty(7),)}
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, Quantization("fp8", (4, 5)), torch.bfloat16)
        pieces = [
            loading.Piece(view, name, 11, reader.headers[name].dtype, False) for name in views for view in views[name]
        ]
        assert sum(loading.upload(reader, pieces, torch.device("cpu"))) == sum(piece.bytes for piece in pieces)
        for piece in pieces:
            wanted = reader.read(piece.name).reshape(-1)[11 : 11 + piece.view.numel()].view(piece.view.shape)
            assert torch.equal(piece.view, wanted.to(piece.view.dtype))


def test_reading_in_part(tmp_path: Path) -> None:
    """Slices and bytes from any element on, as uploads to a GPU read them; and of tensors that are not quantised."""
    codes, scales = quantise(torch.randn(2, 13, 9), (4, 5))
    tensors = {"x": codes, "x_scale_inv": scales.bfloat16(), "y": torch.randn(11), "z": torch.randn(3)}
    save_file(tensors, tmp_path / SINGLE)
    wanted = (codes.float() * expand(scales.bfloat16().float(), (4, 5), codes.shape)).bfloat16().reshape(-1)
    with Checkpoint(tmp_path) as files:
        reader = Dequantized(files, Quantization("fp8", (4, 5)), torch.bfloat16)
        assert isinstance(reader, loading.FileReader) and isinstance(reader, loading.SliceReader)
        for start, count in ((0, 234), (1, 1), (8, 2), (100, 60), (116, 2), (117, 117), (233, 1), (5, 0)):
            assert torch.equal(reader.read_slice("x", start, count), wanted[start : start + count])
            buffer = bytearray(2 * count)
            reader.read_into("x", 2 * start, memoryview(buffer))
            assert buffer == wanted[start : start + count].view(torch.uint8).numpy().tobytes()
        assert torch.equal(reader.read_slice("y", 2, 5), tensors["y"][2:7])
        buffer = bytearray(8)
        reader.read_into("y", 8, memoryview(buffer))
        assert buffer == tensors["y"][2:4].numpy().tobytes()
        assert reader.read_together(["x"]) is None and reader.read_together(["y"]) is not None
        with pytest.raises(CheckpointError, match="holds no tensor 'gone'"):
            reader.read("gone")


def test_what_is_not_quantised_stays_mapped(tmp_path: Path) -> None:
    config = CONFIGS["llama-3"]
    make_checkpoint(tmp_path, config)
    make_quantised(tmp_path, config, "block")
    model = lm.from_pretrained(tmp_path)
    found = {name for shard in tmp_path.glob("model-*.safetensors") for name in mapped(model, shard)}
    assert found == {name for name, _ in model.named_parameters() if "mixer." not in name and "mlp." not in name}


def test_only_a_few_rows_are_float32_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of no tensor the whole is in memory a second time."""
    monkeypatch.setattr(loading, "SLICE_ELEMENTS", 200)
    monkeypatch.setattr(dequantize, "CHUNK_ELEMENTS", 130)
    make_checkpoint(tmp_path, CONFIGS["llama-3"])
    make_quantised(tmp_path, CONFIGS["llama-3"], "block")
    decode, read_slice = ScaledFP8.decode, Dequantized.read_slice
    decoded: list[int] = []
    read: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        found = decode(*arguments)
        decoded.append(found.numel())
        return found

    monkeypatch.setattr(ScaledFP8, "decode", counted)
    monkeypatch.setattr(Dequantized, "read_slice", lambda *all: read.append(all[-1]) or read_slice(*all))
    monkeypatch.setattr(Dequantized, "read", lambda self, name: pytest.fail(f"read the whole of {name}"))
    seen: list[tuple[int, int]] = []
    model = lm.from_pretrained(tmp_path, progress=lambda *done: seen.append(done))
    assert seen[-1] == (total := sum(parameter.nbytes for parameter in model.parameters()), total)
    assert 0 < max(decoded) <= 130 and 0 < max(read) <= 200
    sizes = [tensor.numel() for tensor in stored(tmp_path).values() if tensor.dtype == torch.float8_e4m3fn]
    assert sum(sizes) <= sum(decoded) < 2 * sum(sizes) and min(sizes) > 200


@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_several_models(nested: bool, tmp_path: Path) -> None:
    """Its quantization_config at the top or in text_config; the other tensors are kept, those in FP8 dequantised."""
    folder = tmp_path / "model"
    make_gemma3(folder)
    tensors = make_quantised(folder, config := json.loads((folder / "config.json").read_text()), "block", nested=nested)
    extra = "multi_modal_projector.mm_input_projection_weight"
    codes, scales = quantise(tensors[extra], BLOCK)
    shard = next(path for path in folder.glob("model-*.safetensors") if extra in load_file(path))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][extra + "_scale_inv"] = shard.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({**load_file(shard), extra: codes, extra + "_scale_inv": scales}, shard)
    tensors[extra] = codes.float() * expand(scales, BLOCK, codes.shape)

    model = lm.from_pretrained(folder, dtype=torch.bfloat16)
    assert "quantization_config" not in model.hf_config
    model.save_pretrained(tmp_path / "out", keep="all")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in {**written, **written["text_config"]}
    assert written["vision_config"] == config["vision_config"]
    found = stored(tmp_path / "out")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        kind = torch.bfloat16 if name.startswith(HUB[0]) or name == extra else torch.float32
        assert found[name].dtype == kind and torch.equal(found[name], tensor.to(kind)), name
    _, info = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    # Written over where it came from, it is still whole.
    model.save_pretrained(folder, keep="all", overwrite=True)
    model.save_pretrained(folder, keep="all", overwrite=True)
    assert stored(folder).keys() == tensors.keys()


def test_commands(tmp_path: Path) -> None:
    config = CONFIGS["llama-3"]
    make_checkpoint(tmp_path / "model", config)
    make_quantised(tmp_path / "model", config, "tensor")
    for command in (["export", tmp_path / "model", tmp_path / "out"], ["verify", tmp_path / "model"]):
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exit_code == 0, result.output
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
