"""`self-distillation-data` of the commands of draft heads."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from ligermodels.cli import options
from ligermodels.cli.options import DATA, Base, ChatTemplate, Date
from ligermodels.console import progress, say
from ligermodels.errors import InputError

BYTES_PER_TOKEN = 4
"""Bytes per token of usual text, approximately."""


def self_distillation_data(
    base: Base,
    data: Annotated[list[Path], DATA],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write: data for `train`.")],
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0: greedy decoding.")] = 0.3,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most new tokens per text, and per answer in a chat.")
    ] = 2048,
    truncated: Annotated[
        Literal["keep", "drop"],
        typer.Option(
            help="Answers in chats that do not end within --max-new-tokens: keep them without their end, or drop them, "
            "which biases the data to short answers."
        ),
    ] = "keep",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text to keep as the prompt.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts and chats per batch.")] = 16,
    max_bad_lines: Annotated[int, typer.Option(min=0, help="Unusable lines that are skipped.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chat_template: ChatTemplate = None,
    date: Date = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    attention: options.Attention = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Continue where it was stopped or killed.")] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Generate self-distillation data: the model's own continuations.

    The model continues the beginning of each text, and of each piece of a long one, and writes every turn of the
    assistant in a chat. The command may be stopped at any time; the same command with --resume continues.
    """
    if out.suffix != ".jsonl":
        raise InputError(f"{out}: the output is JSON lines; give a name that ends in .jsonl")
    if out.exists() and not overwrite:
        if resume:
            say(f"{out}: exists already and is complete")
            return
        raise InputError(f"{out}: exists already; give another name, or --overwrite")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: its folder does not exist")
    options.device_named(device)

    from ligermodels.data.corpus import PIECE
    from ligermodels.training import MedusaRecipe
    from ligermodels.training.base import Base
    from ligermodels.training.inputs import content_of, documents_of
    from ligermodels.training.self_distillation import (
        SelfDistillation,
        interrupted_with,
        is_interrupted,
        write_self_distillation_data,
    )

    _check_interrupted(is_interrupted(out), out, resume=resume, overwrite=overwrite)
    folder = options.folder_of(base)
    checkpoint = Base.of_checkpoint(folder)
    date = date or (interrupted_with(out, "date") if resume else None) or datetime.now().date().isoformat()
    recipe = MedusaRecipe(data=data, chat_template=chat_template, date=date, max_bad_lines=max_bad_lines)
    # Each piece of a long text is continued; it is about as long as its prompt and continuation.
    piece = min(PIECE, BYTES_PER_TOKEN * (prompt_tokens + max_new_tokens))
    documents = documents_of(recipe, checkpoint, say, piece=piece)
    content = content_of(recipe, checkpoint)
    source = SelfDistillation(
        options.Loading(dtype, device, attention).load(folder),
        documents,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        seed=seed,
        truncated=truncated,
    )
    count = len(documents.corpus)
    try:
        with progress("generating") as update:
            written = write_self_distillation_data(
                source,
                count,
                out,
                batch_size=batch_size,
                resume=resume,
                content=content,
                about={"dtype": dtype, "date": date},
                progress=update,
            )
    except BaseException:
        if is_interrupted(out):
            say(f"{out}: not finished; --resume continues")
        raise
    say(f"wrote {out}: {written:,} of {count:,} texts and chats")
    if source.num_cut:
        done = {"keep": "are kept without their end", "drop": "are left out"}[truncated]
        say(f"{source.num_cut:,} answers have more than {max_new_tokens:,} tokens (--max-new-tokens) and {done}")


def _check_interrupted(is_interrupted: bool, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise InputError for an interrupted call that is neither resumed nor replaced; say if there is none to resume."""
    if is_interrupted and not (resume or overwrite):
        raise InputError(f"{out}: was interrupted; --resume continues it, --overwrite starts over")
    if resume and not is_interrupted:
        say(f"{out}: there is nothing to resume; it is written from its first record")
