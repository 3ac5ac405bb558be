"""`ligermodels verify`: a checkpoint compared with transformers, in float8 with itself, or rounded with itself; and the
files of draft heads."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.arguments import check_number
from ligermodels.cli import options
from ligermodels.cli.flags import with_groups
from ligermodels.console import print_json, progress, readable_bytes, say, show_table
from ligermodels.convert.input_files import TEXT_BYTES, open_file
from ligermodels.errors import InputError, arguments_named

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.verify import Report


@dataclass(frozen=True)
class Computing(options.Loading):
    """How the model is loaded, in float32 by default."""

    dtype: Annotated[options.Dtype, typer.Option(help="Dtype to compute in.")] = "float32"


@with_groups
def verify(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint folder, a Hugging Face hub id, or draft heads for MODEL."),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="PATH has heads for this model: verify their files.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Checkpoint folder that transformers opens.  [default: PATH]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Use the beginning of this file instead of random tokens.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest error allowed.  [default: 1e-4 in float32, 5e-2 in bfloat16]")
    ] = None,
    float8: Annotated[
        bool, typer.Option("--float8", help="Compare gradients in float8 with gradients in --dtype, not transformers.")
    ] = False,
    float8_exclude: Annotated[
        list[str] | None, typer.Option(help="Patterns of layers that are not converted to float8, as in `train`.")
    ] = None,
    *,
    loading: Computing,
    as_json: options.AsJson = False,
) -> None:
    """Compare a checkpoint with transformers, module by module; or verify the files of draft heads.

    Exit code 1 on a mismatch; the first mismatch is printed. The error of a module is max |ours - theirs| / max
    |theirs|.

    With --float8 the gradient of each parameter in float8 is compared with its gradient in --dtype: the cosine between
    them, and the ratio of their norms. Exit code 1 if --tolerance is given and 1 - cosine or |ratio - 1| is above it.

    With --quantize predictions with rounded weights are compared with predictions without: the KL divergence, and both
    perplexities. Exit code 1 if --tolerance is given and the KL divergence is above it. Give a --text: perplexities of
    random tokens mean nothing.

    With MODEL, PATH has Medusa, MTP, EAGLE-3, DFlash or DSpark heads for it. Layer ids, norms, vocabulary tables,
    shapes and values are checked, and results are compared with the formulas. MODEL's weights are not read. Exit code 1
    on a mismatch.
    """
    if model is not None:
        others = ctx.params.keys() - {"path", "model", "as_json"}
        options.refuse_given(ctx, others, "verifying heads (MODEL) takes no option but --json")
        return _verify_heads(path, model, as_json)
    if tolerance is not None:
        check_number("--tolerance", tolerance)
    is_rounded = loading.quantize is not None
    _check_combination(float8, float8_exclude, is_rounded, reference)
    if not float8 and not is_rounded:
        return _verify_model(path, reference, text, loading, as_json, tokens=tokens, tolerance=tolerance)
    folder = options.folder_of(path)
    loaded = loading.load(folder)
    ids = _ids(loaded, folder, text, tokens)
    if is_rounded:
        plain = replace(loading, quantize=None, quantize_exclude=None, quantize_head=None)
        return _verify_quantized(loaded, plain.load(folder), ids, tolerance, as_json)
    return _verify_float8(loaded, ids, float8_exclude or [], tolerance, as_json)


def _verify_model(
    path: str, reference: Path | None, text: Path | None, loading: Computing, as_json: bool, **compared: Any
) -> None:
    """Compare a checkpoint with transformers, with exit code 1 on a mismatch.

    `compared`: the arguments `tokens` and `tolerance` of `ligermodels.verify.verify`.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from ligermodels.ops.runtime.tensors import dtype_named
    from ligermodels.verify import verify as compare

    device = options.device_named(loading.device)
    folder = options.folder_of(path)
    if reference is not None and not reference.is_dir():
        raise InputError(f"--reference {reference}: no such folder")
    ids = None if text is None else _tokens_of(text, folder, compared["tokens"])
    with progress(f"loading {path}", in_bytes=True) as update:
        report = compare(
            folder,
            reference=reference,
            input_ids=ids,
            dtype=dtype_named(loading.dtype),
            device=device,
            attention=loading.attention,
            progress=update,
            **compared,
        )
    _show(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


def _verify_heads(heads: str, model: str, as_json: bool) -> None:
    """Verify the files of draft heads, with exit code 1 on a mismatch."""
    from ligermodels.speculative.verify import verify_heads

    report = verify_heads(heads, model)
    mismatch = report.first_mismatch
    if as_json:
        checks = [{"name": check.name, "found": check.found, "passed": check.passed} for check in report.checks]
        first = mismatch and mismatch.name
        print_json({"passed": report.passed, "kind": report.kind, "first_mismatch": first, "checks": checks})
    else:
        words = {True: "ok", False: "differs", None: ""}
        show_table(["check", "", "found"], [(check.name, words[check.passed], check.found) for check in report.checks])
        if mismatch:
            typer.echo(f"First mismatch: {mismatch.name}: {mismatch.found}")
        else:
            typer.echo(f"Match: the {report.kind} heads in {heads} fit {model}.")
    if mismatch:
        raise typer.Exit(1)


def _check_combination(
    float8: bool, float8_exclude: list[str] | None, is_rounded: bool, reference: Path | None
) -> None:
    """Raise typer.BadParameter for options that contradict one another."""
    if float8_exclude and not float8:
        raise typer.BadParameter("is for --float8", param_hint="--float8-exclude")
    if (float8 or is_rounded) and reference is not None:
        other = "--float8" if float8 else "--quantize"
        raise typer.BadParameter(f"has no meaning with {other}", param_hint="--reference")
    if float8 and is_rounded:
        raise typer.BadParameter("give one of the two", param_hint="--float8 or --quantize")


def _show(report: Report, as_json: bool) -> None:
    mismatch = report.first_mismatch
    if as_json:
        print_json(
            {
                "passed": report.passed,
                "first_mismatch": mismatch and mismatch.name,
                "first_difference": mismatch and mismatch.name,  # the older name, kept for scripts
                "tolerance": report.tolerance,
                "tokens": report.tokens,
                "errors": {place.name: place.error for place in report.places},
            }
        )
        return
    rows = [
        (place.name, place.theirs, f"{place.error:.1e}", "" if place.error <= report.tolerance else "differs")
        for place in report.places
    ]
    show_table(["module", "in transformers", "max relative error", ""], rows, numbers=[2])
    if mismatch:
        nan = "" if mismatch.error == mismatch.error else " (outputs of other shapes, or NaN)"
        typer.echo(
            f"First mismatch: {mismatch.name}: error {mismatch.error:.1e}{nan}, tolerance {report.tolerance:.0e}."
        )
    else:
        typer.echo(f"Match: {report.tokens} tokens, every module within {report.tolerance:.0e}.")


def _verify_float8(model: CausalLM, ids: Tensor, exclude: list[str], tolerance: float | None, as_json: bool) -> None:
    """Compare gradients in float8 with gradients in the dtype of the model."""
    from ligermodels.adapt.float8_agreement import float8_agreement

    with arguments_named(exclude="--float8-exclude"):
        report = float8_agreement(model, ids[None], exclude=exclude)
    if as_json:
        print_json(
            {
                "loss": report.loss,
                "float8_loss": report.float8_loss,
                "tokens": len(ids),
                "gradients": {g.name: {"cosine": g.cosine, "norm_ratio": g.norm_ratio} for g in report.gradients},
            }
        )
    else:
        rows = [(g.name, f"{g.cosine:.5f}", f"{g.norm_ratio:.4f}") for g in report.gradients]
        show_table(["gradient of", "cosine", "ratio of norms"], rows, numbers=[1, 2])
        typer.echo(f"Loss {report.loss:.5f}, in float8 {report.float8_loss:.5f}; the farthest: {report.worst.name}.")
    _require_within(tolerance, report.worst.error, f"the gradient of {report.worst.name}")


SEQ_LEN = 2048
"""Largest number of tokens in a sequence."""


def _verify_quantized(
    quantized: CausalLM, model: CausalLM, ids: Tensor, tolerance: float | None, as_json: bool
) -> None:
    """Compare predictions with rounded weights with predictions without."""
    from ligermodels.data.batches import Batch
    from ligermodels.evaluation import evaluate_kl, perplexity
    from ligermodels.layers.initialization import persistent_tensors

    rows = ids.split(min(SEQ_LEN, model.config.max_position_embeddings or SEQ_LEN))
    report = evaluate_kl(
        quantized, model, (Batch({"input_ids": row[None], "labels": row[None]}) for row in rows if len(row) > 1)
    )
    results = {
        "kl": report.kl,
        "perplexity": perplexity(report.reference_loss),
        "quantized_perplexity": perplexity(report.loss),
        "tokens": sum(len(row) - 1 for row in rows),
        "weights_bytes": sum(tensor.nbytes for tensor in persistent_tensors(model).values()),
        "quantized_weights_bytes": sum(tensor.nbytes for tensor in persistent_tensors(quantized).values()),
    }
    if as_json:
        print_json(results)
    else:
        sizes = [readable_bytes(results[name]) for name in ("weights_bytes", "quantized_weights_bytes")]
        perplexities = [f"{results[name]:.3f}" for name in ("perplexity", "quantized_perplexity")]
        show_table(["", "without", "quantised"], [("perplexity", *perplexities), ("weights", *sizes)], numbers=[1, 2])
        typer.echo(f"KL divergence {report.kl:.5f} nats per token, over {results['tokens']:,} predicted tokens.")
    _require_within(tolerance, report.kl, "the KL divergence")


def _require_within(tolerance: float | None, error: float, name: str) -> None:
    """Exit with code 1 and a message if there is a tolerance and the error is above it."""
    if tolerance is not None and not error <= tolerance:
        say(f"{name}: {error:.1e} is above --tolerance {tolerance:.1e}")
        raise typer.Exit(1)


def _ids(model: CausalLM, folder: Path, text: Path | None, tokens: int) -> Tensor:
    """The first `tokens` tokens of a text, or fixed random tokens: (tokens,), int64, on the model's device."""
    import torch

    if text is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (tokens,), generator=generator)
    else:
        ids = torch.tensor(_tokens_of(text, folder, tokens))
    if len(ids) < 2:
        raise InputError("tokens: a loss needs two or more; give more by --tokens, or a longer text")
    return ids.to(model.device)


def _tokens_of(path: Path, folder: Path, most: int) -> list[int]:
    """The first `most` tokens of a text, of at most its first TEXT_BYTES; InputError if it is no text, or empty."""
    from ligermodels.data.tokenizer import Tokenizer

    with open_file(path, InputError) as file:
        content = file.read(TEXT_BYTES + 1)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:  # a character that TEXT_BYTES cut is left out
        text = decoder.decode(content[:TEXT_BYTES], final=len(content) <= TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error}") from None
    if not text:
        raise InputError(f"{path}: is empty; give a text")
    return Tokenizer(folder).encode(text.replace("\r\n", "\n").replace("\r", "\n"))[:most]
