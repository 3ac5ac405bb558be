"""The README and the pages of docs/: their code runs, and it fits the width of the site.

Each page runs from top to bottom, alone, on tiny models in folders of the names that it uses; only sizes and devices
are replaced. `python` blocks are executed. Of `sh` blocks, lines that begin with `ligermodels` are executed, and other
programs are not. `py` blocks are excerpts or need several GPUs, and `shell` blocks need other packages: they are not
executed, but the options of their `ligermodels` commands are parsed. Tests of pages that need other packages are in
tests/integrations/.
"""

import importlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import TEXT
from runs import with_decoder
from typer.main import get_command
from typer.testing import CliRunner
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.archs.registry import MODULES
from ligermodels.cli import app
from ligermodels.models.mtp_format import MTPFormat
from ligermodels.training import DFlashRecipe, DSparkRecipe, EagleRecipe, FineTuningRecipe, MedusaRecipe, MTPRecipe

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": {"out", "tuned", "adapter", "my-adapter", "heads-for-vllm"},
    "docs/models.md": {"out"},
    "docs/command-line.md": {"bf16", "merged"},
    "docs/medusa.md": {"own-loop", "heads", "joint", "for-tgi", "scores.png"},
    "docs/draft-heads.md": set[str](),
    "docs/serving.md": {
        "heads",
        "heads-vllm",
        "heads-tgi",
        "heads-trt",
        "with-mtp",
        "eagle-heads",
        "eagle-vllm",
        "eagle-sglang",
        "dflash-heads",
        "dflash-vllm",
    },
    "docs/long-sequences.md": {"long"},
    "docs/custom-architecture.md": {"decay", "decay-heads"},
    "docs/weight-map.md": set[str](),
    "docs/ops.md": set[str](),
    "docs/coming-from.md": set[str](),
    "docs/data.md": {"counts.json", "tuned", "chat", "streamed"},
    "docs/fine-tuning.md": {"book", "tuned", "merged", "newest", "checked"},
    "docs/chats.md": set[str](),
    "docs/cuda-graphs.md": {"out"},
    "docs/optimizers.md": {"out", "stable"},
    "docs/tracking.md": {"runs", "best"},
    "docs/callbacks.md": {"out"},
    "docs/float8.md": {"float8"},
    "docs/several-gpus.md": {"out", "tuned"},
    "docs/planning.md": set[str](),
    "docs/quantized-decoding.md": set[str](),
    "docs/mtp.md": {"with-head", "head", "own.jsonl", "mtp-head", "with-mtp"},
    "docs/eagle.md": {"own.jsonl", "head", "own-head", "run", "for-vllm", "for-sglang"},
    "docs/dspark.md": {"own.jsonl", "head", "flash", "own-head", "run", "for-vllm", "for-sglang", "flash-sglang"},
    "docs/objectives.md": {"preferred", "judged", "student", "own"},
    "docs/grpo.md": {"better", "by-two"},
    "docs/experts.md": {"balanced"},
    "docs/reference/ligermodels.md": {"out", "adapter", "heads"},
    "docs/reference/data.md": set[str](),
    "docs/reference/training.md": set[str](),
    "docs/reference/recipes.md": {"mine"},
}
"""Page -> some of the files that its commands write."""
ELSEWHERE = {*(f"docs/{name}.md" for name in ("transformers", "trainers", "peft", "evaluation", "engines"))}
"""Pages that other tests run, or that explain code of the repository."""
WIDTH = 80
"""Columns that a code block of the site shows without scrolling."""
MODELS = (
    "MODEL",
    "BASE",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",  # the base of the recipe llama-3
    "unsloth/Llama-3.2-1B-bnb-4bit",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3.5-9B",
)
MIXTURES = {"Qwen/Qwen3-30B-A3B": "qwen3_moe", "zai-org/GLM-4.5-Air": "glm4_moe"}
"""Models of docs/experts.md -> their configs in the zoo."""
TRAINING = ["--seq-len", "256", "--batch-tokens", "256", "--micro-batch-tokens", "256", "--max-bad-lines", "0"]
SIZES = {
    "train": [*TRAINING, "--batch-tokens", "512", "--micro-batch-tokens", "512", "--device", "cpu"],
    "data": ["--max-bad-lines", "0"],
    "medusa train": [*TRAINING, "--device", "cpu"],
    "medusa eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "medusa self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "mtp train": [*TRAINING, "--device", "cpu"],
    "mtp eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "mtp self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "eagle train": [*TRAINING, "--device", "cpu"],
    "eagle eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "eagle self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "dflash train": [*TRAINING, "--num-layers", "1", "--device", "cpu"],
    "dspark train": [*TRAINING, "--num-layers", "1", "--device", "cpu"],
    "dspark eval": ["--prompts", "4", "--max-new-tokens", "4", "--seq-len", "64", "--device", "cpu"],
    "dspark self-distillation-data": ["--max-new-tokens", "6", "--device", "cpu"],
    "generate": ["--max-new-tokens", "6", "--device", "cpu"],
    "chat": ["--max-new-tokens", "6", "--device", "cpu"],
}


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and content of the fenced blocks of a page."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def commands(content: str) -> list[str]:
    """The `ligermodels` command lines of a block, whole."""
    return [line for line in content.replace("\\\n", " ").splitlines() if line.startswith("ligermodels ")]


def pages() -> list[str]:
    """Paths of the README, the examples' README, and all pages of docs/."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "examples/README.md", *docs]


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, configs and data that the pages name."""
    folder = tmp_path_factory.mktemp("desk")
    model = with_decoder(base, folder / "model")
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": 96}  # float8 needs multiples of 16
    lm.from_config(config).save_pretrained(folder / "aligned")
    shutil.copytree(folder / "aligned", model, dirs_exist_ok=True)
    for name in MODELS:
        shutil.copytree(model, folder / name)
    with_head = lm.MTPModel.from_base(lm.from_pretrained(model))
    with_head.save_pretrained(folder / "Qwen/Qwen3.5-9B", overwrite=True)
    files = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(model, folder / "my-model", ignore=files)
    shutil.copy(model / "config.json", folder / "my-config.json")
    words = TEXT.split(" ")[3:]
    texts = [" ".join(words[i : i + 15]) for i in range(12)]
    chats: list[dict[str, Any]] = [{"text": text} for text in texts[:4]]
    for text in texts:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        chats.append({"messages": turns})
    (folder / "book.txt").write_text("\n".join(texts * 4))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in ("chats.jsonl", "validation.jsonl"):
        (folder / name).write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    shutil.copy(ROOT / "examples" / "custom_architecture.py", folder)
    return folder


@pytest.fixture
def desk(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of `shared`."""
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_mixtures(desk: Path) -> None:
    """Mixtures of experts with the tokens of the other models."""
    vocabulary = json.loads((desk / "model" / "config.json").read_text())["vocab_size"]
    for name, config in MIXTURES.items():
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": 512, "pad_token_id": None}
        lm.from_config({**CONFIGS[config], **sizes}).save_pretrained(desk / name)
        others = shutil.ignore_patterns("*.safetensors", "config.json")
        shutil.copytree(desk / "model", desk / name, ignore=others, dirs_exist_ok=True)


def run(line: str) -> None:
    """Run a `ligermodels` command line; `> FILE` writes its output to a file."""
    words = shlex.split(line, comments=True)
    words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, None)
    sized = [name for name in SIZES if words[1 : 1 + len(name.split())] == name.split()]
    fewer: dict[str, Callable[[str], object]] = {
        "--steps": lambda steps: max(2, math.ceil(int(steps) / 5000)),
        "--decay-steps": lambda steps: math.ceil(int(steps) / 5000),
        "--num-generations": lambda _: 2,
        "--max-completion-length": lambda _: 8,
        **({"--gpus": lambda _: 1} if sized else {}),
    }
    words = [str(fewer.get(before, str)(word)) for before, word in zip(["", *words], words, strict=False)]
    result = CliRunner().invoke(app, [*words[1:], *(SIZES[sized[0]] if sized else [])], input="Hi\nHow are you?\n")
    assert result.exit_code == 0, (line, result.output, result.exception)
    if target is not None:
        Path(target).write_text(result.stdout)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page: str, desk: Path) -> None:
    names: dict[str, Any] = {}
    if page == "docs/experts.md":
        make_mixtures(desk)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for language, content in blocks(page):
            if language == "python":
                exec(compile(content.replace('"cuda"', '"cpu"'), page, "exec"), names)
            elif language == "sh":
                for line in commands(content):
                    run(line)
    finally:
        torch.distributed.destroy_process_group()
    assert PAGES[page] <= {path.name for path in desk.iterdir()}


def test_every_page_with_code_is_run() -> None:
    with_code = {
        page
        for page in pages()
        for language, content in blocks(page)
        if language == "python" or re.search("^ligermodels ", content, re.MULTILINE)
    }
    assert with_code <= PAGES.keys() | ELSEWHERE


def test_the_options_of_commands_that_are_not_run_exist() -> None:
    ligermodels: Any = get_command(app)
    others = [content for page in pages() for language, content in blocks(page) if language != "sh"]
    lines = [line for content in others for line in commands(content)]
    assert len(lines) >= 3
    for line in lines:
        words, command = shlex.split(line)[1:], ligermodels
        context = command.make_context("ligermodels", [*words])
        while hasattr(command, "commands"):
            start = next(i for i, word in enumerate(words) if word in command.commands)
            name, command, words = command.resolve_command(context, words[start:])
            context = command.make_context(name, [*words], parent=context)
        assert command.name not in (None, "ligermodels")


@pytest.mark.parametrize("page", pages())
def test_code_blocks_fit_the_width_of_the_site(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
    assert len(fences) % 2 == 0, "a code block is not closed"
    inside = (i for start, end in zip(fences[::2], fences[1::2], strict=True) for i in range(start + 1, end))
    wide = [f"line {i + 1}: {len(lines[i])} columns" for i in inside if len(lines[i]) > WIDTH]
    assert not wide


@pytest.mark.slow
def test_strict_type_checkers_accept_the_readme(tmp_path: Path) -> None:
    """Its Python as one program, by `mypy --strict` with the project's settings."""
    program = tmp_path / "readme.py"
    program.write_text("\n".join(content for language, content in blocks("README.md") if language == "python"))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    found = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_supported_families_are_listed() -> None:
    page = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    families = [family.model_type for module in MODULES for family in module.FAMILIES]
    assert not [name for name in families if f"`{name}`" not in page]


def test_the_walk_names_the_files_of_its_functions() -> None:
    page = " ".join((ROOT / "docs" / "walk.md").read_text(encoding="utf-8").split())
    pairs = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`", page)
    pairs += [(name, path) for path, name in re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", page)]
    assert len(pairs) > 40
    for name, path in pairs:
        file = ROOT / "ligermodels" / path
        word = name.rpartition(".")[2]
        assert re.search(rf'\b(def|class) {word}\b|"{word}"', file.read_text(encoding="utf-8")), f"{name}: {path}"


def test_the_formats_of_mtp_heads_are_listed() -> None:
    page, usual = (ROOT / "docs" / "mtp.md").read_text(encoding="utf-8"), MTPFormat()
    families = [family.model_type for module in MODULES for family in module.FAMILIES if family.mtp != usual]
    assert not [name for name in families if name != "qwen3_next" and f"`{name}`" not in page]


@pytest.mark.parametrize(
    "recipe", [FineTuningRecipe, MedusaRecipe, MTPRecipe, EagleRecipe, DFlashRecipe, DSparkRecipe, lm.ParallelPlan]
)
def test_the_reference_lists_every_setting(recipe: Any) -> None:
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    tables = re.findall(r"^<!-- settings: ([\w.]+)\.(\w+) -->$", page, re.MULTILINE)
    classes = [getattr(importlib.import_module(module), name) for module, name in tables]
    listed = {name for each in classes if issubclass(recipe, each) for name in each.__annotations__}
    assert not [name for name in recipe.model_fields if name not in listed]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
