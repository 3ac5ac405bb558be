"""A tiny Llama with random weights, its tokenizer, and data: the examples use them unless you pass a checkpoint."""

import json
from pathlib import Path

import torch

import ligermodels as lm
from ligermodels.demo import python_sources, train_tokenizer

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}


def checkpoint(folder: str = "tiny-llama") -> str:
    """Write a checkpoint, which transformers opens too. Its tokenizer is trained on Python's sources."""
    torch.manual_seed(0)
    lm.from_config(CONFIG).save_pretrained(folder, overwrite=True)
    train_tokenizer([text(200_000)], CONFIG["vocab_size"], Path(folder))
    return folder


def text(size: int) -> str:
    """The first `size` characters of Python's sources."""
    return "".join(path.read_text(errors="replace") for path in python_sources(4 * size + 200_000))[:size]


def texts_file(path: str = "texts.jsonl", lines: int = 60) -> str:
    """Write JSON lines with one text each."""
    words = text(lines * 400)
    rows = [json.dumps({"text": words[i * 400 : (i + 1) * 400]}) for i in range(lines)]
    Path(path).write_text("\n".join(rows) + "\n")
    return path


def chats_file(path: str = "chats.jsonl", lines: int = 60) -> str:
    """Write JSON lines with one chat each: the assistant says the user's words backwards."""
    words = text(20_000).split()
    rows = []
    for i in range(lines):
        phrase = words[5 * i : 5 * i + 5]
        turns = [("user", " ".join(phrase)), ("assistant", " ".join(reversed(phrase)))]
        rows.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}))
    Path(path).write_text("\n".join(rows) + "\n")
    return path
