"""Runs on a tiny model: its folder and data, the recipe, and the files of a run."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from chat_templates import TEXT, save_template, tokenizer_of
from safetensors.torch import load_file
from zoo import LLAMA, make_checkpoint

from ligermodels.training import MedusaRecipe


def make_base(folder: Path) -> None:
    """A tiny random Llama with Qwen2.5's manner of tokens and chats."""
    tokenizer = tokenizer_of("qwen2.5", folder)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    make_checkpoint(folder, {**LLAMA, **small, "vocab_size": tokenizer.backend.get_vocab_size()})
    save_template("qwen2.5", folder)


def with_decoder(base: Path, folder: Path) -> Path:
    """A copy of `base` with a decoder of its tokens: what it says is text."""
    shutil.copytree(base, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def make_data(path: Path) -> None:
    """Chats and texts of few words, and a line that is none."""
    draw, words = random.Random(0), TEXT.split(" ")

    def say() -> str:
        return " ".join(draw.choices(words[3:], k=draw.randint(1, 12)))

    lines: list[dict[str, Any]] = []
    for i in range(60):
        chat = [{"from": who, "value": say()} for who in ("human", "gpt") * draw.randint(1, 3)]
        lines.append({"conversations": chat} if i % 3 else {"text": say()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:30]) + "{}\n" + json.dumps(lines[30]))


def make_pairs(path: Path, count: int = 24) -> None:
    """Pairs of chats, of texts, and with the prompt in both sides."""
    draw, words = random.Random(1), TEXT.split(" ")

    def say() -> str:
        return " ".join(draw.choices(words[3:], k=draw.randint(1, 6)))

    lines: list[dict[str, Any]] = []
    for i in range(count):
        prompt, chosen, rejected = say(), say(), say()
        user = {"role": "user", "content": prompt}
        turns = {side: [{"role": "assistant", "content": text}] for side, text in (("a", chosen), ("b", rejected))}
        lines.append(
            [
                {"prompt": prompt, "chosen": f" {chosen}.", "rejected": f" {rejected}!"},
                {"prompt": [user], "chosen": turns["a"], "rejected": turns["b"]},
                {"chosen": [user, *turns["a"]], "rejected": [user, *turns["b"]]},
            ][i % 3]
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def recipe_for(base: Path, data: Path, **changes: Any) -> MedusaRecipe:
    settings = {
        "base": str(base),
        "data": (str(data),),
        "max_bad_lines": 1,
        "validation_fraction": 0.2,
        "num_heads": 3,
        "learning_rate": 5e-3,
        "weight_decay": 0.01,
        "steps": 12,
        "seq_len": 16,
        "excess_length_strategy": "split",  # most chats are longer
        "batch_tokens": 64,
        "micro_batch_tokens": 32,
        "evaluate_every": 5,
        "checkpoint_every": 3,
        "seed": 3,
        "date": "2024-07-26",
    }
    return MedusaRecipe().changed(settings).changed(changes)


STAGE_2 = {"stage": 2, "learning_rate": 1e-3, "distill": True}


def losses(out: Path) -> list[tuple[int, float, float]]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def scores(out: Path) -> list[tuple[int, list[float]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "validation_top1", "validation_top5")
    return [tuple(line[key] for key in keys) for line in lines if "validation_top1" in line]


def equal_heads(one: Path, other: Path) -> bool:
    names = [path.name for path in one.glob("*.safetensors")]
    assert len(names) == 1
    a, b = (load_file(folder / names[0]) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def command(*arguments: str, name: str = "medusa train") -> None:
    """What a child process does: the command line, from end to end."""
    from ligermodels.cli import app

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    app([*name.split(), *arguments])
