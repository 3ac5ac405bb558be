"""`ligermodels generate`: text from prompts."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ligermodels.cli import models, options
from ligermodels.cli.decoding import Decoding
from ligermodels.cli.flags import with_groups
from ligermodels.console import print_json, say
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ligermodels.generation.text_stream import TextStream
    from ligermodels.models.causal_lm import CausalLM
    from ligermodels.speculative.multi_head import MultiHeadModel


@with_groups
def generate(
    path: models.Model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue. May be repeated.  [default: standard input]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    adapter: models.Adapter = None,
    *,
    decoding: Decoding,
    loading: options.Loading,
    as_json: options.AsJson = False,
) -> None:
    """Continue prompts.

    The text goes to standard output, the speed to standard error.
    """
    prompts = prompt or [_standard_input()]
    if "" in prompts:
        raise InputError(f"prompt {prompts.index('') + 1} is empty: give it some text")

    from ligermodels.data.tokenizer import Tokenizer
    from ligermodels.generation.generate import as_eos_ids, until_eos
    from ligermodels.generation.text_stream import TextStream

    options.device_named(loading.device)
    source = models.find(path, adapter)
    if decoding.heads is not None:
        options.require_heads(decoding.heads)
    tokenizer = Tokenizer(source.tokenizer)
    ids = [tokenizer.encode(text) for text in prompts]
    model = source.load(loading)
    heads = decoding.load_heads(model)
    arguments = decoding.arguments(model, max_new_tokens)
    eos = as_eos_ids(decoding.defaults(model).get("eos_token_id"))

    stream = TextStream(tokenizer, ids[0]) if len(ids) == 1 and not as_json else None
    start = time.perf_counter()
    try:
        sequences, report = _decode(model, heads, ids, stream, arguments)
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
    if stream:
        completions[0]["completion"] = stream.flush()  # all else is printed already
    _show(completions, report, heads)


def _show(completions: list[dict[str, Any]], report: dict[str, Any], heads: MultiHeadModel | None) -> None:
    for completion in completions:
        if len(completions) > 1:
            typer.echo(f"--- {completion['prompt']}")
        typer.echo(completion["completion"])
    seconds, speed = report["seconds"], report["tokens_per_second"]
    say(f"{report['new_tokens']} tokens in {seconds:.2f} s, {speed:.1f} tokens/s")
    if heads:
        say(f"{heads.kind}: {report['steps']} steps, {report['tokens_per_step']:.2f} tokens per step")


def _decode(
    model: CausalLM,
    heads: MultiHeadModel | None,
    ids: list[list[int]],
    stream: TextStream | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """The sequences, and with heads the numbers of their steps. With a `stream` the text is printed token by token."""

    def show(tokens: list[int]) -> None:
        if stream:
            print("".join(map(stream.push, tokens)), end="", flush=True)

    if heads:
        on_tokens = (lambda rows: show(rows[0])) if stream else None
        out = heads.generate(ids, return_stats=True, on_tokens=on_tokens, **arguments)
        return out.sequences, {"steps": out.steps, "tokens_per_step": out.tokens_per_step}
    on_token = (lambda tokens: show(tokens.tolist())) if stream else None
    return model.generate(ids, on_token=on_token, **arguments), {}


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give one, or text on standard input", param_hint="--prompt")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 text: {error}") from None
