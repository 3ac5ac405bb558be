"""Documents in files, read as a checkpoint needs them: by its own tokenizer, chat template and EOS."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from ligermodels.chat import ChatTemplate
from ligermodels.convert.config_json import read_json
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.corpus import Corpus, Documents
from ligermodels.training.recipe import parse_date


def documents_of(
    folder: Path,
    files: Iterable[str | os.PathLike[str]],
    *,
    chat_template: str | None = None,
    date: str | None = None,
    max_bad_lines: int = 0,
    on_bad_line: Callable[[str], object] = warnings.warn,
) -> Documents:
    """The documents in `files` by the tokenizer, chat template and EOS of the checkpoint in `folder`.

    Args:
        chat_template: the file of another template.
        date: YYYY-MM-DD, for templates that write it; by default today's.
        max_bad_lines, on_bad_line: see `Documents`.

    Raises ConfigError for what is no date, and as `Corpus` and `Tokenizer`.
    """
    now = parse_date(date) if date is not None else datetime.now()

    def template() -> ChatTemplate:
        found = ChatTemplate.from_folder(folder, chat_template)
        found.now = now
        return found

    eos = read_json(folder / "config.json").get("eos_token_id")
    return Documents(
        Corpus(files),
        Tokenizer(folder),
        template,
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
        max_bad_lines=max_bad_lines,
        on_bad_line=on_bad_line,
    )
