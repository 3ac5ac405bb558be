"""`ligermodels plan`: the fastest ways to shard the training of a model over GPUs, and whether it fits at all."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ligermodels.arguments import OptimizerName, QuantizedFormat
from ligermodels.cli.options import AsJson
from ligermodels.console import print_json, readable_bytes, say, show_table
from ligermodels.errors import InputError, arguments_named

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.parallel.advice import Candidate

DEGREES = ("replicate", "shard", "context", "tensor", "expert")


def plan(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A config.json, its folder, or a hub id; no weights are read.")
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")],
    memory: Annotated[str, typer.Option(help="Memory of each GPU, such as 80GB or 141GB.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per optimizer step, over all GPUs.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Train LoRA of this rank.")] = None,
    lora_targets: Annotated[
        list[str] | None, typer.Option(help="With --lora-rank: as in `train`, such as experts. May be repeated.")
    ] = None,
    quantize: Annotated[
        QuantizedFormat | None, typer.Option(help="With --lora-rank: quantise the frozen weights (QLoRA).")
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer.")] = "adamw",
    optimizer_in_bwd: Annotated[
        bool, typer.Option("--optimizer-in-bwd", help="Update each parameter in the backward pass.")
    ] = False,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Dtype of the parameters.")] = "bfloat16",
    reduce_dtype: Annotated[
        Literal["bfloat16", "float32"] | None, typer.Option(help="Dtype of sums of gradients over GPUs.")
    ] = None,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs that NVLink connects.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Show the training plans that fit the GPUs, the fastest first, with their memory.

    The memory is computed by running the step on the meta device; experts get a quarter more tokens than their share.
    Times are estimated for H200s, in bfloat16 for any dtype.
    """
    size = memory_size(memory)
    _check_gpus(gpus, gpus_per_host, reduce_dtype)
    from ligermodels.convert.config_json import dtype_of
    from ligermodels.ops.runtime.tensors import dtype_named
    from ligermodels.parallel.advice import candidates
    from ligermodels.parallel.cost import Hardware
    from ligermodels.pretrained import from_config

    model = from_config(checkpoint, dtype=dtype_named(dtype), device="meta")
    _prepare(model, lora_rank, lora_targets or [], quantize)
    hardware = Hardware(gpus_per_host=gpus_per_host)
    states: dict[str, Any] = {
        "optimizer": optimizer,
        "optimizer_in_bwd": optimizer_in_bwd,
        "reduce_dtype": reduce_dtype,
    }
    plans = candidates(model, gpus, size, tokens, seq_len, hardware=hardware, **states)
    rows = [_facts(plan, tokens, seq_len) for plan in plans]
    if as_json:
        print_json(rows)
        return
    fastest = rows[0]
    columns = _columns(rows, gpus)
    show_table(columns, [_row(row, columns) for row in rows], numbers=range(len(columns)))
    flags = f"--batch-tokens {tokens} --seq-len {seq_len}"
    chosen = {
        "--dtype": dtype if dtype_named(dtype) != dtype_of(model.hf_config) else None,  # the default of `train`
        "--lora-rank": lora_rank,
        "--quantize": quantize,
        "--optimizer": optimizer if optimizer != "adamw" else None,
        "--reduce-dtype": reduce_dtype,
    }
    flags += "".join(f" {name} {value}" for name, value in chosen.items() if value)
    flags += "".join(f" --lora-targets {shlex.quote(target)}" for target in lora_targets or [])
    flags += " --optimizer-in-bwd" * optimizer_in_bwd
    say(f"fastest by the arithmetic: {_command(checkpoint, fastest, flags, gpus, gpus_per_host)}")
    if plans[0].cost.launch_s == plans[0].cost.seconds:
        say("the CPU, which launches the kernels, is the limit: passes of more tokens take no longer")
    model.activation_checkpointing = plans[0].activation_checkpointing
    _say_memory_of(model, plans[0], tokens, seq_len, size, states)


def _columns(rows: list[dict[str, Any]], gpus: int) -> list[str]:
    """The columns of the table: some only if plans differ in them."""
    columns = [name for name in DEGREES if name in DEGREES[:2] or any(row[name] > 1 for row in rows)]
    columns += ["FSDP unit"] * any(row["fsdp_unit"] != "block" for row in rows)
    columns += ["checkpointing", "micro-batch", "memory", "states", "activations"]
    columns += ["host memory"] * any(row["host_bytes"] for row in rows)
    return columns + ["waiting"] * (gpus > 1) + ["tokens/s"]


def _check_gpus(gpus: int, gpus_per_host: int, reduce_dtype: str | None) -> None:
    """BadParameter unless the GPUs fill whole hosts, and are several if there are sums over GPUs."""
    if gpus > gpus_per_host and gpus % gpus_per_host:
        raise typer.BadParameter(f"must be whole hosts of {gpus_per_host} (--gpus-per-host)", param_hint="--gpus")
    if reduce_dtype is not None and gpus == 1:
        raise typer.BadParameter("is for several GPUs", param_hint="--reduce-dtype")


def _say_memory_of(
    model: CausalLM, plan: Candidate, tokens: int, seq_len: int, memory: int, states: dict[str, Any]
) -> None:
    """Print the memory of the fastest plan in its worst case, and memory and speed without resharding if that fits. The
    model has the plan's activation checkpointing."""
    from ligermodels.parallel.advice import RESERVED, memory_of

    if plan.degrees.expert > 1:
        worst = memory_of(model, plan, seq_len, expert_load=float(plan.degrees.expert), **states)
        say(f"with all tokens at the experts of one GPU that takes {readable_bytes(worst.total)}; nothing is dropped")
    if plan.degrees.shard * plan.degrees.context > 1 and plan.fsdp_unit == "block":
        kept = memory_of(model, plan, seq_len, reshard_after_forward=False, **states).total
        if kept <= memory * (1 - RESERVED):
            speed = f"{tokens / plan.cost_gathered_once.seconds:,.0f} tokens/s"
            say(
                "--no-reshard-after-forward gathers each block once a step instead of twice: "
                f"{readable_bytes(kept)}, {speed}"
            )


def _prepare(model: CausalLM, lora_rank: int | None, lora_targets: list[str], quantize: QuantizedFormat | None) -> None:
    """Quantise the weights and add LoRA to the model, as `train` does."""
    from ligermodels.adapt.lora import add_lora
    from ligermodels.adapt.quantize import quantize as quantize_weights

    if lora_rank is None:
        for given, name in ((quantize, "--quantize"), (lora_targets, "--lora-targets")):
            if given:
                raise typer.BadParameter("is for LoRA; give --lora-rank too", param_hint=name)
        return
    if quantize is not None:
        quantize_weights(model, quantize)
    with arguments_named(r="--lora-rank", target_modules="--lora-targets"):
        add_lora(model, lora_rank, target_modules=lora_targets or "all-linear")


def _command(checkpoint: str, plan: dict[str, Any], flags: str, gpus: int, gpus_per_host: int) -> str:
    """The command that trains by a plan, as a shell takes it."""
    checkpoint = shlex.quote(checkpoint)
    flags = f"--activation-checkpointing {plan['activation_checkpointing']} {flags}"
    flags += f" --micro-batch-tokens {plan['micro_batch_tokens']}"
    if gpus == 1:
        return f"ligermodels train {checkpoint} {flags}"
    flags += "".join(f" --{name} {plan[name]}" for name in DEGREES if name in DEGREES[:2] or plan[name] > 1)
    flags += f" --fsdp-unit {plan['fsdp_unit']}" if plan["fsdp_unit"] != "block" else ""
    hosts = -(-gpus // gpus_per_host)
    if hosts == 1:
        return f"ligermodels train {checkpoint} --gpus {gpus} {flags}"
    return f"torchrun --nnodes {hosts} --nproc-per-node {gpus // hosts} -m ligermodels train {checkpoint} {flags}"


def memory_size(text: str) -> int:
    """Bytes of "80GB", "141 GB" or "79.6GiB"; typer.BadParameter for anything else."""
    from ligermodels.convert.safetensors_writer import parse_size

    try:
        size = parse_size(text)
    except InputError:
        raise typer.BadParameter(f"must be a size such as 80GB, got {text!r}", param_hint="--memory") from None
    if size < 2**20:
        raise typer.BadParameter(f"{text!r} is {size:,} bytes; give a unit, as in 80GB", param_hint="--memory")
    return size


def _facts(plan: Any, tokens: int, seq_len: int) -> dict[str, Any]:
    memory, cost = plan.memory, plan.cost
    return {
        **{name: getattr(plan.degrees, name) for name in DEGREES},
        "fsdp_unit": plan.fsdp_unit,
        "activation_checkpointing": plan.activation_checkpointing,
        "micro_batch_tokens": plan.micro_batch * seq_len,
        "memory_bytes": memory.total,
        "weights_bytes": memory.weights,
        "optimizer_bytes": memory.optimizer_states,
        "gathered_bytes": memory.gathered,
        "activations_bytes": memory.activations,
        "backward_bytes": memory.backward,
        "host_bytes": memory.host,
        "sent_bytes": dict(cost.sent),
        "step_s": cost.seconds,
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
        "update_s": cost.update_s,
        "launch_s": cost.launch_s,
        "tokens_per_s": tokens / cost.seconds,
    }


def _row(facts: dict[str, Any], columns: list[str]) -> tuple[str, ...]:
    states = facts["weights_bytes"] + facts["optimizer_bytes"] + facts["gathered_bytes"]
    cells = {
        **{name: str(facts[name]) for name in DEGREES},
        "FSDP unit": facts["fsdp_unit"],
        "checkpointing": facts["activation_checkpointing"],
        "micro-batch": f"{facts['micro_batch_tokens']:,}",
        "memory": readable_bytes(facts["memory_bytes"]),
        "states": readable_bytes(states),
        "activations": readable_bytes(facts["activations_bytes"]),
        "host memory": readable_bytes(facts["host_bytes"]),
        "waiting": f"{facts['exposed_s'] / facts['step_s']:.0%}",
        "tokens/s": f"{facts['tokens_per_s']:,.0f}",
    }
    return tuple(cells[name] for name in columns)
