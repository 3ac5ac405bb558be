"""`ligermodels medusa train | eval | export`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli.options import (
    AsJson,
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
from ligermodels.console import print_json, progress, say, show_table
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.archs.medusa import MedusaModel
    from ligermodels.training import Batch, HeadScores, Rows

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Base = Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a Hugging Face hub id.")]
Heads = Annotated[Path, typer.Argument(metavar="HEADS", help="Folder of its Medusa heads.")]
Data = Annotated[list[Path], typer.Option(help='Text, or .jsonl with a "text" in each line. May be repeated.')]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a batch.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens in a row; documents are packed into rows.")]


ALL_RANKS = range(1, 11)


class LMHeads(str, Enum):
    """What a head projects with."""

    own = "own"
    shared = "shared"


@app.command()
def train(
    base: Base,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder to write the heads to.")],
    heads: Annotated[int, typer.Option(min=1, help="Tokens to guess beyond the next one.")] = 5,
    layers: Annotated[int, typer.Option(min=1, help="ResBlocks in a head.")] = 1,
    lm_head: Annotated[
        LMHeads, typer.Option(help="An lm_head for each head, or the model's own, untouched.")
    ] = LMHeads.own,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.  [default: once through the data]")] = None,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 5e-4,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps to reach it.  [default: 40, or a tenth of the steps if fewer]")
    ] = None,
    decay: Annotated[float, typer.Option(min=0, help="Head i's loss counts decay ** i.")] = 0.8,
    batch_size: BatchSize = 8,
    length: Length = 2048,
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the documents kept for the scores; 0: none.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Decides what is held out, and the order of the rest.")] = 0,
    dtype: DtypeOption = None,
    device: Device = None,
    attention: Attention = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Train heads on a frozen model.

    At the end they are scored on held-out documents.
    """
    require_free(out, overwrite)
    place = device_named(device)

    from ligermodels.archs.medusa import MedusaModel
    from ligermodels.training import StepMetrics, adamw, batches, hold_out, pack, warmup_cosine
    from ligermodels.training import train as run

    folder = folder_of(base)
    documents, held = _documents(folder, data), list[list[int]]()
    if held_out:
        if len(documents) < 2:
            raise InputError("the data is a single document, of which none can be held out: give more, or --held-out 0")
        documents, held = hold_out(documents, held_out, seed=seed)
    model = load(folder, dtype, place, attention)
    medusa = MedusaModel.from_base(model, heads, layers, lm_head.value, decay)
    rows = pack(documents, length)
    steps = steps or -(-len(rows) // batch_size)
    say(f"{len(documents):,} documents, {len(rows.tokens):,} tokens; {steps:,} steps of {batch_size} x {length} tokens")

    optimizer = adamw(medusa.head_parameters(), lr, weight_decay=0.0)
    schedule = warmup_cosine(optimizer, steps, warmup=min(40, steps // 10) if warmup is None else warmup)
    with progress("training") as update:

        def report(state: StepMetrics) -> None:
            update(state.step, state.steps, f"loss {state.loss:.4f}, {state.tokens_per_second:,.0f} tokens/s")

        source = batches(rows, batch_size, seed=seed)
        run(
            medusa,
            source,
            steps=steps,
            optimizer=optimizer,
            schedule=schedule,
            on_step=report,
            report_every=max(1, steps // 50),
        )
    medusa.save_pretrained(out, overwrite=overwrite)
    say(f"wrote {out}")
    if held:
        _show(_score(medusa, pack(held, length), batch_size))


@app.command(name="eval")
def evaluate(
    base: Base,
    heads: Heads,
    data: Data,
    prompts: Annotated[int, typer.Option(min=0, help="Pieces of the text to continue, to measure the speed.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of such a piece.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to continue it by.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Candidates in the tree, which is grown from the accuracies.")] = 63,
    batch_size: BatchSize = 8,
    length: Length = 2048,
    dtype: DtypeOption = None,
    device: Device = None,
    attention: Attention = "auto",
    as_json: AsJson = False,
) -> None:
    """Score heads, and measure decoding with them.

    Give text that they were not trained on.
    """
    place = device_named(device)

    from ligermodels.generation import expected_tokens, grow
    from ligermodels.training import pack, race

    folder = folder_of(base)
    rows = pack(_documents(folder, data), length)
    medusa = load_heads(load(folder, dtype, place, attention), heads)
    scores = _score(medusa, rows, batch_size)
    tree = grow(scores.hits, nodes)
    found: dict[str, Any] = {
        "targets": scores.counts.long().tolist(),
        "losses": scores.losses.tolist(),
        "accuracies": {k: scores.accuracy(k).tolist() for k in ALL_RANKS},
        "tree_nodes": len(tree.paths),
        "expected_tokens_per_step": expected_tokens(tree, scores.hits),
    }
    if prompts:
        apart = max(1, len(rows.tokens) // prompts)
        pieces = [piece[:prompt_tokens].tolist() for piece in rows.tokens.split(apart)[:prompts]]
        with progress("generating") as update:
            outcome = race(medusa, pieces, tree=tree, max_new_tokens=max_new_tokens, progress=update)
        found["generation"] = asdict(outcome)
    if as_json:
        print_json(found)
        return
    _show(scores, ALL_RANKS)
    speeds = [("tokens a step, expected", f"{found['expected_tokens_per_step']:.2f}")]
    if prompts:
        speeds += [
            ("tokens a step, measured", f"{outcome.tokens_per_step:.2f}"),
            ("tokens/s, plain", f"{outcome.tokens / outcome.plain_seconds:.1f}"),
            ("tokens/s, Medusa", f"{outcome.tokens / outcome.medusa_seconds:.1f}"),
            ("the same tokens", f"{outcome.same} of {outcome.prompts} prompts"),
        ]
    show_table(["", ""], speeds, numbers=[1])


@app.command()
def export(
    base: Base,
    heads: Heads,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    profile: Annotated[str, typer.Option(help="Format: vllm, or vllm-shared (one lm_head for all heads).")] = "vllm",
    overwrite: Overwrite = False,
) -> None:
    """Write heads in the format of another program."""
    require_free(out, overwrite)
    load_heads(load(base, None, "cpu"), heads).export(out, profile, overwrite=overwrite)
    say(f"wrote {out}")


def _documents(folder: Path, files: Sequence[Path]) -> list[list[int]]:
    """Token ids of the documents in `files`, by the tokenizer of the checkpoint in `folder`, an EOS after each."""
    from ligermodels.convert.config_json import read_json
    from ligermodels.tokenizer import Tokenizer
    from ligermodels.training import encode, read_documents

    tokenizer = Tokenizer(folder)
    texts = list(read_documents(files))
    eos = read_json(folder / "config.json").get("eos_token_id")
    found = []
    with progress("reading text") as update:
        for ids in encode(texts, tokenizer, eos_token_id=eos[0] if isinstance(eos, list) else eos):
            found.append(ids)
            update(len(found), len(texts))
    return found


def _score(medusa: MedusaModel, rows: Rows, batch_size: int) -> HeadScores:
    from ligermodels.training import batches, evaluate_heads

    total = -(-len(rows) // batch_size)
    with progress("scoring") as update:

        def counted() -> Iterator[Batch]:
            for done, batch in enumerate(batches(rows, batch_size, epochs=1)):
                update(done, total)
                yield batch

        return evaluate_heads(medusa, counted())


def _show(scores: HeadScores, ranks: Sequence[int] = (1, 5)) -> None:
    columns = ["head", "token", "loss", *(f"top-{k}" for k in ranks)]
    rows = [
        (str(i), f"t+{i + 2}", f"{loss:.3f}", *(f"{scores.accuracy(k)[i]:.1%}" for k in ranks))
        for i, loss in enumerate(scores.losses.tolist())
    ]
    show_table(columns, rows, numbers=range(2, len(columns)))
