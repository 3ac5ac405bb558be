"""`ligermodels generate`: text from prompts."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from ligermodels.cli import decoding, models, options
from ligermodels.console import print_json, say
from ligermodels.errors import InputError


def generate(
    path: models.Model,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.  [default: standard input]")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    sample: decoding.Sample = None,
    temperature: decoding.Temperature = None,
    top_k: decoding.TopK = None,
    top_p: decoding.TopP = None,
    seed: decoding.Seed = None,
    medusa: Annotated[
        str | None,
        typer.Option(
            "--medusa",
            "--heads",
            help="Medusa or MTP heads, a folder or a hub id (PATH, if it holds them): the same tokens in fewer steps.",
        ),
    ] = None,
    adapter: models.Adapter = None,
    dtype: options.DtypeOption = None,
    device: options.Device = None,
    attention: options.Attention = "auto",
    quantize: options.Quantize = None,
    quantize_exclude: options.QuantizeExclude = None,
    quantize_head: options.QuantizeHead = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue prompts.

    The text goes to standard output, the speed to standard error.
    """
    given = decoding.Decoding(max_new_tokens, sample, temperature, top_k, top_p, seed, medusa=medusa is not None)
    rounding = options.quantizing(quantize, quantize_exclude, quantize_head)
    prompts = prompt or [_standard_input()]
    for number, text in enumerate(prompts, start=1):
        if not text:
            raise InputError(f"prompt {number} is empty: give it some text")

    from ligermodels.data.tokenizer import TextStream, Tokenizer
    from ligermodels.generation.generate import as_eos_ids, until_eos

    place = options.device_named(device)
    source = models.find(path, adapter)
    if medusa is not None:
        options.require_heads(medusa)
    tokenizer = Tokenizer(source.tokenizer)
    ids = [tokenizer.encode(text) for text in prompts]
    model = source.load(dtype, place, attention, rounding)
    heads = options.load_heads(model, medusa) if medusa else None

    arguments = given.arguments(model, place)
    eos = as_eos_ids(model.generation_defaults().get("eos_token_id"))

    stream = TextStream(tokenizer, ids[0]) if len(ids) == 1 and not as_json else None
    start = time.perf_counter()
    report: dict[str, Any] = {}

    def show(tokens: list[int]) -> None:
        if stream:
            print("".join(map(stream.push, tokens)), end="", flush=True)

    try:
        if heads:
            on_tokens = (lambda rows: show(rows[0])) if stream else None
            out = heads.generate(ids, return_stats=True, on_tokens=on_tokens, **arguments)
            sequences, report = out.sequences, {"steps": out.steps, "tokens_per_step": out.tokens_per_step}
        else:
            on_token = (lambda tokens: show(tokens.tolist())) if stream else None
            sequences = model.generate(ids, on_token=on_token, **arguments)
    except KeyboardInterrupt:
        if stream:
            print(stream.flush(), flush=True)
        raise
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
        typer.echo(stream.flush() if stream else one["completion"])
    say(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s")
    if heads:
        say(f"{heads.kind}: {report['steps']} steps, {report['tokens_per_step']:.2f} tokens per step")


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give one, or text on standard input", param_hint="--prompt")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 text: {error}") from None
