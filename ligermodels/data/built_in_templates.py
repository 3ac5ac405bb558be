"""Chat templates by name, for base models, in the package's folder chat_templates/."""

from __future__ import annotations

from pathlib import Path

from ligermodels.convert.input_files import is_present
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError

FOLDER = Path(__file__).parent / "chat_templates"

IM = ("<|im_start|>", "<|im_end|>")

TOKENS: dict[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": IM,
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (),
    "phi": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "qwen": IM,
    "zephyr": (),
}
"""Name of a template -> special tokens that it writes, besides BOS and EOS. A tokenizer without them gets them."""


def template_file(name_or_path: str) -> Path:
    """The file of the chat template with this name, or at this path."""
    return FOLDER / f"{name_or_path}.jinja" if name_or_path in TOKENS else Path(name_or_path)


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
