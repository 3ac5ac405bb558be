"""verify agrees with transformers where it should, and names the place of a planted fault."""

import json
import math
import shutil
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from zoo import CONFIGS as FAMILIES
from zoo import LLAMAS as CONFIGS
from zoo import make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.errors import CheckpointError, InputError
from ligermodels.verify import _warn_of_scores, relative_error, verify


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "model"
    make_checkpoint(folder, CONFIGS[request.param])
    return folder


def changed(checkpoint: Path, folder: Path, tensor: str | None = None, **config: Any) -> Path:
    """A copy in which one element of `tensor`, or fields of the config, are others."""
    shutil.copytree(checkpoint, folder)
    if tensor is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor].flatten()[tensors[tensor].numel() // 3] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    return folder


def test_equal_models_agree_at_every_place(checkpoint: Path) -> None:
    report = verify(checkpoint, tokens=33)
    inner = ["mixer_norm", "mixer", "mlp_norm", "mlp"]
    layers = range(json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"])
    blocks = [[*(f"decoder.blocks.{i}.{name}" for name in inner), f"decoder.blocks.{i}"] for i in layers]
    assert [place.name for place in report.places] == [
        "decoder.embed",
        *chain(*blocks),
        "decoder.norm",
        "decoder",
        "logits",
    ]
    assert report.passed and report.first_mismatch is None and report.tokens == 33
    assert max(place.error for place in report.places) < 1e-5


def test_dtypes(checkpoint: Path) -> None:
    worst = [max(place.error for place in verify(checkpoint, dtype=dtype, tokens=9).places) for dtype in DTYPES]
    assert worst[0] < 1e-6 and 1e-3 < worst[1] < 5e-2
    assert verify(checkpoint, dtype="bfloat16", tokens=9).tolerance == 5e-2


DTYPES = (torch.float64, torch.bfloat16)
FAULTS = {
    "model.embed_tokens.weight": "decoder.embed",
    "model.layers.0.input_layernorm.weight": "decoder.blocks.0.mixer_norm",
    "model.layers.0.self_attn.q_proj.weight": "decoder.blocks.0.mixer",
    "model.layers.1.self_attn.v_proj.weight": "decoder.blocks.1.mixer",
    "model.layers.2.self_attn.o_proj.weight": "decoder.blocks.2.mixer",
    "model.layers.2.post_attention_layernorm.weight": "decoder.blocks.2.mlp_norm",
    "model.layers.1.mlp.up_proj.weight": "decoder.blocks.1.mlp",
    "model.layers.0.mlp.down_proj.weight": "decoder.blocks.0.mlp",
    "model.norm.weight": "decoder.norm",
    "lm_head.weight": "logits",
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied") / "model"
    make_checkpoint(folder, CONFIGS["llama-3.1"])
    return folder


@pytest.mark.parametrize("tensor", FAULTS)
def test_one_changed_weight_is_found(untied: Path, tmp_path: Path, tensor: str) -> None:
    every_token = torch.arange(CONFIGS["llama-3.1"]["vocab_size"] - 4)[None]
    report = verify(untied, reference=changed(untied, tmp_path / "other", tensor), input_ids=every_token)
    assert report.first_mismatch is not None and not report.passed
    assert report.first_mismatch.name == FAULTS[tensor]


def test_another_rope_parts_in_the_first_attention(untied: Path, tmp_path: Path) -> None:
    report = verify(untied, reference=changed(untied, tmp_path / "other", rope_theta=400_000.0))
    assert report.first_mismatch is not None and report.first_mismatch.name == "decoder.blocks.0.mixer"
    assert verify(untied, reference=tmp_path / "other", tolerance=10.0).passed


def test_what_cannot_be_compared_is_no_agreement() -> None:
    one = torch.ones(2, 3)
    assert relative_error(one, one) == 0 == relative_error(one * 0, one * 0)
    assert relative_error(one, one * 0) == math.inf
    assert math.isnan(relative_error(one * math.nan, one)) and math.isnan(relative_error(one, one.T))
    assert relative_error(3 * one, 2 * one) == 0.5


def test_the_first_mismatch_has_one_name_in_json(untied: Path, tmp_path: Path) -> None:
    """As in the report of draft heads and in Python."""
    folder = changed(untied, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for reference, wanted in ((folder, "decoder.blocks.1.mlp"), (untied, None)):
        result = CliRunner().invoke(app, ["verify", str(untied), "--reference", str(reference), "--json"])
        found = json.loads(result.stdout)
        assert (found["first_mismatch"], found["passed"], result.exit_code) == (wanted, not wanted, bool(wanted))


def test_nan_in_both_models_fails(untied: Path, tmp_path: Path) -> None:
    folder = changed(untied, tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = verify(folder)
    assert report.first_mismatch is not None and report.first_mismatch.name == "decoder.blocks.1.mlp"


def test_bad_input(untied: Path, tmp_path: Path) -> None:
    for input_ids in ([], torch.empty(1, 0, dtype=torch.long)):
        with pytest.raises(InputError, match="input_ids are empty"):
            verify(untied, input_ids=input_ids)
    for wrong in ("text", [1.5], torch.tensor([1.5])):
        with pytest.raises(InputError, match="input_ids must be"):
            verify(untied, input_ids=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokens: must be a whole number of at least 1, got -1"):
        verify(untied, tokens=-1)
    with pytest.raises(InputError, match="131"):
        verify(untied, input_ids=[5, 131])
    with pytest.raises(CheckpointError, match=r"transformers cannot open .*nothing"):
        verify(untied, reference=tmp_path / "nothing")


def test_many_tokens_are_a_warning_before_the_run(untied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers keeps the scores of all pairs of tokens: 100,000 take hours, or more memory than there is."""
    monkeypatch.setattr("ligermodels.verify.SCORES_BYTES", 4 * 5 * 64**2)
    size = CONFIGS["llama-3.1"]["num_attention_heads"] * 65**2 * 4 / 2**30
    monkeypatch.setattr("ligermodels.verify._outputs", lambda *_: pytest.fail("ran"))
    with (
        pytest.warns(UserWarning, match=f"scores of 65 tokens take {size:.1f} GiB"),
        pytest.raises(pytest.fail.Exception),
    ):
        verify(untied, tokens=65)
    with warnings.catch_warnings(), pytest.raises(pytest.fail.Exception):
        warnings.simplefilter("error")
        verify(untied, tokens=9)


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "deepseek_v3"])
def test_the_size_of_scores_is_of_attention(name: str) -> None:
    """Not of the heads of Mamba2; also where attention is computed beside it."""
    model = lm.from_config(FAMILIES[name], device="meta", dtype=torch.float32)
    size = FAMILIES[name]["num_attention_heads"] * 4  # GiB
    with pytest.warns(UserWarning, match=f"scores of 32,768 tokens take {size}.0 GiB"):
        _warn_of_scores(model, 1, 2**15)


def test_the_beginning_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text of any size: more than TEXT_BYTES were an error. One that holds no text is named."""
    folder = tmp_path / "model"
    make_checkpoint(folder, CONFIGS["llama-3.1"])
    monkeypatch.setattr("ligermodels.cli.verify.TEXT_BYTES", 11)
    monkeypatch.setattr("ligermodels.data.tokenizer.Tokenizer.__init__", lambda *_: None)
    monkeypatch.setattr("ligermodels.data.tokenizer.Tokenizer.encode", lambda _, text: [ord(c) % 100 for c in text])
    path = tmp_path / "book.txt"
    path.write_bytes("abc\r\nabcdeé and more".encode())
    for options in ([], ["--quantize", "int4"]):
        arguments = ["verify", str(folder), "--text", str(path), "--json", *options]
        found = json.loads(CliRunner().invoke(app, arguments).stdout)
        assert found["tokens"] == 9 - len(options) // 2  # without the character that the bound cut, and the last \r
        for content, message in ((b"", "is empty"), (b"a\xe9b", "not UTF-8 text")):
            (tmp_path / "bad.txt").write_bytes(content)
            result = CliRunner().invoke(app, ["verify", str(folder), "--text", str(tmp_path / "bad.txt"), *options])
            assert result.exit_code == 1 and "bad.txt: " + message in result.stderr


def test_a_reference_of_other_sizes_is_said(untied: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", {**CONFIGS["llama-3.1"], "hidden_size": 84})
    result = CliRunner().invoke(app, ["verify", str(untied), "--reference", str(tmp_path / "other")])
    assert result.exit_code == 1 and "decoder.embed: error nan (outputs of other shapes, or NaN)" in result.stdout
