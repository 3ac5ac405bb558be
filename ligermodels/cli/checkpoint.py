"""`ligermodels verify` and `export`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.arguments import check_number
from ligermodels.cli import models, options
from ligermodels.console import print_json, progress, readable_bytes, say, show_table
from ligermodels.convert.input_files import read_text
from ligermodels.errors import InputError, arguments_named

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.convert.export_spec import Keep
    from ligermodels.models.causal_lm import CausalLM


MaxShardSize = Annotated[str, typer.Option(help="Largest weight file, as 5GB or 500MB.")]


def verify(
    path: options.Checkpoint,
    reference: Annotated[Path | None, typer.Option(help="Folder for transformers, if another.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Use the beginning of this file instead of random tokens.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest error allowed.  [default: 1e-4 in float32, 5e-2 in bfloat16]")
    ] = None,
    dtype: Annotated[options.Dtype, typer.Option(help="Dtype to compute in.")] = "float32",
    device: options.Device = None,
    attention: options.Attention = "auto",
    float8: Annotated[
        bool, typer.Option("--float8", help="Compare gradients in float8 with those without, and not transformers.")
    ] = False,
    float8_exclude: Annotated[
        list[str] | None, typer.Option(help="Patterns of layers that stay as they are, as of `train`.")
    ] = None,
    quantize: options.Quantize = None,
    quantize_exclude: options.QuantizeExclude = None,
    quantize_head: options.QuantizeHead = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare a checkpoint with transformers, module by module.

    Exit code 1 on a mismatch; the first one is printed. The error of a module is max |ours - theirs| / max |theirs|.
    With --float8 the gradient of each parameter in float8 is compared with that in --dtype: the cosine between them,
    and the ratio of their norms; exit code 1 where 1 - cosine or |ratio - 1| is above --tolerance, if that is given.
    With --quantize predictions with rounded weights are compared with those without: the KL divergence, and both
    perplexities; exit code 1 where the KL is above --tolerance, if that is given. Give a --text: of random tokens
    perplexities say nothing.
    """
    if tolerance is not None:
        check_number("--tolerance", tolerance)
    if float8_exclude and not float8:
        raise typer.BadParameter("is for --float8", param_hint="--float8-exclude")
    rounding = options.quantizing(quantize, quantize_exclude, quantize_head)
    other = "--float8" if float8 else "--quantize"
    if (float8 or rounding) and reference is not None:
        raise typer.BadParameter(f"has no meaning with {other}", param_hint="--reference")
    if float8 and rounding is not None:
        raise typer.BadParameter("give one of the two", param_hint="--float8 or --quantize")
    if float8 or rounding is not None:
        folder = options.folder_of(path)
        load = partial(options.load, folder, dtype, options.device_named(device), attention)
        ids_for = partial(_ids, folder=folder, text=text, tokens=tokens)
        if rounding is not None:
            return _verify_quantized(load, ids_for, rounding, tolerance, as_json)
        return _verify_float8(load, ids_for, float8_exclude or [], tolerance, as_json)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from ligermodels.data.tokenizer import Tokenizer
    from ligermodels.verify import verify as compare

    place = options.device_named(device)
    folder = options.folder_of(path)
    if reference is not None and not reference.is_dir():
        raise InputError(f"--reference {reference}: no such folder")
    ids = None if text is None else Tokenizer(folder).encode(read_text(text, InputError))[:tokens]
    with progress(f"loading {path}", in_bytes=True) as update:
        report = compare(
            folder,
            reference=reference,
            input_ids=ids,
            tokens=tokens,
            dtype=getattr(torch, dtype),
            device=place,
            attention=attention,
            tolerance=tolerance,
            progress=update,
        )
    mismatch = report.first_mismatch
    if as_json:
        content = {
            "passed": report.passed,
            "first_difference": mismatch and mismatch.name,
            "tolerance": report.tolerance,
            "tokens": report.tokens,
            "errors": {each.name: each.error for each in report.places},
        }
        print_json(content)
    else:
        rows = [
            (each.name, each.theirs, f"{each.error:.1e}", "" if each.error <= report.tolerance else "differs")
            for each in report.places
        ]
        show_table(["module", "in transformers", "max relative error", ""], rows, numbers=[2])
        if mismatch:
            typer.echo(
                f"First mismatch: {mismatch.name}: error {mismatch.error:.1e}, tolerance {report.tolerance:.0e}."
            )
        else:
            typer.echo(f"Match: {report.tokens} tokens, every module within {report.tolerance:.0e}.")
    if mismatch:
        raise typer.Exit(1)


def _verify_float8(
    load: Callable[[], CausalLM],
    ids_for: Callable[[CausalLM], Tensor],
    exclude: list[str],
    tolerance: float | None,
    as_json: bool,
) -> None:
    from ligermodels.adapt.float8_agreement import float8_agreement

    model = load()
    ids = ids_for(model)
    with arguments_named(exclude="--float8-exclude"):
        report = float8_agreement(model, ids[None], exclude=exclude)
    if as_json:
        print_json(
            {
                "loss": report.loss,
                "float8_loss": report.float8_loss,
                "tokens": len(ids),
                "gradients": {e.name: {"cosine": e.cosine, "norm_ratio": e.norm_ratio} for e in report.gradients},
            }
        )
    else:
        rows = [(each.name, f"{each.cosine:.5f}", f"{each.norm_ratio:.4f}") for each in report.gradients]
        show_table(["gradient of", "cosine", "ratio of norms"], rows, numbers=[1, 2])
        typer.echo(f"Loss {report.loss:.5f}, in float8 {report.float8_loss:.5f}; the farthest: {report.worst.name}.")
    _require_within(tolerance, report.worst.error, f"the gradient of {report.worst.name}")


SEQ_LEN = 2048
"""Tokens of a sequence whose predictions are compared, at most."""


def _verify_quantized(
    load: Callable[..., CausalLM],
    ids_for: Callable[[CausalLM], Tensor],
    rounding: Callable[[CausalLM], object],
    tolerance: float | None,
    as_json: bool,
) -> None:
    from ligermodels.data.batches import Batch
    from ligermodels.layers.initialization import persistent_tensors
    from ligermodels.speculative.evaluation import evaluate_kl, perplexity

    quantized = load(rounding)
    ids = ids_for(quantized)
    model = load()
    rows = ids.split(min(SEQ_LEN, model.config.max_position_embeddings or SEQ_LEN))
    report = evaluate_kl(
        quantized, model, (Batch({"input_ids": row[None], "labels": row[None]}) for row in rows if len(row) > 1)
    )
    found = {
        "kl": report.kl,
        "perplexity": perplexity(report.reference_loss),
        "quantized_perplexity": perplexity(report.loss),
        "tokens": sum(len(row) - 1 for row in rows),
        "weights_bytes": sum(each.nbytes for each in persistent_tensors(model).values()),
        "quantized_weights_bytes": sum(each.nbytes for each in persistent_tensors(quantized).values()),
    }
    if as_json:
        print_json(found)
    else:
        sizes = [readable_bytes(found[name]) for name in ("weights_bytes", "quantized_weights_bytes")]
        perplexities = [f"{found[name]:.3f}" for name in ("perplexity", "quantized_perplexity")]
        show_table(["", "without", "quantised"], [("perplexity", *perplexities), ("weights", *sizes)], numbers=[1, 2])
        typer.echo(f"KL divergence {report.kl:.5f} nats per token, over {found['tokens']:,} predicted tokens.")
    _require_within(tolerance, report.kl, "the KL divergence")


def _require_within(tolerance: float | None, error: float, what: str) -> None:
    """Exit code 1, with a word why, for an error above the tolerance, if there is one."""
    if tolerance is not None and not error <= tolerance:
        say(f"{what}: {error:.1e} is above --tolerance {tolerance:.1e}")
        raise typer.Exit(1)


def _ids(model: CausalLM, folder: Path, text: Path | None, tokens: int) -> Tensor:
    """The first `tokens` tokens of a text, or random ones, always the same: long (tokens,), on the model's device."""
    import torch

    from ligermodels.data.tokenizer import Tokenizer

    if text is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (tokens,), generator=generator)
    else:
        ids = torch.tensor(Tokenizer(folder).encode(read_text(text, InputError))[:tokens])
    if len(ids) < 2:
        raise InputError("tokens: a loss needs two or more; give more by --tokens, or a longer text")
    return ids.to(model.device)


def export(
    path: models.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    adapter: models.Adapter = None,
    heads: Annotated[
        str | None,
        typer.Option(help="Medusa or MTP heads to write into the checkpoint.  [default: those in PATH, if any]"),
    ] = None,
    dtype: options.DtypeOption = None,
    max_shard_size: MaxShardSize = "5GB",
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Write tensors outside the language model too, such as a vision tower.")
    ] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint in another dtype or with other shards, with an adapter merged into its weights.

    PATH may be heads that name their base model: they are written into its checkpoint. The tokenizer is copied; any
    Hugging Face loader opens the result. `medusa export` writes heads alone.
    """
    options.require_free(out, overwrite)
    if heads is None and (base := models.base_of_heads(path)) is not None:
        path, heads = base, path
    source = models.find(path, adapter)
    if heads is not None:
        options.require_heads(heads)
    if heads is None and models.holds_heads(source.folder):
        heads = str(source.folder)
    if heads is not None and keep_all:
        raise typer.BadParameter("cannot be written together with heads", param_hint="--keep-all")

    from ligermodels.speculative.mtp_files import holds_head

    model = source.load(dtype, "cpu")
    if heads is None and not keep_all and holds_head(model, source.folder):
        heads = str(source.folder)
    if source.adapter is not None:
        from ligermodels.adapt.lora import merge_lora

        merge_lora(model)
    if heads is None:
        keep: Keep = "all" if keep_all else "model"
        model.save_pretrained(out, max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)
    else:
        options.load_heads(model, heads).save_whole(out, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")
