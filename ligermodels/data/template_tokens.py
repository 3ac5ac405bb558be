"""Special tokens of the built-in chat templates that a tokenizer lacks."""

from __future__ import annotations

from pathlib import Path

from ligermodels.convert.input_files import is_present
from ligermodels.data.built_in_templates import TOKENS
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError


def missing_tokens(tokenizer: Path, template: str | None) -> list[str]:
    """The special tokens of a chat template that the tokenizer in a folder does not have.

    Args:
        tokenizer: the folder.
        template: name of a built-in template; any other text, and None, has no tokens.
    """
    if not (tokens := TOKENS.get(template or "")):
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
