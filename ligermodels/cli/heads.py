"""`ligermodels medusa export` and `generate-data`: heads in the formats of other programs, and the model's own words to
train on."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ligermodels.cli.options import (
    Attention,
    Device,
    DtypeOption,
    Overwrite,
    device_named,
    folder_of,
    load,
    load_heads,
    require_free,
)
from ligermodels.console import progress, say
from ligermodels.errors import InputError

Base = Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a Hugging Face hub id.")]
Heads = Annotated[
    str,
    typer.Argument(
        metavar="HEADS", help="Its Medusa heads, in any of the formats that `export` writes: a folder, or a hub id."
    ),
]

DATA = typer.Option(
    "--data", help="Text, or .jsonl with a text or a chat in each line, as for `train`. May be repeated."
)
ChatTemplate = Annotated[str | None, typer.Option(help="File of a chat template.  [default: the checkpoint's]")]
Date = Annotated[
    str | None, typer.Option(help="YYYY-MM-DD, for templates that write it.  [default: that of the start]")
]


def export(
    base: Base,
    heads: Heads,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    profile: Annotated[
        str,
        typer.Option(
            help="Format: vllm, vllm-shared (one lm_head for all heads), tgi, tgi-v2 (the model's lm_head), "
            "tensorrt-llm, fasterdecoding, or full-hf (the model's checkpoint with the heads in it)."
        ),
    ] = "vllm",
    base_model: Annotated[
        str | None, typer.Option(help="Name of the model for formats that hold it.  [default: BASE]")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of full-hf: the largest weight file, as 5GB or 500MB.")] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write heads in the format of another program.

    They are read in any of these formats, so this converts between all of them.
    """
    from ligermodels.convert.medusa_profiles import profile_named

    profile_named(profile)
    require_free(out, overwrite)
    medusa = load_heads(load(base, None, "cpu"), heads)
    medusa.export(out, profile, base_model=base_model or base, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")


def generate_data(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.")],
    data: Annotated[list[Path], DATA],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write: data for `train`.")],
    temperature: Annotated[float, typer.Option(min=0, help="Of the draws; 0: the likeliest tokens.")] = 0.3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a continuation, or of an answer.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text that stay.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts and chats at once.")] = 16,
    max_bad_lines: Annotated[int, typer.Option(min=0, help="Unusable lines that are passed over.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    chat_template: ChatTemplate = None,
    date: Date = None,
    dtype: DtypeOption = None,
    device: Device = None,
    attention: Attention = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from where it was stopped, or killed, if it was.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Let the model write its own training data, for self-distillation.

    It continues the beginning of each text; in a chat it says all that the assistant does. It may be stopped at any
    moment: the same command with --resume goes on.
    """
    if out.suffix != ".jsonl":
        raise InputError(f"{out}: lines of JSON are written; give a name that ends in .jsonl")
    if out.exists() and not overwrite:
        if resume:
            say(f"{out}: is there already, and whole")
            return
        raise InputError(f"{out}: is there already; give another name, or --overwrite")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: its folder is not there")
    place = device_named(device)

    from ligermodels.training import OwnWords, Recipe, documents_of, write_own_data
    from ligermodels.training.own_data import begun_with, is_begun
    from ligermodels.training.resume import content_of

    if is_begun(out) and not (resume or overwrite):
        raise InputError(f"{out}: is begun; --resume goes on with it, --overwrite removes what is done and begins anew")
    folder = folder_of(base)
    date = date or (begun_with(out, "date") if resume else None) or datetime.now().date().isoformat()
    documents = documents_of(
        folder, data, chat_template=chat_template, date=date, max_bad_lines=max_bad_lines, on_bad_line=say
    )
    content = content_of(Recipe(data=tuple(map(str, data)), chat_template=chat_template), folder)
    words = OwnWords(
        load(folder, dtype, place, attention),
        documents,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        seed=seed,
    )
    count = len(documents.corpus)
    try:
        with progress("generating") as update:
            written = write_own_data(
                words,
                count,
                out,
                batch_size=batch_size,
                resume=resume,
                content=content,
                about={"dtype": dtype, "date": date},
                progress=update,
            )
    except BaseException:
        if is_begun(out):
            say(f"{out}: not finished; what is done is kept, and --resume goes on")
        raise
    say(f"wrote {out}: {written:,} of {count:,} texts and chats")
