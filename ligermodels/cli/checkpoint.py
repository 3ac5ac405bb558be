"""`ligermodels export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.cli import models, options
from ligermodels.console import say

if TYPE_CHECKING:
    from ligermodels.convert.export_spec import Keep


MaxShardSize = Annotated[str, typer.Option(help="Largest weight file, as 5GB or 500MB.")]


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
