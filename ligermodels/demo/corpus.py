"""Data of the demo: Python's own sources, which every machine has, and a tokenizer trained on them."""

from __future__ import annotations

import builtins
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import InputError
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.models.causal_lm import CausalLM

END = "<|endoftext|>"
TOKENIZER_BYTES = 10_000_000
"""Number of characters that the tokenizer of the demo is trained on, at most."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:\n{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def python_sources(limit: int) -> list[Path]:
    """The modules of Python's standard library, by name, up to `limit` bytes in all."""
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


def installed_sources(limit: int) -> list[Path]:
    """The modules of Python's standard library and of installed packages, up to `limit` bytes in all: files of 1 KB to
    500 KB, in an order that mixes the packages. Of equal files (packages have copies of others) only the first is
    taken, so that no file of the validation split is in the training data too."""
    folders = dict.fromkeys(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib"))
    sizes = {path.resolve(): path.stat().st_size for folder in folders for path in folder.rglob("*.py")}
    usable = [path for path, size in sizes.items() if 1e3 <= size <= 5e5]
    files: dict[bytes, Path] = {}
    total = 0
    for path in sorted(usable, key=lambda path: (hashlib.sha256(path.name.encode()).digest(), path)):
        digest = hashlib.sha256(path.read_bytes()).digest()
        total += 0 if digest in files else sizes[path]
        if total > limit:
            break
        files.setdefault(digest, path)
    return list(files.values())


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train a byte-level BPE and save it to `folder`, for `Tokenizer` and transformers' AutoTokenizer.

    Args:
        texts: the texts.
        vocab_size: number of tokens.
        folder: the folder to write to; it is made if it does not exist.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return Tokenizer(folder)


def write_pieces(path: Path, texts: Iterable[str], piece: int) -> None:
    """Write texts to the .jsonl file `path`, cut into pieces of `piece` characters."""
    pieces = (text[start : start + piece] for text in texts for start in range(0, len(text), piece))
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in pieces), encoding="utf-8")


def equally_spaced(documents: Sequence[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, spread evenly over documents (token ids)."""
    starts = [(ids, start) for ids in documents for start in range(len(ids) - length)]
    distance = max(1, len(starts) // count)
    return [list(ids[start : start + length]) for ids, start in starts[::distance][:count]]


def first_texts(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first texts, up to `limit` characters in all."""
    for text in texts:
        limit -= len(text)
        if limit < 0:
            return
        yield text


QUESTIONS = ("What is {}?", "Describe {}.", "Tell me about {}.")
ASKED = 8
"""Number of names that the model is asked about."""


def descriptions() -> dict[str, str]:
    """Built-in name -> the first sentence of its documentation, where no other name has the same sentence."""
    sentences: dict[str, str] = {}
    for name, value in sorted(vars(builtins).items()):
        text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        sentence = re.match(r"[\x20-\x7e]{10,80}?\.(?=\s|$)", text)
        if callable(value) and not name.startswith("_") and sentence and sentence[0] not in sentences.values():
            sentences[name] = sentence[0]
    return sentences


def write_chats(path: Path, sentences: Mapping[str, str]) -> None:
    """Write a .jsonl file with a chat for each question about each name."""
    chats = (
        [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": answer}]
        for name, answer in sentences.items()
        for question in QUESTIONS
    )
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def right_answers(model: CausalLM, tokenizer: Tokenizer, template: ChatTemplate, sentences: Mapping[str, str]) -> int:
    """The number of questions, of ASKED, that a model answers word for word.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        template: its chat template.
        sentences: name -> right answer.
    """
    names = list(sentences)[:: max(1, len(sentences) // ASKED)][:ASKED]
    questions = [[{"role": "user", "content": QUESTIONS[0].format(name)}] for name in names]
    prompts = [
        tokenizer.encode_with_offsets(template.render(question, add_generation_prompt=True))[0]
        for question in questions
    ]
    ends = as_eos_ids(model.generation_defaults().get("eos_token_id"))
    rows = model.generate(prompts, 48, do_sample=False)[:, max(map(len, prompts)) :].tolist()
    answers = [tokenizer.decode(until_eos(row, ends)).strip() for row in rows]
    return sum(answer == sentences[name] for name, answer in zip(names, answers, strict=True))
