"""The chat templates and the special tokens in the files of a checkpoint, and those that a tokenizer lacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.convert.files import chat_templates
from ligermodels.convert.input_files import as_path, is_present, read_json_object, read_text, shown
from ligermodels.data.built_in_templates import TOKENS as BUILT_IN
from ligermodels.data.built_in_templates import template_file
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, ConfigError, short

TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens in templates."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: transformers uses the second for chats with tools, and the first for other chats."""


class Source(NamedTuple):
    """A jinja2 template, and its place for messages."""

    place: str
    text: str


def read_templates(folder: Path, file: str | os.PathLike[str] | None = None) -> dict[str, Source]:
    """Name -> chat template of a checkpoint, read as transformers does.

    Templates are in chat_template.jinja ("default") and additional_chat_templates/NAME.jinja; or else in the field
    `chat_template`, a text or a list of texts with names, of tokenizer_config.json or chat_template.json.

    Args:
        folder: local folder of the checkpoint.
        file: path of another template, or name of a built-in one, to use instead of the checkpoint's.

    Raises:
        CheckpointError: there is no template, or a file cannot be read.
    """
    if file is not None:
        path = template_file(str(as_path(file, CheckpointError, "the file of the chat template")))
        return {DEFAULT: Source(str(path), read_text(path, CheckpointError))}
    files = {Path(name).stem: folder / name for name in chat_templates(folder)}
    if is_present(folder / "chat_template.jinja", CheckpointError):
        files[DEFAULT] = folder / "chat_template.jinja"
    sources = {name: Source(str(path), read_text(path, CheckpointError)) for name, path in files.items()}
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        if not sources and is_present(path, CheckpointError):
            sources = _named(_read(path).get("chat_template"), f"{path}: chat_template")
    if not sources:
        raise CheckpointError(
            f"{shown(folder)}: has no chat template (base models have none): give --chat-template (in Python "
            f"chat_template), a file or a name: "
            f"{', '.join(BUILT_IN)}"
        )
    if not {DEFAULT, TOOL_USE} & sources.keys():
        raise CheckpointError(f"{shown(folder)}: chat templates: none is named 'default', only {short(list(sources))}")
    return sources


def read_tokens(folder: Path) -> dict[str, str]:
    """Name -> text of the special tokens of a checkpoint, variables of its chat templates."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = _read(folder / name) if is_present(folder / name, CheckpointError) else {}
        texts = {key: token_text(config.get(key)) for key in TOKENS}
        tokens |= {key: text for key, text in texts.items() if text is not None}
    return tokens


def _read(path: Path) -> dict[str, Any]:
    return read_json_object(path, ConfigError)


def _named(field: Any, place: str) -> dict[str, Source]:
    """Name -> template in a field `chat_template`: null, a text, or a list of objects with `name` and `template`."""
    entries = field if isinstance(field, list) else [{"name": DEFAULT, "template": field}] if field is not None else []
    sources = {}
    for entry in entries:
        template = entry.get("template") if isinstance(entry, Mapping) else None
        if not isinstance(template, str):
            raise CheckpointError(f"{place}: must be text, got {short(template)}")
        sources[str(entry.get("name"))] = Source(place, template)
    return sources


def token_text(value: Any) -> str | None:
    """The text of a special token, in the form of a text or of an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def missing_tokens(tokenizer: Path, template: str | None) -> list[str]:
    """The special tokens of a built-in chat template that a folder's tokenizer does not have; none for another text."""
    if not (tokens := BUILT_IN.get(template or "")):
        return []
    backend = Tokenizer(tokenizer).backend
    return [token for token in tokens if backend.token_to_id(token) is None]


def require_tokens(tokenizer: Path, template: str) -> None:
    """Raise CheckpointError if the tokenizer in a folder lacks special tokens of a built-in chat template."""
    if is_present(tokenizer / "tokenizer.json", CheckpointError) and (missing := missing_tokens(tokenizer, template)):
        raise CheckpointError(
            f"{tokenizer}: the tokenizer lacks {', '.join(missing)} of the chat template {template}; "
            "`ligermodels train --chat-template` adds them"
        )
