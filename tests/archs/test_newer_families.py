"""Draft heads and weights in 4 bits of the families that differ from others by their configuration alone."""

from pathlib import Path

import pytest
import torch
from zoo import CONFIGS, NEWER, make_checkpoint, relative_error

import ligermodels as lm


@pytest.fixture(params=[*NEWER, "deepseek_v2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", CONFIGS[request.param])
    return tmp_path / "model"


def test_new_mtp_heads_are_lossless_and_come_back(folder: Path, tmp_path: Path) -> None:
    base = lm.from_pretrained(folder)
    model = lm.MTPModel.from_base(base)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), base.generate(ids, **options))
    model.save_pretrained(tmp_path / "out")
    again = lm.MTPModel.from_pretrained(tmp_path / "out").head.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.head.state_dict().items())


@torch.no_grad()
def test_decoding_in_four_bits_is_that_of_the_dequantised_weights(folder: Path) -> None:
    model = lm.from_pretrained(folder, quantize="int4")
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits
    assert relative_error(lm.from_pretrained(folder)(ids).logits, logits) > 1e-3
    tokens = model.generate(ids, max_new_tokens=5, eos_token_id=None, pad_token_id=0)
    plain = lm.dequantize(model)
    assert relative_error(plain(ids).logits, logits) < 1e-4
    assert torch.equal(plain.generate(ids, max_new_tokens=5, eos_token_id=None, pad_token_id=0), tokens)
