"""Random mutations of the files of a checkpoint and of a recipe: each is fine, or ends in an error of ours, soon."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from test_doors import limited, model_folder  # noqa: F401  (a fixture)

import ligermodels as lm
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import LigerModelsError
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe

VALUES = [
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"99999999999999999999", b'""', b'"x"', b"[]", b"{}", b"[[1]]",
    b'{"a": 1}', b"\xff", b"\0", b'"\\ud800"', b"1.5", b'"model_type"', b"2147483647", b"[null]",
]  # fmt: skip
"""What takes the place of a part of a file."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """`content` with bytes changed, a part left out or doubled, or a value of JSON or YAML replaced."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(content) + 1)
        match draw.randrange(5):
            case 0:
                content = content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
            case 1:
                content = content[:at] + content[at + draw.randrange(40) :]
            case 2:
                content = content[:at] + content[max(0, at - draw.randrange(40)) :]
            case _:  # a value: what stands after a colon, up to the next comma, bracket or end of line
                colon = content.find(b": ", at)
                end = min((i for each in (b",", b"}", b"\n") if (i := content.find(each, colon)) >= 0), default=at)
                if 0 <= colon < end:
                    content = content[: colon + 2] + draw.choice(VALUES) + content[end:]
    return content


def with_index(folder: Path) -> None:
    lm.from_pretrained(folder).save_pretrained(folder / "sharded", max_shard_size="20KB")


def with_adapter(folder: Path) -> None:
    lm.save_adapter(lm.add_lora(lm.from_pretrained(folder), r=2), folder / "adapter")


FORMATS: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "config.json": ("config.json", lambda folder: None, lm.from_pretrained),
    "config alone": ("config.json", lambda folder: None, lambda folder: lm.from_config(folder, device="meta")),
    "generation_config.json": ("generation_config.json", lambda folder: None, lm.from_pretrained),
    "header": ("model.safetensors", lambda folder: None, lm.from_pretrained),
    "index": (
        "sharded/model.safetensors.index.json",
        with_index,
        lambda folder: lm.from_pretrained(folder / "sharded"),
    ),
    "tokenizer.json": ("tokenizer.json", lambda folder: None, lambda folder: Tokenizer(folder).encode("a text, é")),
    "adapter_config.json": (
        "adapter/adapter_config.json",
        with_adapter,
        lambda folder: lm.load_adapter(lm.from_pretrained(folder), folder / "adapter"),
    ),
    "recipe": (
        "recipe.yaml",
        lambda folder: (folder / "recipe.yaml").write_bytes(RECIPE),
        lambda folder: FineTuningRecipe.read(folder / "recipe.yaml"),
    ),
}
RECIPE = (
    b"base: a/b\ndata: [a.jsonl]\nsteps: 10\nlearning_rate: 1e-3\nseed: 3\nparallel:\n  shard: 2\ndtype: bfloat16\n"
)
HEADER = 2000
"""Bytes of safetensors that are mutated: what comes after them is weights."""


def try_mutations(name: str, count: int, source: Path, folder: Path) -> None:
    file, make, use = FORMATS[name]
    shutil.copytree(source, folder)
    make(folder)
    path = folder / file
    good = path.read_bytes()
    draw, wrong = random.Random(name), []
    for _ in range(count):
        bad = mutated(good[:HEADER], draw) + good[HEADER:] if name == "header" else mutated(good, draw)
        path.unlink()  # a mapped file must not change
        path.write_bytes(bad)
        try:
            with limited(20), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use(folder)
        except LigerModelsError:
            pass
        except Exception as error:
            place = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), 0)
            wrong.append(f"{type(error).__name__}: {str(error)[:200]} of {bad[max(0, place - 40) : place + 60]!r}")
    assert not wrong


@pytest.mark.parametrize("name", FORMATS)
def test_mutations(name: str, model_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    try_mutations(name, 25, model_folder, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutations(name: str, model_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    try_mutations(name, 300, model_folder, tmp_path / "model")
