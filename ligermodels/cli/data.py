"""`ligermodels data`: the tokens of documents that are trained on, and counts over the data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from ligermodels.cli.flags import with_recipe_flags
from ligermodels.cli.options import AsJson
from ligermodels.console import console, print_json, progress, say, show_table
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe

if TYPE_CHECKING:
    from ligermodels.data.documents import Documents
    from ligermodels.data.survey import Span

OPEN, CLOSE = "⟦", "⟧"
"""Marks of the tokens that are trained on, off a terminal."""
ANY_NUMBER = 2**31
"""Unusable lines that are skipped without --max-bad-lines."""
MESSAGES = 20
"""Most messages about single documents."""
SETTINGS = (
    "objective", "chat_template", "tokenizer", "date", "seq_len", "packing_strategy", "excess_length_strategy",
    "max_completion_length",
)  # fmt: skip
"""Settings of a recipe that decide which tokens are trained on."""


@with_recipe_flags(FineTuningRecipe, only=SETTINGS)
def data(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files, folders, globs, or hf:owner/name, as for `train --data`."),
    ],
    model: Annotated[
        str, typer.Option(help="Checkpoint folder or hub id, for its tokenizer and chat template; no weights are read.")
    ],
    documents: Annotated[int, typer.Option(min=0, help="Documents to show.")] = 3,
    max_bad_lines: Annotated[
        int | None, typer.Option(min=0, help="Unusable lines that are skipped and counted.  [default: any number]")
    ] = None,
    as_json: AsJson = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Show which tokens of data are trained on, and counts of documents, tokens and lengths.

    The data is read as `train` reads it; preference data with the `--objective` that it is for. On a terminal, the
    tokens that are trained on are green; elsewhere they are between ⟦ and ⟧.
    """
    import numpy as np

    from ligermodels.convert import hub
    from ligermodels.data.survey import survey
    from ligermodels.training.base import Base
    from ligermodels.training.inputs import documents_of, epoch_of

    settings = {"max_bad_lines": ANY_NUMBER if max_bad_lines is None else max_bad_lines, **(settings or {})}
    if settings.get("objective") == "distill":  # it has the data of sft, and settings that do not matter here
        settings["objective"] = "sft"
    batch: dict[str, Any] = {"batch_tokens": 2 * settings["seq_len"]} if "seq_len" in settings else {}  # of a pair
    if settings.get("objective") == "grpo":  # its rewards do not matter here
        batch |= {"reward": "none:none", "num_generations": 2}
    recipe = FineTuningRecipe().changed({"base": model, "data": files, **batch, **settings}, "the command line")
    checkpoint = Base.of_checkpoint(hub.resolve(model, weights=False), recipe.tokenizer)
    base = replace(checkpoint, weights=None).with_template_tokens(recipe)
    found = documents_of(recipe, base, _first_messages())
    shown = list(chain.from_iterable(islice(_usable(found, recipe.seq_len), documents)))
    if not as_json:
        for document in shown:
            _show(document)
    indices = np.arange(len(found))
    sequences = epoch_of(recipe, found, indices, shuffled=False)
    with progress("reading documents") as update:
        counts = survey(found, indices, sequences, update)
    facts = {**vars(counts), "unusable": len(found.bad), "notes": found.notes.totals()}
    if as_json:
        print_json({**facts, "shown": [_as_json(document) for document in shown]})
    else:
        show_table(["", ""], list(_rows(facts, recipe)), numbers=[1])


class Shown(NamedTuple):
    """A document to show; of preference data, a prompt with a completion.

    name: its file and line, and whether it is the chosen, rejected, desirable or undesirable completion.
    tokens, trained_tokens: number of its tokens, and of those that are trained on.
    spans: the text of its first `seq_len` tokens.
    cut: number of further tokens.
    """

    name: str
    tokens: int
    trained_tokens: int
    spans: list[Span]
    cut: int


def _usable(documents: Documents, seq_len: int) -> Iterator[list[Shown]]:
    """The documents that can be used, in order, each with its sequences."""
    from ligermodels.data.encoding import Tokens
    from ligermodels.data.survey import spans
    from ligermodels.layers import IGNORE_INDEX

    for index in range(len(documents)):
        shown = []
        for role, tokens in documents.sequences([index])[0]:
            name = f"{documents.name(index)} {role}".rstrip()
            trained = sum(label != IGNORE_INDEX for label in tokens.labels)
            first = Tokens(tokens.ids[:seq_len], tokens.labels[:seq_len])
            cut = len(tokens.ids) - len(first.ids)
            shown.append(Shown(name, len(tokens.ids), trained, spans(first, documents.tokenizer), cut))
        if shown:
            yield shown


def _show(document: Shown) -> None:
    """Print a document, with the tokens that are trained on in colour, or between marks."""
    screen = console()
    screen.print(
        f"{document.name}: {document.tokens:,} tokens, {document.trained_tokens:,} trained on",
        style="bold",
        soft_wrap=True,
    )
    screen.print(marked(document.spans, screen.is_terminal), soft_wrap=True)
    screen.print(f"... and {document.cut:,} more tokens\n" if document.cut else "")


def marked(spans: Sequence[Span], in_colour: bool, most: int = sys.maxsize) -> Text:
    """The text of a document, with the tokens that are trained on in colour, or between marks.

    Args:
        spans: the document.
        in_colour: whether the text goes to a terminal.
        most: characters that are shown at most.
    """
    text, room = Text(), most
    for span in spans:
        shown = span.text[:room]
        words = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in shown)
        if in_colour:
            text.append(words, "green" if span.is_trained else "dim")
        else:
            text.append(f"{OPEN}{words}{CLOSE}" if span.is_trained else words)
        room -= len(shown)
        if not room:
            text.append(f" ... ({sum(len(span.text) for span in spans):,} characters)")
            break
    return text


def _as_json(document: Shown) -> dict[str, Any]:
    return {**document._asdict(), "spans": [span._asdict() for span in document.spans]}


def _rows(facts: dict[str, Any], recipe: FineTuningRecipe) -> Iterator[tuple[str, str]]:
    """The rows of the table of counts."""
    yield "documents", f"{facts['documents']:,}"
    if facts["unusable"]:
        yield "unusable lines", f"{facts['unusable']:,}"
    yield "tokens", f"{facts['tokens']:,}"
    noun, samples = recipe.data_form.record, recipe.data_form.samples
    if not samples:
        yield "tokens trained on", f"{facts['trained_tokens']:,}"
    for percent, length in facts["lengths"].items():
        name = {"0": f"the shortest {noun}", "100": f"the longest {noun}"}.get(percent, f"percentile {percent}")
        yield f"tokens of a {noun}: {name}", f"{length:,}"
    if not samples:
        yield f"sequences of up to {recipe.row_tokens:,} tokens", f"{facts['sequences']:,}"
        yield "tokens in sequences", f"{facts['used_tokens']:,}"
        yield "tokens trained on in sequences", f"{facts['targets']:,}"
    for reason, (documents, tokens) in facts["notes"].items():
        yield f"documents that {reason}", f"{documents:,}"
        if tokens:
            yield "  tokens that are left out", f"{tokens:,}"


def _first_messages() -> Callable[[str], None]:
    """A function that prints the first MESSAGES messages."""
    count = 0

    def say_first(message: str) -> None:
        nonlocal count
        count += 1
        if count <= MESSAGES:
            say(message if count < MESSAGES else f"{message}; further messages are not shown")

    return say_first
