"""New special tokens for a chat template: a tokenizer with them, and a checkpoint with rows for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import CODE_CONFIGS, PROCESSORS, code_of, tokenizer_files
from ligermodels.convert.input_files import is_present
from ligermodels.convert.more_rows import MULTIPLE, config_for, write_more_rows, zero_rows
from ligermodels.data import fingerprint
from ligermodels.data.built_in_templates import TOKENS
from ligermodels.data.converted import cached
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError

GENERATION = "generation_config.json"


def untrained_tokens(vocab_size: int, tokenizer: Path, weights: Path, template: str | None) -> list[str]:
    """The special tokens of a built-in chat template whose embeddings are zero, such as those of Llama 3's base models.

    Args:
        vocab_size: number of rows of the embeddings.
        tokenizer: folder of the tokenizer, which has the tokens.
        weights: folder of the weights.
        template: name of the template; any other text, and None, has no tokens.
    """
    if not (tokens := TOKENS.get(template or "")):
        return []
    backend = Tokenizer(tokenizer).backend
    ids = {id: token for token in tokens if (id := backend.token_to_id(token)) is not None}
    return [ids[row] for row in zero_rows(weights, vocab_size, ids)]


def with_tokens(
    config: Path, tokenizer: Path, weights: Path | None, tokens: Sequence[str], multiple: int = MULTIPLE
) -> Path:
    """A folder in the cache with a copy of a checkpoint that has new special tokens.

    Only files that differ are written; the others are links. Each new row of the embeddings and the LM head is the mean
    of the old tokens' rows.

    Args:
        config: path of config.json.
        tokenizer: folder of the tokenizer files.
        weights: folder of the weights; None leaves them out.
        tokens: texts of the new tokens.
        multiple: a larger vocabulary is rounded up to a multiple of this number.

    Returns:
        The folder, with config.json, the tokenizer and the weights.

    Raises:
        ConfigError: embeddings of this model cannot be resized.
        CheckpointError: files are missing or damaged, or the embeddings are quantised.
        InputError: the cache cannot be written.
    """
    files = fingerprint.of_checkpoint(config, tokenizer, weights)

    def write(target: Path) -> None:
        target.mkdir()
        used, size = _write_tokenizer(tokenizer, target, tokens)
        fields, vocab_size, new_size = config_for(config, size, multiple)
        _write_json(target / "config.json", fields)
        if weights is not None:
            size = new_size if new_size > vocab_size else size
            write_more_rows(weights, target, used=used, size=size, vocab_size=vocab_size)
        for name in (GENERATION, *PROCESSORS, *code_of(config.parent, CODE_CONFIGS)):
            # The tokenizer's modules are there already.
            if is_present(config.parent / name, CheckpointError) and not (target / name).exists():
                (target / name).symlink_to((config.parent / name).resolve())

    key = json.dumps([str(config.parent.absolute()), files, list(tokens), multiple])
    return cached("checkpoints", key, config.parent.name, write)


def _write_tokenizer(folder: Path, target: Path, tokens: Sequence[str]) -> tuple[int, int]:
    """Write a tokenizer with new tokens. Returns its number of ids without and with them."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    used = max(backend.get_vocab().values()) + 1
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens])
    ids = {token: backend.get_vocab()[token] for token in tokens}
    for name, path in tokenizer_files(folder).items():
        written = target / name
        written.parent.mkdir(exist_ok=True)
        if name == "tokenizer.json":
            backend.save(str(written))
        elif name == "added_tokens.json":
            _write_json(written, {**read_json(path), **ids})
        elif name == "tokenizer_config.json":
            _write_json(written, _with_added(read_json(path), ids))
        else:
            written.symlink_to(path.resolve())
    return used, max(backend.get_vocab().values()) + 1


def _with_added(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """tokenizer_config.json with the new tokens, if it lists added tokens."""
    if "added_tokens_decoder" not in config:
        return config
    fields = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(id): {"content": token, **fields} for token, id in ids.items()}
    return {**config, "added_tokens_decoder": {**config["added_tokens_decoder"], **added}}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
