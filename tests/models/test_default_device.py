"""torch's default device, by a context or for the process, is where models are built and loaded, as in transformers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm

LLAMA = CONFIGS["llama-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, LLAMA)
    return folder


@contextmanager
def as_default(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("scope", [torch.device, as_default])
@pytest.mark.parametrize("load", [lm.from_config, lm.from_pretrained])
def test_models_are_on_the_default_device(
    folder: Path, load: Callable[..., lm.CausalLM], scope: Callable[[str], AbstractContextManager[Any]]
) -> None:
    with scope("meta"):
        model, on_cpu, mapped = load(folder), load(folder, device="cpu"), load(folder, device_map="cpu")
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert load(folder).device.type == "cpu"
    state = lm.from_pretrained(folder).state_dict()
    model.load_state_dict(state, assign=True)
    ids = torch.arange(3, 12)[None]
    expected = lm.from_pretrained(folder).eval()(ids).logits
    assert torch.equal(model.eval()(ids).logits, expected)
    for other in (on_cpu, mapped):
        assert {tensor.device.type for tensor in [*other.parameters(), *other.buffers()]} == {"cpu"}
        assert other.eval()(ids).logits.isfinite().all()
        if load is lm.from_pretrained:
            assert torch.equal(other(ids).logits, expected)
