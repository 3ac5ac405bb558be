"""`ligermodels medusa eval`: accuracies of Medusa heads, and the speed of decoding with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import decoding, options
from ligermodels.cli.flags import with_groups
from ligermodels.cli.options import DATA, Base, ChatTemplate, Date, Heads
from ligermodels.console import print_json, progress, say, show_table
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.data.documents import Documents
    from ligermodels.data.orders import Indices
    from ligermodels.speculative.benchmark import TreeFit
    from ligermodels.speculative.evaluation import HeadScores
    from ligermodels.speculative.multi_head import MultiHeadModel
    from ligermodels.speculative.tree import DynamicTree, Tree
    from ligermodels.training import MedusaRecipe

RANKS = range(1, 11)
DECODING = (
    "prompt_tokens", "max_new_tokens", "decode_batch_size", "draft_tree", "confidence_threshold", "compare",
)  # fmt: skip
"""Parameters of the benchmark."""


@with_groups
def evaluate(
    ctx: typer.Context,
    base: Base,
    heads: Heads,
    data: Annotated[list[Path] | None, DATA] = None,
    validation_of: Annotated[
        Path | None, typer.Option(help="Folder of a run: use its validation split; --data says where its data is now.")
    ] = None,
    prompts: Annotated[
        int,
        typer.Option(min=0, help="Texts and chats to continue, to fit and benchmark a tree; 0: only score the heads."),
    ] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text to use as a prompt.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Candidates in the tree.")] = 63,
    decode_batch_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts decoded together in the benchmark. May be repeated.  [default: 1]"),
    ] = None,
    draft_tree: decoding.DraftTree = None,
    confidence_threshold: decoding.ConfidenceThreshold = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Other heads for BASE, benchmarked on the same prompts. May be repeated.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the results into this PNG file.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences per batch; DFlash and DSpark heads: 1.  [default: 8]")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.  [default: 2048]")] = None,
    max_bad_lines: Annotated[int | None, typer.Option(min=0, help="Unusable lines to skip.  [default: 0]")] = None,
    chat_template: ChatTemplate = None,
    date: Date = None,
    *,
    loading: options.Loading,
    as_json: options.AsJson = False,
) -> None:
    """Score heads, and benchmark decoding with them.

    Give text that the heads were not trained on. They are scored on it and, for decoding, on the model's own
    continuations of texts and of chats up to the assistant's first turn. Half of these continuations fit the tree and
    predict tokens per step; the other half measures them. With --validation-of, settings default to the settings of the
    run.
    """
    from ligermodels.cli.plot import plot_scores, require_plotting

    _check(data, validation_of, prompts)
    if not prompts:
        options.refuse_given(ctx, DECODING, "is for decoding, and --prompts 0 only scores the heads")
    if plot is not None:
        require_plotting(plot)
    options.device_named(loading.device)

    from ligermodels.data.prompts import opening_prompts
    from ligermodels.speculative.benchmark import fit_tree

    folder = options.folder_of(base)
    options.require_heads(heads, ctx.parent.info_name if ctx.parent else None)
    for each in compare or []:
        options.require_heads(each)
    grown = decoding.tree_of(draft_tree)
    settings = {"max_bad_lines": max_bad_lines, "chat_template": chat_template, "date": date}
    documents, indices, recipe = _documents(folder, data or [], validation_of, settings)
    token_prompts = opening_prompts(documents, indices, prompts, prompt_tokens=prompt_tokens)
    if prompts and len(token_prompts) < 2:
        raise InputError("there are no two texts or chats to continue: give more, or --prompts 0, which only scores")
    model = loading.load(folder)
    medusa = options.load_heads(model, heads, grown, confidence_threshold)
    scores = _scored(medusa, documents, indices, recipe, seq_len or recipe.seq_len, batch_size)
    fit, benchmarks = None, list[dict[str, Any]]()
    if token_prompts:
        with progress("generating") as update:
            fit = fit_tree(medusa, token_prompts, nodes=nodes, max_new_tokens=max_new_tokens, progress=update)
        benchmarks = _benchmarks(medusa, heads, compare or [], fit.tree, grown, decode_batch_size or [],
                                 token_prompts[1::2], max_new_tokens)  # fmt: skip
    results = _results(scores, fit, benchmarks, nodes)
    if as_json:
        print_json(results)
    else:
        _show(scores, fit, results)
    if plot is not None:  # after the results, which a plot that cannot be written must not take along
        plot_scores(plot, results)
        say(f"wrote {plot}")


def _scored(
    model: MultiHeadModel,
    documents: Documents,
    indices: Indices,
    recipe: MedusaRecipe,
    seq_len: int,
    batch_size: int | None,
) -> HeadScores:
    """The scores of the heads on one pass over the documents of `indices`. Raises typer.BadParameter for a `batch_size`
    of heads that are scored on blocks of each sequence."""
    from ligermodels.data.packing import PackedBatches, counted
    from ligermodels.speculative.evaluation import evaluate_heads

    if model.every_token and batch_size is not None:
        reason = "is for heads that are scored on all tokens; these are scored on blocks of one sequence at a time"
        raise typer.BadParameter(reason, param_hint="--batch-size")
    size = 1 if model.every_token else batch_size or 8
    sizes: dict[str, Any] = {"seq_len": seq_len, "batch_size": size, "epochs": 1}
    with progress("scoring") as update:
        strategy = recipe.excess_length_strategy
        batches = PackedBatches(documents, indices, **sizes, excess_length_strategy=strategy)
        return evaluate_heads(model, counted(batches, update))


def _results(scores: HeadScores, fit: TreeFit | None, benchmarks: list[dict[str, Any]], nodes: int) -> dict[str, Any]:
    """The results for --json and --plot.

    Args:
        scores: scores of the heads on the text.
        fit: the tree fitted on the model's own continuations and its benchmark; None without prompts.
        benchmarks: rows of `_benchmarks`.
        nodes: number of candidates in the tree that is grown from `scores`, without prompts.
    """
    from ligermodels.speculative.tree import expected_tokens, grow

    results: dict[str, Any] = {
        "targets": scores.counts.long().tolist(),
        "losses": scores.losses.tolist(),
        "accuracies": {k: scores.accuracy(k).tolist() for k in RANKS},
        **{name: share.tolist() for name, share in scores.accepted.items()},
    }
    if fit is None:
        tree = grow(scores.hits, nodes)
        return results | {"tree": tree.paths, "expected_tokens_per_step": expected_tokens(tree, scores.hits)}
    own = fit.continuations.scores
    return results | {
        "own_accuracies": {k: own.accuracy(k).tolist() for k in RANKS},
        "predicted_tokens_per_step": fit.predicted,
        "generation": {**asdict(fit.benchmark), "speed_up": fit.benchmark.speed_up},
        "benchmarks": benchmarks,
        "tree": fit.tree.paths,
        "expected_tokens_per_step": fit.expected,
    }


def _show(scores: HeadScores, fit: TreeFit | None, results: Mapping[str, Any]) -> None:
    """Print tables of the scores, of decoding, and of the benchmarks in `results`."""
    show_scores(scores, RANKS)
    speeds = [("tokens per step, if heads err independently", f"{results['expected_tokens_per_step']:.2f}")]
    if fit is not None:
        typer.echo(f"On the model's own continuations of {len(fit.continuations.lengths)} prompts:")
        show_scores(fit.continuations.scores, RANKS)
        outcome = fit.benchmark
        speeds += [
            ("tokens per step, predicted from these", _number(fit.predicted)),
            (f"tokens per step, measured on {outcome.prompts} others", _number(outcome.tokens_per_step)),
            ("tokens/s, plain", f"{outcome.tokens / outcome.plain_seconds:.1f}"),
            ("tokens/s, with heads", f"{outcome.tokens / outcome.medusa_seconds:.1f}"),
            ("speed-up", f"{outcome.speed_up:.2f}"),
            ("identical output", f"{outcome.same} of {outcome.prompts} prompts"),
        ]
    show_table(["", ""], speeds, numbers=[1])
    if rows := results.get("benchmarks"):
        columns = ["heads", "drafts", "batch_size", "tokens_per_step", "plain", "tokens_per_second", "speed_up"]
        lines = [[_number(x) if isinstance(x := row[name], float) else str(x) for name in columns] for row in rows]
        names = ["heads", "drafts", "batch", "tokens per step", "tokens/s, plain", "tokens/s", "speed-up"]
        show_table(names, lines, numbers=range(2, len(names)))


def _benchmarks(
    model: MultiHeadModel, heads: str, others: Sequence[str], fitted: Tree, grown: DynamicTree | None,
    batch_sizes: Sequence[int], prompts: Sequence[Sequence[int]], max_new_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Benchmarks of heads, of each way to draft and each batch size, on the same prompts; empty if nothing is asked
    beyond the benchmark of the fitted tree with single prompts."""
    from ligermodels.speculative.benchmark import benchmark_decoding

    if not (batch_sizes or others or grown):
        return []
    ways: dict[str, Any] = {"default": model.default_tree(), "fitted tree": fitted}
    if grown is not None:
        ways[f"dynamic tree {grown.max_depth},{grown.top_k},{grown.nodes}"] = grown
    jobs: list[tuple[str, MultiHeadModel, str, Any]] = [(heads, model, way, tree) for way, tree in ways.items()]
    for name in others:
        other = options.load_heads(model.base, name)
        jobs.append((name, other, "default", other.default_tree()))
    rows = list[dict[str, Any]]()
    with progress("benchmark") as update:
        for batch_size in batch_sizes or [1]:
            for name, each, way, tree in jobs:
                sizes: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
                found = benchmark_decoding(each, prompts, tree=tree, **sizes, progress=update)
                speeds = {
                    "plain": found.tokens / found.plain_seconds,
                    "tokens_per_second": found.tokens / found.medusa_seconds,
                    "speed_up": found.speed_up,
                }
                rows.append({"heads": name, "kind": each.kind, "drafts": way, **asdict(found), **speeds})
    return rows


def _check(data: list[Path] | None, validation_of: Path | None, prompts: int) -> None:
    if not data and validation_of is None:
        raise typer.BadParameter("give one of the two, or both", param_hint="--data or --validation-of")
    if prompts == 1:
        raise typer.BadParameter("give 2 or more, or 0 only to score", param_hint="--prompts")


def show_scores(scores: HeadScores, ranks: Sequence[int] = (1, 5)) -> None:
    """Print a table of losses and accuracies, one head per line."""
    from ligermodels.training.metrics import shown_share

    columns = ["head", "token", "loss", *(f"top-{k}" for k in ranks), *scores.accepted]
    shares = [*(scores.accuracy(k) for k in ranks), *scores.accepted.values()]
    rows = [
        (str(i), f"t+{i + 2}", _number(loss, 3), *(shown_share(float(share[i]), 1) for share in shares))
        for i, loss in enumerate(scores.losses.tolist())
    ]
    show_table(columns, rows, numbers=range(2, len(columns)))
    if scores.accepted:
        found = (f"{name} {tokens:.2f}" for name, tokens in scores.tokens_per_step().items())
        typer.echo(f"tokens per step of a chain, from {' and '.join(found)}")


def _number(value: float, decimals: int = 2) -> str:
    """The number, or a dash for nan: no step was taken, or there was no target."""
    return "-" if math.isnan(value) else f"{value:.{decimals}f}"


def _documents(
    folder: Path, data: Sequence[Path], run: Path | None, settings: Mapping[str, Any]
) -> tuple[Documents, Indices, MedusaRecipe]:
    """The documents in `data`, or in the data of a `run`; the indices of the documents to score; and the recipe.

    `settings` that are not None replace the settings of the run. Raises InputError if the run has no validation split,
    or the data is not the data of the run.
    """
    from ligermodels.training import MedusaRecipe, TrainingRecipe
    from ligermodels.training.base import Base
    from ligermodels.training.folder import RECIPE, read_content
    from ligermodels.training.inputs import data_content, documents_of, require_same_content, split
    from ligermodels.training.recipe_file import recipe_settings

    recipe = MedusaRecipe()
    if run is not None and not (run / RECIPE).is_file():
        raise InputError(f"--validation-of {run}: holds no run (no {RECIPE})")
    if run is not None:  # of any kind: the settings of the data are in every recipe
        found = MedusaRecipe.current_names(recipe_settings(run / RECIPE), str(run / RECIPE))
        common = {name: value for name, value in found.items() if name in TrainingRecipe.model_fields}
        recipe = recipe.changed(common, str(run / RECIPE))
    changes = {name: value for name, value in settings.items() if value is not None}
    recipe = recipe.changed(changes | ({"data": tuple(data)} if data else {}), "the command line")
    if run is not None:
        before = read_content(run)
        require_same_content({**before, "data": data_content(recipe)}, before)
    documents = documents_of(recipe, Base.of_checkpoint(folder, recipe.tokenizer), say)
    if run is None:
        return documents, documents.corpus.split(0, seed=0)[0], recipe
    _, indices = split(recipe, documents)
    if not len(indices):
        raise InputError(f"{run}: has no validation split (validation_fraction is 0); give other data")
    return documents, indices, recipe
