"""`ligermodels generate`: text from prompts."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ligermodels.cli import options
from ligermodels.console import print_json, say
from ligermodels.errors import InputError


def generate(
    path: options.Checkpoint,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.  [default: standard input]")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    sample: Annotated[
        bool | None, typer.Option("--sample/--greedy", help="Sample, or not.  [default: as the checkpoint says]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature. With --medusa: that of typical acceptance, which accepts tokens other than "
            "the greedy ones."
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="With --sample: only the K most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="With --sample: the smallest set of tokens of total probability P.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --sample: seed.")] = None,
    medusa: Annotated[
        str | None, typer.Option(help="Medusa heads, a folder or a hub id: the same tokens in fewer steps.")
    ] = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    attention: options.Attention = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Continue prompts.

    The text goes to standard output, the speed to standard error.
    """
    shaping: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    shaping = {name: value for name, value in shaping.items() if value is not None}
    if medusa and (sample or seed is not None or shaping.keys() - {"temperature"}):
        raise typer.BadParameter(
            "Medusa decoding does not sample; leave --sample, --top-k, --top-p and --seed out", param_hint="--medusa"
        )
    if sample is False and not medusa and (shaping or seed is not None):
        raise typer.BadParameter("--temperature, --top-k, --top-p and --seed need --sample")
    prompts = prompt or [_standard_input()]
    for number, text in enumerate(prompts, start=1):
        if not text:
            raise InputError(f"prompt {number} is empty: give it some text")

    import torch

    from ligermodels.data.tokenizer import TextStream, Tokenizer
    from ligermodels.generation.generate import as_eos_ids, until_eos

    place = options.device_named(device)
    folder = options.folder_of(path)
    tokenizer = Tokenizer(folder)
    ids = [tokenizer.encode(text) for text in prompts]
    model = options.load(folder, dtype, place, attention)
    heads = options.load_heads(model, medusa) if medusa else None

    defaults = model.generation_defaults()
    eos = as_eos_ids(defaults.get("eos_token_id"))
    chosen: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if not eos and defaults.get("pad_token_id") is None:
        chosen["pad_token_id"] = 0  # masked, and no sequence ends early without an EOS
    sampling = defaults.get("do_sample", False) if sample is None else sample
    if not sampling and not medusa and (shaping or seed is not None):
        raise typer.BadParameter("--temperature, --top-k, --top-p and --seed need --sample")
    chosen["do_sample"] = bool(sampling) and not medusa
    if chosen["do_sample"]:
        generator = torch.Generator(place)
        generator.manual_seed(generator.seed() if seed is None else seed)
        chosen |= {"generator": generator, **shaping}

    stream = TextStream(tokenizer, ids[0]) if len(ids) == 1 and not as_json else None
    start = time.perf_counter()
    report: dict[str, Any] = {}
    if heads:
        if (penalty := defaults.get("repetition_penalty", 1.0)) != 1.0:
            say(f"Medusa: the checkpoint's repetition_penalty {penalty} is not applied")
        out = heads.generate(ids, return_stats=True, **chosen, **shaping, repetition_penalty=1.0)
        sequences, report = out.sequences, {"steps": out.steps, "tokens_per_step": out.tokens_per_step}
    elif stream:
        sequences = model.generate(
            ids, on_token=lambda token: print(stream.push(int(token[0])), end="", flush=True), **chosen
        )
    else:
        sequences = model.generate(ids, **chosen)
    new = [until_eos(row, eos) for row in sequences[:, max(map(len, ids)) :].tolist()]
    seconds = time.perf_counter() - start

    completions = [
        {"prompt": text, "completion": tokenizer.continuation(before, after), "new_tokens": len(after)}
        for text, before, after in zip(prompts, ids, new, strict=True)
    ]
    count = sum(map(len, new))
    report |= {"new_tokens": count, "seconds": seconds, "tokens_per_second": count / seconds}
    if as_json:
        print_json({"completions": completions, **report})
        return
    for one in completions:
        if len(completions) > 1:
            typer.echo(f"--- {one['prompt']}")
        typer.echo(stream.flush() if stream and not heads else one["completion"])
    say(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s")
    if heads:
        say(f"Medusa: {report['steps']} steps, {report['tokens_per_step']:.2f} tokens per step")


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give one, or text on standard input", param_hint="--prompt")
    return sys.stdin.read().removesuffix("\n")
