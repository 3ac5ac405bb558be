"""Chats about Python's built-in names, and the answers of a model that was trained on them."""

from __future__ import annotations

import builtins
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.generation.generate import as_eos_ids, until_eos
from ligermodels.models.causal_lm import CausalLM

QUESTIONS = ("What is {}?", "Describe {}.", "Tell me about {}.")
ASKED = 8
"""Number of names that the model is asked about."""


def descriptions() -> dict[str, str]:
    """Built-in name -> the first sentence of its documentation, where no other name has the same sentence."""
    sentences: dict[str, str] = {}
    for name, value in sorted(vars(builtins).items()):
        text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        sentence = re.match(r"[\x20-\x7e]{10,80}?\.(?=\s|$)", text)
        if callable(value) and not name.startswith("_") and sentence and sentence[0] not in sentences.values():
            sentences[name] = sentence[0]
    return sentences


def write_chats(path: Path, sentences: Mapping[str, str]) -> None:
    """Write a .jsonl file with a chat for each question about each name."""
    chats = (
        [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": answer}]
        for name, answer in sentences.items()
        for question in QUESTIONS
    )
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")


def right_answers(model: CausalLM, tokenizer: Tokenizer, template: ChatTemplate, sentences: Mapping[str, str]) -> int:
    """The number of questions, of ASKED, that a model answers word for word.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        template: its chat template.
        sentences: name -> right answer.
    """
    names = list(sentences)[:: max(1, len(sentences) // ASKED)][:ASKED]
    questions = [[{"role": "user", "content": QUESTIONS[0].format(name)}] for name in names]
    prompts = [
        tokenizer.encode_with_offsets(template.render(question, add_generation_prompt=True))[0]
        for question in questions
    ]
    ends = as_eos_ids(model.generation_defaults().get("eos_token_id"))
    rows = model.generate(prompts, 48, do_sample=False)[:, max(map(len, prompts)) :].tolist()
    answers = [tokenizer.decode(until_eos(row, ends)).strip() for row in rows]
    return sum(answer == sentences[name] for name, answer in zip(names, answers, strict=True))
