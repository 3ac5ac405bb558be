"""The commands and the code of the README and of the pages that need no other package, in order, on tiny models in
folders of their names. Only sizes and devices are replaced. The other pages are in
tests/integrations/test_integration_pages.py. Blocks in another language than Python, such as `sh`, are commands of
other programs."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import TEXT
from runs import with_decoder
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": {"out", "heads", "heads-for-vllm"},
    "docs/medusa.md": {"own-loop", "heads", "joint", "for-tgi", "scores.png"},
    "docs/serving.md": {"heads", "heads-vllm", "heads-tgi", "heads-trt", "with-mtp"},
    "docs/long-sequences.md": {"long"},
    "docs/weight-map.md": set[str](),
    "docs/ops.md": set[str](),
    "docs/coming-from.md": set[str](),
    "docs/fine-tuning.md": {"book", "tuned", "merged", "newest", "checked"},
    "docs/quantized-decoding.md": set[str](),
    "docs/mtp.md": {"with-head", "head", "own.jsonl", "mtp-head", "with-mtp"},
    "docs/objectives.md": set[str](),
}
"""Page -> some of what its commands write."""
MODELS = (
    "MODEL",
    "BASE",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",  # the base of the recipe llama-3
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3.5-9B",
)
TRAINING = ["--seq-len", "64", "--batch-tokens", "256", "--micro-batch-tokens", "256", "--max-bad-lines", "0"]
SIZES = {
    "train": [*TRAINING, "--device", "cpu"],
    "medusa train": [*TRAINING, "--device", "cpu"],
    "medusa eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "medusa self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "mtp train": [*TRAINING, "--device", "cpu"],
    "mtp eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "mtp self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "generate": ["--max-new-tokens", "6", "--device", "cpu"],
    "chat": ["--max-new-tokens", "6", "--device", "cpu"],
}
NO_COMMANDS = re.compile(r"make |pip install|torchrun |cli, demo |\{")
"""How the blocks begin that are neither commands of ours nor code."""


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and content of the fenced blocks of a page."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def desk(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: with the models, configs and data that the pages name."""
    model = with_decoder(base, tmp_path / "model")
    for name in MODELS:
        shutil.copytree(model, tmp_path / name)
    with_head = lm.MTPModel.from_base(lm.from_pretrained(model))
    with_head.save_pretrained(tmp_path / "Qwen/Qwen3.5-9B", overwrite=True)
    files = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(model, tmp_path / "my-model", ignore=files)
    shutil.copy(model / "config.json", tmp_path / "my-config.json")
    words = TEXT.split(" ")[3:]
    texts = [" ".join(words[i : i + 15]) for i in range(12)]
    chats: list[dict[str, Any]] = [{"text": text} for text in texts[:4]]
    for text in texts:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        chats.append({"messages": turns})
    (tmp_path / "book.txt").write_text("\n".join(texts * 4))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in ("chats.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> None:
    """A line of a shell: a command of ours, its output to a file where it says so."""
    words = shlex.split(line, comments=True)
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
    assert words[0] == "ligermodels", line
    known = [name for name in SIZES if words[1 : 1 + len(name.split())] == name.split()]
    words = ["2" if i and words[i - 1] == "--steps" else word for i, word in enumerate(words)]
    result = CliRunner().invoke(app, [*words[1:], *(SIZES[known[0]] if known else [])], input="Hi\nHow are you?\n")
    assert result.exit_code == 0, (line, result.output, result.exception)
    if target is not None:
        Path(target).write_text(result.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page: str, desk: Path) -> None:
    input_ids = torch.randint(3, 40, (2, 24), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"input_ids": input_ids, "labels": input_ids, "AutoModelForCausalLM": AutoModelForCausalLM}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for language, content in blocks(page):
            if language == "python":
                code = content.replace(', device_map="cuda"', "").replace('"cuda"', '"cpu"')
                exec(compile(code, page, "exec"), names)
            elif language == "" and not NO_COMMANDS.match(content):
                for line in content.replace("\\\n", " ").splitlines():
                    run(line)
    finally:
        torch.distributed.destroy_process_group()
    assert PAGES[page] <= {path.name for path in desk.iterdir()}
