"""`ligermodels lora`: adapters in PEFT's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ligermodels.arguments import ExpertFormat
from ligermodels.cli import checkpoint, models, options
from ligermodels.console import say
from ligermodels.errors import InputError

app = typer.Typer(no_args_is_help=True)

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="A folder, or a hub id, in PEFT's format.")]
Base = Annotated[
    str | None, typer.Option(help="The base model, a folder or a hub id.  [default: as in the adapter or the run]")
]
Experts = Annotated[
    ExpertFormat | None,
    typer.Option(
        "--expert-format",
        help="Names of the LoRA of experts.  [default: as in the adapter; of a run target_parameters, for PEFT]",
    ),
]


@app.command("merge")
def _merge(
    path: options.Checkpoint,
    adapter: Adapter,
    out: options.Out,
    dtype: options.DtypeOption = None,
    max_shard_size: options.MaxShardSize = "5GB",
    overwrite: options.Overwrite = False,
) -> None:
    """Write a checkpoint with a LoRA adapter added to its weights: `export --adapter`."""
    checkpoint.export(path, out, adapter=adapter, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)


@app.command("to-hf")
def _to_hf(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The folder of a run of `train --lora-rank`; or an adapter, to write it again."
        ),
    ],
    out: options.Out,
    step: Annotated[
        int | None, typer.Option(min=1, help="Step of the run's checkpoint.  [default: the newest]")
    ] = None,
    base: Base = None,
    expert_format: Experts = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write the adapter in a checkpoint of a run in PEFT's format, as the run does at its end.

    The run may still train, or have been stopped or killed. `train --keep-checkpoints` keeps more checkpoints.
    """
    from ligermodels.training.folder import has_checkpoints

    if not has_checkpoints(Path(source)):
        if step is not None:
            raise InputError(f"--step: there are no checkpoints of a run in {source}")
        _rewrite(source, out, base, None, expert_format, overwrite)
        return
    from ligermodels.training.fine_tuning import export_adapter

    names = expert_format or "target_parameters"
    step = export_adapter(source, out, step=step, base=base, expert_format=names, overwrite=overwrite)
    say(f"wrote {out}, of step {step:,}")


@app.command("from-hf")
def _from_hf(
    adapter: Adapter,
    out: options.Out,
    base: Base = None,
    dtype: Annotated[
        options.Dtype | None, typer.Option("--dtype", help="Dtype of A and B.  [default: as they are stored]")
    ] = None,
    expert_format: Experts = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Check that an adapter in PEFT's format opens on its base model, and write it again with the same bits.

    Every tensor must be an A or a B of a linear layer of the base model, with the rank in the config; a field that is
    not implemented is an error that names it. No weights of the base model are read. The native format is PEFT's, so
    all commands open such an adapter without this.
    """
    _rewrite(adapter, out, base, dtype, expert_format, overwrite)


def _rewrite(
    adapter: str,
    out: Path,
    base: str | None,
    dtype: options.Dtype | None,
    expert_format: ExpertFormat | None,
    overwrite: bool,
) -> None:
    from ligermodels.adapt.adapter import rewrite_adapter
    from ligermodels.pretrained import from_pretrained

    options.require_free(out, overwrite)
    folder = models.adapter_folder(adapter)
    name, revision = (base, None) if base else models.base_named(folder)
    model = models.export_with_tokenizer(from_pretrained(name, revision=revision, device="meta"), folder)
    rewrite_adapter(model, folder, out, dtype=dtype, expert_format=expert_format, overwrite=overwrite)
    say(f"wrote {out}")
