"""save_pretrained(keep="all"): a checkpoint with more than a language model goes back out whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.convert.files import SINGLE
from ligermodels.errors import CheckpointError, InputError

VISION = {
    "hidden_size": 20,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


HUB = ("language_model.model.", "vision_tower.vision_model.", "multi_modal_projector.")
STATE = ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of names as in the checkpoints on the hub, and as in the state of transformers 5."""


def make_gemma3(folder: Path, prefixes: tuple[str, ...] = HUB) -> None:
    """Save a tiny Gemma 3 with its vision tower, whose tensors have names with these prefixes."""
    config = Gemma3Config(
        text_config={k: v for k, v in CONFIGS["gemma3_text"].items() if k != "rope_scaling"},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=130,
        eos_token_id=[1, 7],
    )
    torch.manual_seed(0)
    oracle = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.15)
    oracle.save_pretrained(folder)
    tensors = {}
    for name, tensor in oracle.state_dict().items():
        for theirs, prefix in zip(STATE, prefixes, strict=True):
            if name.startswith(theirs):
                tensors[name.replace(theirs, prefix, 1)] = tensor
    assert len(tensors) == len(oracle.state_dict()) - 1  # The head is the embedding.
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_seq_length": 4}')


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}


def trained(folder: Path) -> lm.CausalLM:
    """The language model, its weights changed as by training."""
    model = lm.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("prefixes", [HUB, STATE])
def test_gemma3_goes_out_with_its_vision_tower(prefixes: tuple[str, ...], tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    make_gemma3(folder, prefixes)
    before = stored(folder)
    model = trained(folder)
    model.save_pretrained(out, max_shard_size="50KB")

    after = stored(out)
    text = {name for name in before if name.startswith(prefixes[0])}
    assert after.keys() == before.keys() and 0 < len(text) < len(before)
    assert all(torch.equal(after[name], before[name]) == (name not in text) for name in before)
    assert (out / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()

    reopened, info = Gemma3ForConditionalGeneration.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    ids, image = torch.randint(3, 130, (2, 41)), torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        assert relative_error(model(ids).logits, reopened.eval()(ids).logits) < 1e-5
        oracle = Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
        features = [each.get_image_features(image).pooler_output for each in (reopened, oracle)]
        assert torch.equal(*features)
        assert torch.equal(lm.from_pretrained(out)(ids).logits, model(ids).logits)

    # What was written over the config's fields is its dtype, and the rope of the text model in both schemas.
    written, found = (json.loads((at / "config.json").read_text()) for at in (out, folder))
    ours = {"dtype", "torch_dtype", "rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters"}
    parts = [
        [{k: v for k, v in each.items() if k not in ours} for each in (c, c["text_config"])] for c in (written, found)
    ]
    for part in parts:
        del part[0]["text_config"]
    assert parts[0] == parts[1]
    assert written["text_config"]["rope_theta"] == 1e6 and "rope_theta" not in written

    # The language model alone.
    model.save_pretrained(tmp_path / "text", keep="model")
    assert not any("vision" in name for name in stored(tmp_path / "text"))
    assert not (tmp_path / "text" / "preprocessor_config.json").exists()


def test_cast_and_written_over_what_it_came_from(tmp_path: Path) -> None:
    make_gemma3(tmp_path)
    before = {name: tensor.clone() for name, tensor in stored(tmp_path).items()}
    model = lm.from_pretrained(tmp_path, dtype=torch.bfloat16)
    command = ["export", str(tmp_path), str(tmp_path), "--overwrite", "--dtype", "bfloat16"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    for name, tensor in stored(tmp_path).items():
        wanted = before[name].bfloat16() if "language_model" in name else before[name]
        assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == config["text_config"]["dtype"] == "bfloat16"
    model.save_pretrained(tmp_path, overwrite=True, keep="all")  # It is still there.


def test_whatever_a_family_does_not_read_is_kept(tmp_path: Path) -> None:
    """Tables that old exporters left in checkpoints of Llama, beside a config that has no other within it."""
    make_checkpoint(tmp_path / "model", CONFIGS["llama-3"])
    file = tmp_path / "model" / SINGLE
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(7)}
    save_file({**load_file(file), **table}, file)
    model = trained(tmp_path / "model")
    model.save_pretrained(tmp_path / "alone", keep="model")
    model.save_pretrained(tmp_path / "all")
    with_all, alone = stored(tmp_path / "all"), stored(tmp_path / "alone")
    assert with_all.keys() == alone.keys() | table.keys()
    assert torch.equal(with_all[next(iter(table))], table[next(iter(table))])
    assert (tmp_path / "all" / "config.json").read_bytes() == (tmp_path / "alone" / "config.json").read_bytes()


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    make_gemma3(tmp_path / "model")
    model, out = lm.from_pretrained(tmp_path / "model", mapped=False), tmp_path / "out"
    with pytest.raises(InputError, match=r"keep: must be one of 'all', 'without-heads', 'model', got 'vision'"):
        model.save_pretrained(out, keep="vision")
    shutil.copytree(tmp_path / "model", tmp_path / "text")
    alone = lm.from_pretrained(tmp_path / "text", mapped=False)
    alone.save_pretrained(tmp_path / "text", overwrite=True, keep="model")
    with pytest.raises(
        CheckpointError, match=r"(?s)keep='all'.*text: \d+ of the tensors are gone, such as multi_modal_projector"
    ):
        alone.save_pretrained(out)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"keep='all'.*model: no such folder; put that checkpoint back"):
        model.save_pretrained(out)
    assert not out.exists()
