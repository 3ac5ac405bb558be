"""`ligermodels export`."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

import typer

from ligermodels.cli import models, options
from ligermodels.console import say


def export(
    path: models.Model,
    out: options.Out,
    adapter: models.Adapter = None,
    heads: Annotated[
        str | None,
        typer.Option(help="Medusa or MTP heads to write into the checkpoint.  [default: the heads in PATH, unchanged]"),
    ] = None,
    dtype: options.DtypeOption = None,
    max_shard_size: options.MaxShardSize = "5GB",
    keep: Annotated[
        Literal["all", "without-heads", "model"],
        typer.Option(
            help="What of PATH to write: all, with tensors outside the language model (a vision tower, draft heads) "
            "unchanged; all without draft heads, for loaders that refuse them; or the language model alone."
        ),
    ] = "all",
    keep_all: Annotated[bool, typer.Option("--keep-all", hidden=True)] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint, its language model in another dtype, with other shards, or with an adapter merged into it.

    PATH may be heads that name their base model: they are written into its checkpoint. The tokenizer is copied.
    `medusa export` writes heads alone.
    """
    options.require_free(out, overwrite)
    if heads is None and (base := models.base_of_heads(path)) is not None:
        path, heads = base, path
    source = models.find(path, adapter)
    if heads is not None:
        options.require_heads(heads)
    if heads is not None and keep != "all":
        raise typer.BadParameter(f"{keep} does not go with --heads; leave one of them out", param_hint="--keep")
    if keep_all:
        warnings.warn("--keep-all is now the default", DeprecationWarning, stacklevel=2)
    model = source.load(options.Loading(dtype=dtype, device="cpu"))
    if source.adapter is not None:
        from ligermodels.adapt.lora import merge_lora

        merge_lora(model)
    if heads is None:
        model.save_pretrained(out, max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)
    else:
        options.load_heads(model, heads).save_whole(out, max_shard_size=max_shard_size, overwrite=overwrite)
    say(f"wrote {out}")
