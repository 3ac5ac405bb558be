"""The inputs of a run: documents, and a check that an interrupted run resumes with the same recipe and files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.files import matching
from ligermodels.data import fingerprint
from ligermodels.data.built_in_templates import template_file
from ligermodels.data.documents import Documents
from ligermodels.data.examples import ExampleBatches, Examples
from ligermodels.data.files import data_files
from ligermodels.data.fingerprint import Fingerprint
from ligermodels.data.orders import DocumentOrder, Indices, Mixture
from ligermodels.data.packing import PackedBatches
from ligermodels.data.prompt_batches import PromptBatches, PromptDocuments
from ligermodels.data.source import EncodedSource, cache_key
from ligermodels.data.streaming import StreamedCorpus, Windowed
from ligermodels.data.token_cache import TokenCache
from ligermodels.data.workers import default_count
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.models.extra_heads import require_model
from ligermodels.training.base import Base
from ligermodels.training.console import Console
from ligermodels.training.locations import comparable_settings
from ligermodels.training.optimizer_settings import DECAY
from ligermodels.training.recipe import R, TrainingRecipe
from ligermodels.training.settings import with_effect

BY_CONTENT = {"base", "data", "chat_template"}
"""Settings that name files. A resumed run needs files with the same content; their paths may differ."""

TEACHER = "teacher"
"""Setting of the objective distill, and the name of its fingerprints beside BY_CONTENT, if it is given."""

START = "start_from"
"""Setting of the heads that a run starts from, and the name of their fingerprints, if they are read again when the run
resumes."""

LENGTH = {"steps", "epochs"}
"""Settings of the length of a run. It may become longer when it resumes."""

DTYPE = "param_dtype"
"""Setting of the section `parallel` that affects training."""

WEIGHTS = (".safetensors", ".bin")
"""Endings of files of weights."""

Content = dict[str, list[Fingerprint]]
"""Setting in BY_CONTENT, TEACHER or START -> fingerprints of its files."""


class DataSource(NamedTuple):
    """Classes that read and batch the data, and their options.

    documents, options: class of the documents, and options beside those of `Documents`.
    batches, batch_options: class of the batches, and options beside those of `PackedBatches`.
    """

    documents: type[Documents] = Documents
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    batches: type[PackedBatches] = PackedBatches
    batch_options: dict[str, Any] = {}  # noqa: RUF012


def data_source(recipe: TrainingRecipe) -> DataSource:
    """How the records of `recipe` are read and batched."""
    form = recipe.data_form
    if form.name == "documents":
        return DataSource()
    if form.samples:
        settings = recipe.settings()
        room = recipe.seq_len - settings["max_completion_length"]
        raises = recipe.excess_length_strategy == "raise"
        return DataSource(PromptDocuments, {"most_tokens": room, "raises": raises}, PromptBatches)
    options = {
        "form": form.name,
        "seq_len": recipe.seq_len,
        "excess_length_strategy": recipe.excess_length_strategy,
        "mismatched": form.mismatched,
    }
    return DataSource(Examples, options, ExampleBatches, {"prompt_targets": form.prompt_targets})


def documents_of(
    recipe: TrainingRecipe, base: Base, say: Callable[[str], object], *, piece: int | None = None
) -> Documents:
    """The data of a recipe as documents.

    Args:
        recipe: the settings: data, chat template, date and number of unusable lines allowed.
        base: config and tokenizer.
        say: called with a message about each unusable line.
        piece: bytes of the pieces that long texts are cut into; None for the default.
    """
    source = data_source(recipe)
    return source.documents.of_checkpoint(
        base.tokenizer,
        recipe.data,
        config=base.config,
        chat_template=recipe.chat_template,
        date=recipe.date,
        max_bad_lines=recipe.max_bad_lines,
        on_bad_line=say,
        packing_strategy=recipe.packing_strategy,
        piece=piece,
        streaming=recipe.streaming,
        vocab_size=base.vocab_size,
        **source.options,
    )


def split(recipe: TrainingRecipe, documents: Documents) -> tuple[Indices | DocumentOrder, Indices]:
    """The documents of the training split, in an order of their own if they are streamed or mixed, and of the other.

    Raises InputError if there are too few documents for a validation split.
    """
    corpus = documents.corpus
    if not isinstance(corpus, StreamedCorpus):
        training, validation = corpus.split(recipe.validation_fraction, recipe.seed)
        return (Mixture.of(corpus, training, recipe.data_weights) if recipe.data_weights else training), validation
    validation = corpus.validation(recipe.validation_fraction, recipe.seed)
    return Windowed(corpus, validation, recipe.shuffle_buffer_size), validation


def packed(
    recipe: TrainingRecipe, documents: Documents, indices: Indices | DocumentOrder | None, **options: Any
) -> PackedBatches:
    """Documents packed by a recipe.

    Args:
        recipe: the settings: sequence length and what happens to longer documents.
        documents: the documents.
        indices: the documents to use; None for all.
        options: `batch_size`, `seed`, `epochs` and `max_sequences` of `PackedBatches`.
    """
    source = data_source(recipe)
    options |= {"excess_length_strategy": recipe.excess_length_strategy, **source.batch_options}
    return source.batches(documents, indices, seq_len=recipe.row_tokens, **options)


def epoch_of(
    recipe: TrainingRecipe, documents: Documents, indices: Indices | DocumentOrder, *, shuffled: bool = True
) -> PackedBatches:
    """An epoch of documents packed by a recipe, one sequence per batch, to be counted.

    Args:
        recipe: the settings.
        documents: the documents.
        indices: the documents to use.
        shuffled: whether they come in the order of the recipe's seed.
    """
    return packed(recipe, documents, indices, batch_size=1, seed=recipe.seed if shuffled else None, epochs=1)


def mixture_summary(recipe: TrainingRecipe, documents: Documents, mixture: Mixture) -> str:
    """A message with the documents of each source in an epoch.

    Args:
        recipe: the settings; `data` names the sources.
        documents: the documents of all sources.
        mixture: the training documents, drawn by weight.
    """
    shares = zip(recipe.data, mixture.shares(documents.corpus), strict=True)
    parts = (f"{name} {s.documents:,} of {s.available:,} documents, {s.bytes:.0%} of the bytes" for name, s in shares)
    return f"data_weights: an epoch has of {'; of '.join(parts)}"


def same_recipe(recipe: R, before: Mapping[str, Any]) -> R:
    """`recipe` with the date and the `kept` settings of a checkpoint's settings `before`. Heads that are read again may
    be in another folder now.

    Raises ConfigError if the two differ in a setting that affects training, other than LENGTH and DECAY."""
    before = settings_before(recipe, before)
    now, kept = recipe.start, {name: before[name] for name in recipe.kept}
    recipe = recipe.model_copy(update={"date": recipe.date or before["date"], **kept})
    if recipe.reads_start and recipe.start and now:
        recipe = recipe.model_copy(update={START: now})
    # `check_schedule` compares LENGTH and DECAY.
    free = recipe.may_change | recipe.kept | BY_CONTENT | {TEACHER} | LENGTH | DECAY
    fields = type(recipe).model_fields
    given, before = (_compared(fields, settings) for settings in (recipe.settings(), before))
    changed = {name: value for name, value in given.items() if name not in free and value != before.get(name)}
    if changed:
        # Defaults that depend on other settings, which may change, are in none of the given settings.
        advice = "leave it out" if changed.keys() <= recipe.model_fields_set else "give the value that it had"
        raise ConfigError(
            f"the run cannot resume with another recipe: {changes(changed, before)}; {advice}, or start over"
        )
    return recipe


def _compared(fields: Mapping[str, FieldInfo], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`comparable_settings`, with the dtype of the computation, which may not change with the rest of the plan."""
    plan = settings.get("parallel", {})
    return comparable_settings(fields, settings) | {f"parallel.{DTYPE}": plan.get(DTYPE)}


def length_changes(recipe: TrainingRecipe, before: Mapping[str, Any]) -> str:
    """A message about LENGTH settings that differ from a checkpoint's settings `before`; empty if they are equal."""
    return changes({name: getattr(recipe, name) for name in sorted(LENGTH)}, settings_before(recipe, before))


def settings_before(recipe: TrainingRecipe, before: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's settings `before` under the names of this release, and its new settings at their defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        defaults = recipe.model_copy(update=recipe.defaults()).settings()
        return with_effect(recipe.conditions, recipe.current_names(before), defaults)


def changes(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """A message about the settings in `now` that differ from `before`; empty if all are equal."""
    changed = {name: value for name, value in now.items() if value != before.get(name)}
    return "; ".join(f"{name} was {before.get(name)!r}, is {value!r}" for name, value in changed.items())


def content_of(recipe: TrainingRecipe, base: Base, *, on_meta: bool = False) -> Content:
    """Fingerprints of the files that a run reads. Raises InputError and CheckpointError for unreadable files.

    Args:
        recipe: the settings.
        base: the files of the base model.
        on_meta: leave out the weights of a teacher and of heads, so that they are not fetched from the hub.
    """
    content = {
        "base": base.fingerprints(),
        "data": data_content(recipe),
        "chat_template": [fingerprint.of_file(template_file(recipe.chat_template))] if recipe.chat_template else [],
    }
    if teacher := recipe.settings().get(TEACHER):
        folder = hub.resolve(teacher, weights=not on_meta)
        try:
            require_model(read_json(folder / "config.json"))
        except ConfigError as error:
            raise ConfigError(f"{TEACHER}: {error}") from None
        content[TEACHER] = fingerprint.of_checkpoint(folder / "config.json", folder, None if on_meta else folder)
    if recipe.reads_start and (start := recipe.start):
        try:
            folder = hub.resolve(start, weights=not on_meta)
        except CheckpointError as error:
            raise CheckpointError(f"{START}: {error}; give the folder of these heads, wherever it is now") from None
        patterns = ("config.json", *(() if on_meta else (f"*{ending}" for ending in WEIGHTS)))
        names = sorted(path.name for path in folder.iterdir() if matching(path.name, patterns))
        content[START] = [fingerprint.of_file(folder / name) for name in names]
    return content


def data_content(recipe: TrainingRecipe) -> list[Fingerprint]:
    """Fingerprints of the data. Raises InputError for files that cannot be read."""
    return [
        {**fingerprint.of_file(file.original, InputError), "name": Path(file.name).name}
        for file in data_files(recipe.data)
    ]


def require_same_content(now: Content, before: Content, *, weightless: Collection[str] = ()) -> None:
    """Raise InputError for other data, CheckpointError for another base, teacher, chat template or heads; messages name
    the files.

    Args:
        now: fingerprints of the files that there are.
        before: fingerprints at the start of the run; earlier releases have none of a teacher or of heads.
        weightless: names for which `now` has no fingerprints of weights; those in `before` do not count.
    """
    for name in (name for name in ("data", "chat_template", TEACHER, START, "base") if name in now and name in before):
        known = [file for file in before[name] if name not in weightless or not file["name"].endswith(WEIGHTS)]
        if differences := list(_differences(now[name], known, in_order=name == "data")):
            raise (InputError if name == "data" else CheckpointError)(
                f"{name}: differs from the start of the run: {'; '.join(differences)}. Give the original files, "
                "wherever they are now, or start over"
            )


def _differences(now: list[Fingerprint], before: list[Fingerprint], *, in_order: bool) -> Iterable[str]:
    """Differences, file by file. Data files are matched by position, files of a checkpoint by name."""
    new, old = ({(i if in_order else file["name"]): file for i, file in enumerate(files)} for files in (now, before))
    for key in [*old, *(key for key in new if key not in old)]:
        if key not in new:
            yield f"{old[key]['name']} is missing"
        elif key not in old:
            yield f"{new[key]['name']} is new"
        elif new[key]["bytes"] != old[key]["bytes"]:
            yield f"{_name(new[key], old[key])} had {old[key]['bytes']:,} bytes, has {new[key]['bytes']:,}"
        elif new[key]["digest"] != old[key]["digest"]:
            yield f"{_name(new[key], old[key])} has other content"


def _name(now: Fingerprint, before: Fingerprint) -> str:
    return now["name"] if now["name"] == before["name"] else f"{now['name']} (was {before['name']})"


SMALL = 1 << 20
"""Bytes of data that one process tokenises in about a second: they need no other processes, and no cache."""


def start_tokenising(recipe: TrainingRecipe, documents: Documents, console: Console) -> None:
    """Let processes tokenise the documents, and keep their tokens in a cache, as the recipe says.

    Call it after the split, which may divide a text, and before the first document is read.

    Args:
        recipe: the settings.
        documents: the documents; `Documents.close` ends the processes.
        console: where messages go.
    """
    if documents.fingerprint["bytes"] < SMALL or recipe.data_form.name != "documents":
        return  # preference data is read in this process
    cache = _open_cache(documents, console) if recipe.token_cache and not recipe.streaming else None
    count = default_count() if recipe.dataset_num_proc is None else recipe.dataset_num_proc
    documents.source = EncodedSource(documents.content, documents.encoder, num_workers=count, cache=cache)


def _open_cache(documents: Documents, console: Console) -> TokenCache | None:
    """The cache of the documents; None, with a message, if it cannot be used."""
    try:
        cache = TokenCache(cache_key(documents.corpus, documents.encoder), len(documents), console.say)
    except OSError as error:
        console.say(
            f"token cache: {error.filename}: {error.strerror}, so tokens are not kept; set LIGERMODELS_CACHE to "
            "another folder, or give --no-token-cache"
        )
        return None
    if found := cache.num_documents:
        console.say(f"token cache: {found:,} of {len(documents):,} documents are in {cache.folder}")
    return cache
