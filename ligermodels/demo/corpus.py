"""What the demo learns from, on every machine: Python's own sources, and a tokenizer trained on them."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import tokenizers

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training import read_documents

END = "<|endoftext|>"


def python_sources(limit: int) -> list[Path]:
    """The modules of Python's standard library, by name, up to `limit` bytes: real text, and on every machine."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files, size = [], 0
    for path in sorted(folder.glob("*.py")):
        size += path.stat().st_size
        if size > limit:
            break
        files.append(path)
    if len(files) < 2:
        raise InputError(f"{folder}: the sources of Python's standard library are not there; the demo trains on them")
    return files


def train_tokenizer(files: list[Path], vocab_size: int, folder: Path) -> Tokenizer:
    """Train a byte-level BPE on `files`, and save it as transformers' AutoTokenizer and `Tokenizer` open it."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(read_documents(files), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Tokenizer(folder)
