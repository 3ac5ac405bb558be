"""examples/custom_architecture.py: a user's own layers train, decode with their states, go through checkpoints."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import ligermodels as lm
from ligermodels.archs import FAMILIES

FILE = Path(__file__).parents[2] / "examples" / "custom_architecture.py"
CONFIG = {"model_type": "decay", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4}
IDS = torch.arange(240).remainder(7).view(4, 60)


@pytest.fixture(scope="module")
def example() -> Any:
    before = dict(FAMILIES)
    spec = importlib.util.spec_from_file_location("custom_architecture", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture(scope="module")
def medusa(example: ModuleType) -> lm.MedusaModel:
    """A trained model, which counts to 7 again and again, with trained heads."""
    torch.manual_seed(0)
    model = lm.from_config(CONFIG)
    learn(model, model.parameters())
    found = lm.MedusaModel.from_base(model, num_heads=3)
    learn(found, found.head_parameters())
    return found


def learn(model: Any, parameters: Any) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


def by_whole_passes(model: lm.CausalLM, prompt: Tensor, count: int) -> Tensor:
    for _ in range(count):
        prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(-1)], dim=1)
    return prompt


def test_the_file_is_short_and_uses_public_names() -> None:
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 60
    imports = [line for line in lines if line.startswith(("import ligermodels", "from ligermodels"))]
    assert len(imports) == 3 and not any("._" in line for line in lines)


@torch.no_grad()
def test_decodes_with_its_state_as_without(example: ModuleType) -> None:
    torch.manual_seed(1)
    model = lm.from_config(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    prompts = [torch.randint(50, (length,)).tolist() for length in (5, 12, 9)]
    together = model.generate(prompts, max_new_tokens=11, pad_token_id=0)
    for prompt, found in zip(prompts, together, strict=True):
        alone = by_whole_passes(model, torch.tensor([prompt]), 11)[0]
        assert torch.equal(found[-len(alone) :], alone)
    heads = lm.MedusaModel.from_base(model, num_heads=3)
    out = heads.generate(prompts, max_new_tokens=11, pad_token_id=0, return_stats=True)
    assert torch.equal(out.sequences, together)


@torch.no_grad()
def test_packed_documents_do_not_see_one_another(medusa: lm.MedusaModel) -> None:
    one, two = torch.randint(50, (1, 13)), torch.randint(50, (1, 8))
    packed = medusa.base(torch.cat([one, two], 1), cu_seqlens=torch.tensor([0, 13, 21], dtype=torch.int32)).logits
    torch.testing.assert_close(packed, torch.cat([medusa.base(one).logits, medusa.base(two).logits], 1))


def test_learns_and_its_heads_speed_it_up(medusa: lm.MedusaModel) -> None:
    assert medusa.base(IDS, labels=IDS).loss < 0.1
    out = medusa.generate(IDS[:, :9], max_new_tokens=21, return_stats=True)
    assert torch.equal(out.sequences, IDS[:, :30]) and out.tokens_per_step > 3


def test_checkpoints_and_the_command_line(medusa: lm.MedusaModel, tmp_path: Path, children: Any) -> None:
    medusa.base.save_pretrained(tmp_path / "model")
    medusa.save_pretrained(tmp_path / "heads")
    again = lm.MedusaModel.from_pretrained(lm.from_pretrained(tmp_path / "model"), tmp_path / "heads")
    for name, parameter in medusa.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
    shown, info = tmp_path / "shown", ("info", str(tmp_path / "model"), "--json")
    for options, code, word in ((("--import", str(FILE)), 0, '"model_type": "decay"'), ((), 1, "--import")):
        process = children.Process(target=command, args=(shown, *options, *info))
        process.start()
        process.join()
        assert process.exitcode == code and word in shown.read_text(), shown.read_text()


def command(shown: Path, *arguments: str) -> None:
    """What a process does that knows nothing of the example: the command line, with its output in a file."""
    from ligermodels.cli import app

    file = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    app(arguments)


def test_lora_on_layers_of_ones_own(example: ModuleType, tmp_path: Path) -> None:
    """They are found by the weight map, under the names that they have in the model's block."""
    torch.manual_seed(0)
    model = lm.from_config(CONFIG)
    model.save_pretrained(tmp_path / "model")
    lm.add_lora(model, r=2)
    adapted = [p for p in model.parameters() if p.requires_grad]
    learn(model, adapted)
    lm.save_adapter(model, tmp_path / "adapter")
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert torch.equal(again.generate(IDS[:, :9], max_new_tokens=5), model.generate(IDS[:, :9], max_new_tokens=5))
    torch.testing.assert_close(lm.merge_lora(again)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
