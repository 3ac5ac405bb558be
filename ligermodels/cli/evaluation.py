"""`ligermodels medusa eval`: what heads achieve, on text and at work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli.heads import DATA, Base, ChatTemplate, Date, Heads
from ligermodels.cli.options import AsJson, Attention, Device, DtypeOption, device_named, folder_of, load, load_heads
from ligermodels.console import Update, print_json, progress, say, show_table
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.training import Batch, Documents, HeadScores, Stream
    from ligermodels.training.corpus import Indices

RANKS = range(1, 11)


def evaluate(
    base: Base,
    heads: Heads,
    data: Annotated[list[Path] | None, DATA] = None,
    held_out_of: Annotated[
        Path | None,
        typer.Option(
            help="The folder of a `train` run, for what it held out; --data, if given, is where its data lie now."
        ),
    ] = None,
    prompts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Texts and chats to continue: from half of them the tree is grown and the tokens a step predicted, "
            "on the other half they are measured; 0: only score.",
        ),
    ] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text to start from.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to continue it by.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Candidates in the tree, which is grown from the accuracies.")] = 63,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this file, a PNG.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 8,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a row; documents are packed into rows.  [default: 2048]")
    ] = None,
    max_bad_lines: Annotated[
        int | None, typer.Option(min=0, help="Unusable lines that are passed over.  [default: 0]")
    ] = None,
    chat_template: ChatTemplate = None,
    date: Date = None,
    dtype: DtypeOption = None,
    device: Device = None,
    attention: Attention = "auto",
    as_json: AsJson = False,
) -> None:
    """Score heads, and measure decoding with them.

    Give text that they were not trained on. The heads are scored on it, and on the model's own continuations, which is
    the text they meet at work: of the beginnings of texts, or of pieces of long ones, and of chats up to the
    assistant's first turn. From half of these the tree is grown, and tokens a step are predicted; they are then
    measured on the other half. With --held-out-of, what is not given here is as it was in the run.
    """
    from ligermodels.cli.plot import plot_scores, require_plotting

    if not data and held_out_of is None:
        raise typer.BadParameter("give one of the two, or both", param_hint="--data or --held-out-of")
    if prompts == 1:
        raise typer.BadParameter("give 2 or more, or 0 only to score", param_hint="--prompts")
    if plot is not None:
        require_plotting(plot)
    place = device_named(device)

    from ligermodels.generation import expected_tokens, grow
    from ligermodels.training import Stream, evaluate_heads, opening_prompts, trial

    folder = folder_of(base)
    given = {"max_bad_lines": max_bad_lines, "chat_template": chat_template, "date": date}
    documents, indices, rows_of = _documents(folder, data or [], held_out_of, given)
    pieces = opening_prompts(documents, indices, prompts, prompt_tokens=prompt_tokens)
    if prompts and len(pieces) < 2:
        raise InputError("there are no two texts or chats to continue: give more, or --prompts 0, which only scores")
    medusa = load_heads(load(folder, dtype, place, attention), heads)
    with progress("scoring") as update:
        stream = Stream(documents, indices, length=length or rows_of, rows=batch_size, epochs=1)
        scores = own = evaluate_heads(medusa, _counted(stream, update))
    found: dict[str, Any] = {
        "targets": scores.counts.long().tolist(),
        "losses": scores.losses.tolist(),
        "accuracies": {k: scores.accuracy(k).tolist() for k in RANKS},
    }
    if pieces:
        with progress("generating") as update:
            tried = trial(medusa, pieces, nodes=nodes, max_new_tokens=max_new_tokens, progress=update)
        tree, own = tried.tree, tried.own.scores
        found["own_accuracies"] = {k: own.accuracy(k).tolist() for k in RANKS}
        found["predicted_tokens_per_step"] = tried.predicted
        found["generation"] = {**asdict(tried.race), "speed_up": tried.race.speed_up}
    else:
        tree = grow(own.hits, nodes)
    found |= {"tree": tree.paths, "expected_tokens_per_step": expected_tokens(tree, own.hits)}
    if plot is not None:
        plot_scores(plot, found)
        say(f"wrote {plot}")
    if as_json:
        print_json(found)
        return
    show_scores(scores, RANKS)
    speeds = [("tokens a step, if heads err independently", f"{found['expected_tokens_per_step']:.2f}")]
    if pieces:
        typer.echo(f"On the model's own continuations of {len(tried.own.lengths)} prompts:")
        show_scores(own, RANKS)
        outcome = tried.race
        speeds += [
            ("tokens a step, predicted from these", _number(tried.predicted)),
            (f"tokens a step, measured on {outcome.prompts} others", _number(outcome.tokens_per_step)),
            ("tokens/s, plain", f"{outcome.tokens / outcome.plain_seconds:.1f}"),
            ("tokens/s, Medusa", f"{outcome.tokens / outcome.medusa_seconds:.1f}"),
            ("speed-up", f"{outcome.speed_up:.2f}"),
            ("the same tokens", f"{outcome.same} of {outcome.prompts} prompts"),
        ]
    show_table(["", ""], speeds, numbers=[1])


def show_scores(scores: HeadScores, ranks: Sequence[int] = (1, 5)) -> None:
    """A table of losses and accuracies, one head a line."""
    columns = ["head", "token", "loss", *(f"top-{k}" for k in ranks)]
    rows = [
        (str(i), f"t+{i + 2}", f"{loss:.3f}", *(f"{scores.accuracy(k)[i]:.1%}" for k in ranks))
        for i, loss in enumerate(scores.losses.tolist())
    ]
    show_table(columns, rows, numbers=range(2, len(columns)))


def _number(value: float) -> str:
    """Two places; a dash for nan, which there is when no step was taken."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def _documents(
    folder: Path, data: Sequence[Path], run: Path | None, given: Mapping[str, Any]
) -> tuple[Documents, Indices, int]:
    """The documents in `data`, or in that of a `run`; which of them to score; and the length of their rows.

    Beside a run, `data` are where its own lie now. `given` are settings that are not the run's. Raises InputError when
    the run held nothing out, or the data are not what it had, so that it cannot be told what it has not learned from.
    """
    from ligermodels.training import Recipe, documents_of, read_recipe
    from ligermodels.training.folder import RECIPE, read_content
    from ligermodels.training.resume import data_content, require_same_content

    recipe = Recipe() if run is None else read_recipe(run / RECIPE)
    changes = {name: value for name, value in given.items() if value is not None}
    recipe = recipe.changed(changes | ({"data": tuple(data)} if data else {}), "the command line")
    if run is not None:
        before = read_content(run)
        require_same_content({**before, "data": data_content(recipe)}, before)
    documents = documents_of(
        folder,
        recipe.data,
        chat_template=recipe.chat_template,
        date=recipe.date,
        max_bad_lines=recipe.max_bad_lines,
        on_bad_line=say,
    )
    if run is None:
        return documents, documents.corpus.split(0, seed=0)[0], recipe.length
    held = documents.corpus.split(recipe.held_out, recipe.seed)[1]
    if not len(held):
        raise InputError(f"{run}: held nothing out (held_out is {recipe.held_out:g}); give other data")
    return documents, held, recipe.length


def _counted(stream: Stream, update: Update) -> Iterator[Batch]:
    """The batches of `stream`, once through; the bar counts documents."""
    for batch in stream:
        at = stream.state_dict()
        update(at["documents"] if at["epoch"] else at["place"], at["documents"])
        yield batch
