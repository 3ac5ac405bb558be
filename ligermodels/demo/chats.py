"""Fine-tuning on chats by the command line, of the whole model and by LoRA: what Python's built-in names are for."""

from __future__ import annotations

import builtins
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from ligermodels.console import say
from ligermodels.errors import LigerModelsError
from ligermodels.training.folder import METRICS

QUESTIONS = ("What is {}?", "Describe {}.", "Tell me about {}.")
ASKED = 8
"""Names that `chat` is asked about."""


def descriptions() -> dict[str, str]:
    """Built-in name -> the first sentence of its documentation, of those that no other name has."""
    found: dict[str, str] = {}
    for name, value in sorted(vars(builtins).items()):
        text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        sentence = re.match(r"[\x20-\x7e]{10,80}?\.(?=\s|$)", text)
        if callable(value) and not name.startswith("_") and sentence and sentence[0] not in found.values():
            found[name] = sentence[0]
    return found


def write_chats(path: Path, known: Mapping[str, str]) -> None:
    """A chat for each way to ask for each name, as lines of JSON."""
    chats = (
        [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": answer}]
        for name, answer in known.items()
        for question in QUESTIONS
    )
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def fine_tune(model: Path, data: Path, out: Path, flags: Sequence[object]) -> dict[str, float]:
    """`ligermodels train` of a checkpoint: the loss of its first step, and that on the validation split at the end,
    whose questions are other ones than those of the training split."""
    sizes = ("--seq-len", 128, "--batch-tokens", 1024, "--validation-fraction", 0.2, "--report-every", 20)
    run("train", model, "--data", data, "--out", out, *flags, *sizes, "--overwrite")
    lines = [json.loads(line) for line in (out / METRICS).read_text(encoding="utf-8").splitlines()]
    first, last = (
        next(line[key] for line in each if key in line)
        for key, each in (("loss", lines), ("validation_loss", reversed(lines)))
    )
    return {"first_loss": first, "loss": last}


def right_answers(path: Path, known: Mapping[str, str]) -> int:
    """How many of ASKED questions, each in a new conversation, `ligermodels chat` answers word for word."""
    names = list(known)[:: max(1, len(known) // ASKED)][:ASKED]
    turns = "/reset\n".join(QUESTIONS[0].format(name) + "\n" for name in names)
    answers = run("chat", path, "--max-new-tokens", 48, "--greedy", input=turns).splitlines()
    say(f"  > {QUESTIONS[0].format(names[-1])}\n  {answers[-1] if answers else ''}")
    return sum(answer == known[name] for name, answer in zip(names, answers, strict=False))


def run(*arguments: object, input: str = "") -> str:
    """Standard output of a `ligermodels` command on the CPU, in this process; LigerModelsError when it fails."""
    from ligermodels.cli import app

    words = [*map(str, arguments), "--device", "cpu"]
    say(f"  $ ligermodels {shlex.join(words)}")
    output, stdin = io.StringIO(), sys.stdin
    try:
        sys.stdin = io.StringIO(input)
        with redirect_stdout(output):
            code = app(words, standalone_mode=False)
    finally:
        sys.stdin = stdin
    if code:
        raise LigerModelsError(f"`ligermodels {words[0]}` failed with exit code {code}")
    return output.getvalue()
