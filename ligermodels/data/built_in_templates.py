"""Chat templates by name, for base models, in the package's folder chat_templates/."""

from __future__ import annotations

from pathlib import Path

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
