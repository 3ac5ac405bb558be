"""`ligermodels chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ligermodels.cli import models, options
from ligermodels.cli.decoding import Decoding
from ligermodels.cli.flags import with_groups
from ligermodels.console import say
from ligermodels.errors import InputError

if TYPE_CHECKING:
    from ligermodels.data.chat import Message

COMMANDS = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer or, after it, ends"


@with_groups
def chat(
    path: models.Model,
    adapter: models.Adapter = None,
    system: Annotated[str | None, typer.Option(help="The system turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer.")] = 1024,
    chat_template: options.ChatTemplate = None,
    *,
    decoding: Decoding,
    loading: options.Loading,
) -> None:
    """Chat with a model: one turn per line, from the terminal or from standard input.

    /reset starts a new conversation with the same system turn; /exit or the end of the input ends the chat. Answers go
    to standard output, messages to standard error.
    """
    from ligermodels.data.chat import ChatTemplate, end_of_turn
    from ligermodels.data.tokenizer import Tokenizer
    from ligermodels.generation.context_length import context_length
    from ligermodels.generation.generate import as_eos_ids
    from ligermodels.generation.text_stream import TextStream

    options.device_named(loading.device)
    source = models.find(path, adapter)
    if decoding.heads is not None:
        options.require_heads(decoding.heads)
    tokenizer = Tokenizer(source.tokenizer)
    template = ChatTemplate.from_folder(source.tokenizer, chat_template or source.chat_template)
    model = source.load(loading)
    heads = decoding.load_heads(model)
    arguments = decoding.arguments(model, max_new_tokens)
    # Some checkpoints name only the end of a text as their EOS, not the token that ends a turn.
    ends = {*as_eos_ids(decoding.defaults(model).get("eos_token_id")), *end_of_turn(template, tokenizer)}
    if ends:
        arguments["eos_token_id"] = sorted(ends)
    context = context_length(model)

    def answer(messages: list[Message], show: Callable[[str], None]) -> None:
        text = template.render(messages, add_generation_prompt=True)
        prompt = tokenizer.encode_with_offsets(text)[0]
        if context is not None and len(prompt) > context:
            say(f"the chat has {len(prompt):,} tokens, and the model's context has {context:,}; /reset")
        stream = TextStream(tokenizer, prompt)

        def push(tokens: list[int]) -> None:
            for token in tokens:
                if token not in ends:
                    show(stream.push(token))

        if heads is not None:
            heads.generate([prompt], on_tokens=lambda rows: push(rows[0]), **arguments)
        else:
            model.generate([prompt], on_token=lambda tokens: push(tokens.tolist()), **arguments)
        show(stream.flush())

    converse(answer, [] if system is None else [{"role": "system", "content": system}])


def converse(answer: Callable[[list[Message], Callable[[str], None]], None], opening: list[Message]) -> None:
    """Read turns of the user, print the answers and keep them in the conversation, until the end of the input."""
    messages = list(opening)
    if sys.stdin.isatty():
        say(COMMANDS)
    for turn in _turns():
        if turn == "/exit":
            break
        if turn == "/reset":
            messages = list(opening)
            say("a new conversation")
            continue
        messages.append({"role": "user", "content": turn})
        parts: list[str] = []

        def show(text: str, parts: list[str] = parts) -> None:
            parts.append(text)
            print(text, end="", flush=True)

        try:
            answer(messages, show)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                print(flush=True)
                raise
        print(flush=True)
        messages.append({"role": "assistant", "content": "".join(parts)})


def _turns() -> Iterator[str]:
    """Non-empty lines of the user, up to the end of the input or Ctrl-C at an empty prompt."""
    if not sys.stdin.isatty():
        try:
            yield from filter(None, map(str.strip, sys.stdin))
        except UnicodeDecodeError as error:
            raise InputError(f"standard input: not UTF-8 text: {error}") from None
        return
    with suppress(ImportError):  # not on Windows; for editing and recalling lines
        import readline  # noqa: F401
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if turn := input("> ").strip():
                yield turn
    print()
