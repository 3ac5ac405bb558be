"""`ligermodels medusa eval`, `export` and `generate-data`: what heads achieve, heads in the formats of other programs,
and the model's own words to train on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
    from ligermodels.training import Batch, HeadScores

RANKS = range(1, 11)

Base = Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a Hugging Face hub id.")]
Heads = Annotated[
    str,
    typer.Argument(
        metavar="HEADS", help="Its Medusa heads, in any of the formats that `export` writes: a folder, or a hub id."
    ),
]

Data = Annotated[
    list[Path],
    typer.Option(help="Text, or .jsonl with a text or a chat in each line, as for `train`. May be repeated."),
]
ChatTemplate = Annotated[str | None, typer.Option(help="File of a chat template.  [default: the checkpoint's]")]


def evaluate(
    base: Base,
    heads: Heads,
    data: Data,
    prompts: Annotated[int, typer.Option(min=0, help="Pieces of the text to continue, to measure the speed.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of such a piece.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to continue it by.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Candidates in the tree, which is grown from the accuracies.")] = 63,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this file, a PNG.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a row; documents are packed into rows.")] = 2048,
    chat_template: ChatTemplate = None,
    dtype: DtypeOption = None,
    device: Device = None,
    attention: Attention = "auto",
    as_json: AsJson = False,
) -> None:
    """Score heads, and measure decoding with them.

    Give text that they were not trained on. The heads are scored on it, and on the model's own continuations of pieces
    of it, which is the text they meet at work: from those accuracies the tree is grown, and tokens a step are predicted
    before they are measured.
    """
    from ligermodels.cli.plot import plot_scores, require_plotting

    if plot is not None:
        require_plotting(plot)
    place = device_named(device)

    import torch

    from ligermodels.generation import expected_tokens, grow
    from ligermodels.training import Stream, documents_of, evaluate_own_text, race

    folder = folder_of(base)
    documents = documents_of(folder, data, chat_template=chat_template)
    indices, _ = documents.corpus.split(0, seed=0)
    with progress("reading text") as update:
        batches: list[Batch] = []
        for batch in Stream(documents, indices, length=length, rows=batch_size, epochs=1):
            batches.append(batch)
            update(len(batches), len(batches))
    medusa = load_heads(load(folder, dtype, place, attention), heads)
    scores = own = _score(medusa, batches)
    if prompts:
        tokens = torch.cat([batch["input_ids"][0] for batch in batches])
        apart = max(1, len(tokens) // prompts)
        pieces = [piece[:prompt_tokens].tolist() for piece in tokens.split(apart)[:prompts]]
        text = evaluate_own_text(medusa, pieces, max_new_tokens=max_new_tokens)
        own = text.scores
    tree = grow(own.hits, nodes)
    found: dict[str, Any] = {
        "targets": scores.counts.long().tolist(),
        "losses": scores.losses.tolist(),
        "accuracies": {k: scores.accuracy(k).tolist() for k in RANKS},
        "tree": tree.paths,
        "expected_tokens_per_step": expected_tokens(tree, own.hits),
    }
    if prompts:
        found["own_accuracies"] = {k: own.accuracy(k).tolist() for k in RANKS}
        found["predicted_tokens_per_step"] = text.tokens_per_step(tree)
        with progress("generating") as update:
            outcome = race(medusa, pieces, tree=tree, max_new_tokens=max_new_tokens, progress=update)
        found["generation"] = {**asdict(outcome), "speed_up": outcome.speed_up}
    if plot is not None:
        plot_scores(plot, found)
        say(f"wrote {plot}")
    if as_json:
        print_json(found)
        return
    show_scores(scores, RANKS)
    if prompts:
        typer.echo("On the model's own continuations:")
        show_scores(own, RANKS)
    speeds = [("tokens a step, if heads err independently", f"{found['expected_tokens_per_step']:.2f}")]
    if prompts:
        speeds += [
            ("tokens a step, predicted", f"{found['predicted_tokens_per_step']:.2f}"),
            ("tokens a step, measured", f"{outcome.tokens_per_step:.2f}"),
            ("tokens/s, plain", f"{outcome.tokens / outcome.plain_seconds:.1f}"),
            ("tokens/s, Medusa", f"{outcome.tokens / outcome.medusa_seconds:.1f}"),
            ("speed-up", f"{outcome.speed_up:.2f}"),
            ("the same tokens", f"{outcome.same} of {outcome.prompts} prompts"),
        ]
    show_table(["", ""], speeds, numbers=[1])


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


def show_scores(scores: HeadScores, ranks: Sequence[int] = (1, 5)) -> None:
    """A table of losses and accuracies, one head a line."""
    columns = ["head", "token", "loss", *(f"top-{k}" for k in ranks)]
    rows = [
        (str(i), f"t+{i + 2}", f"{loss:.3f}", *(f"{scores.accuracy(k)[i]:.1%}" for k in ranks))
        for i, loss in enumerate(scores.losses.tolist())
    ]
    show_table(columns, rows, numbers=range(2, len(columns)))


def generate_data(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model: a checkpoint folder, or a hub id.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="The .jsonl file to write: data for `train`.")],
    temperature: Annotated[float, typer.Option(min=0, help="Of the draws; 0: the likeliest tokens.")] = 0.3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a continuation, or of an answer.")] = 512,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text that stay.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts and chats at once.")] = 16,
    max_bad_lines: Annotated[int, typer.Option(min=0, help="Unusable lines that are passed over.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    chat_template: ChatTemplate = None,
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

    from ligermodels.training import OwnWords, documents_of, write_own_data
    from ligermodels.training.own_data import is_begun

    folder = folder_of(base)
    documents = documents_of(folder, data, chat_template=chat_template, max_bad_lines=max_bad_lines, on_bad_line=say)
    words = OwnWords(
        load(folder, dtype, place, attention),
        documents,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        seed=seed,
    )
    count, about = len(documents.corpus), {"base": base, "chat_template": chat_template, "dtype": dtype}
    try:
        with progress("generating") as update:
            written = write_own_data(
                words, count, out, batch_size=batch_size, resume=resume, about=about, progress=update
            )
    except BaseException:
        if is_begun(out):
            say(f"{out}: not finished; what is done is kept, and --resume goes on")
        raise
    say(f"wrote {out}: {written:,} of {count:,} texts and chats")


def _score(medusa: MedusaModel, batches: Sequence[Batch]) -> HeadScores:
    from ligermodels.training import evaluate_heads

    with progress("scoring") as update:

        def counted() -> Iterator[Batch]:
            for done, batch in enumerate(batches):
                update(done, len(batches))
                yield batch

        return evaluate_heads(medusa, counted())
