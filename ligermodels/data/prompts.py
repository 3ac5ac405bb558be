"""Prompts from documents: beginnings of texts, and chats up to a turn of the assistant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ligermodels.data.chat import Message
from ligermodels.data.corpus import Indices, permutation
from ligermodels.data.documents import Documents
from ligermodels.errors import CheckpointError, InputError


@dataclass
class OpenChat:
    """A chat up to a turn of the assistant: the messages so far, those still to come, and the template's variables."""

    messages: list[Message]
    rest: list[Message]
    variables: dict[str, Any]

    def prompt(self, documents: Documents, index: int) -> list[int] | None:
        """Tokens up to the assistant's next turn in document `index`; None where there is no further one."""
        while self.rest and self.rest[0]["role"] != "assistant":
            self.messages.append(self.rest.pop(0))
        if not self.rest or self.rest.pop(0).get("tool_calls"):  # The tool's answer is to the original call.
            self.rest = []
            return None
        try:
            text = documents.template.render(self.messages, add_generation_prompt=True, **self.variables)
        except CheckpointError:  # There is no template: not the chat's fault.
            raise
        except InputError as error:
            documents.skip(index, str(error))
            self.rest = []
            return None
        return documents.tokenizer.encode_with_offsets(text)[0]


def opening_prompts(
    documents: Documents, indices: Indices, count: int, *, prompt_tokens: int, seed: int = 0
) -> list[list[int]]:
    """Up to `count` prompts (token ids) from documents: the first `prompt_tokens` tokens of a text or of a piece of a
    long one, and a chat up to the assistant's first turn. Where there are too few documents, files of text give
    further pieces of `prompt_tokens` tokens, spread over all of them.

    `seed` decides which documents. Prompts are distinct, and each has a token that is not special. Raises InputError
    for more unusable lines than allowed, CheckpointError for chats without a template.
    """
    tokenizer, found, further = documents.tokenizer, list[list[int]](), list[list[int]]()
    special = set(map(tokenizer.backend.token_to_id, tokenizer.special_tokens()))
    for index in map(int, indices[permutation(len(indices), seed, "prompts")]):
        if len(found) == count:
            break
        record = documents.records([index])[0]
        if isinstance(record, str):
            ids = tokenizer.encode(record)
            prompt, starts = ids[:prompt_tokens], range(prompt_tokens, len(ids) - prompt_tokens + 1, prompt_tokens)
            if not documents.corpus.is_line(index):
                further += [ids[start : start + prompt_tokens] for start in starts]
        else:
            prompt = (record and OpenChat([], *record).prompt(documents, index)) or []
        if prompt not in found and not special.issuperset(prompt):
            found.append(prompt)
    for prompt in further[:: max(1, len(further) // max(1, count - len(found)))]:
        if len(found) < count and prompt not in found and not special.issuperset(prompt):
            found.append(prompt)
    return found
