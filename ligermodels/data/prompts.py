"""Prompts for generation: beginnings of texts, and chats up to a turn of the assistant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ligermodels.data.chat import Message
from ligermodels.data.documents import Documents
from ligermodels.data.orders import Indices, permutation
from ligermodels.data.records import Completion
from ligermodels.errors import CheckpointError, InputError


@dataclass
class OpenChat:
    """A chat up to a turn of the assistant.

    messages: the messages so far.
    rest: the following messages of the document; turns of the assistant in it are to be generated, except those with
        `weight` 0.
    variables: further variables of the chat template.
    """

    messages: list[Message]
    rest: list[Message]
    variables: dict[str, Any]

    def prompt(self, documents: Documents, index: int) -> list[int] | None:
        """Move on to the assistant's next turn; the tokens before it, or None if there is no further turn.

        A turn before the user's first one is kept as it is, with `weight` 0, if the template refuses to prompt for it.

        Args:
            documents: documents with the tokenizer and the chat template.
            index: index of the document; it is reported as unusable if the template refuses the messages.

        Raises:
            InputError: more unusable lines than allowed.
            CheckpointError: there is no usable chat template.
        """
        while True:
            while self.rest and (self.rest[0]["role"] != "assistant" or self.rest[0].get("weight") == 0):
                self.messages.append(self.rest.pop(0))
            if not self.rest or (turn := self.rest.pop(0)).get("tool_calls"):
                self.rest = []  # The tool's answer belongs to the original call.
                return None
            try:
                text = documents.template.render(self.messages, add_generation_prompt=True, **self.variables)
                return documents.tokenizer.encode_with_offsets(text)[0]
            except CheckpointError:  # The template is missing or unusable: the chat is not at fault.
                raise
            except InputError as error:
                if any(message["role"] == "user" for message in self.messages):
                    documents.skip(index, str(error))
                    self.rest = []
                    return None
                self.messages.append({**turn, "weight": 0})  # Some templates need a question: this turn is no answer.


def text_prompt(documents: Documents, record: Completion, prompt_tokens: int) -> list[int]:
    """The prompt of a text.

    Args:
        documents: documents with the tokenizer.
        record: the text.
        prompt_tokens: tokens of the prompt, if the text has none of its own.

    Returns:
        Token ids of the record's own prompt, or of the beginning of its text.
    """
    ids = documents.encoder.prompt(record.prompt or record.completion)
    return ids if record.prompt else ids[:prompt_tokens]


def opening_prompts(
    documents: Documents, indices: Indices, count: int, *, prompt_tokens: int, seed: int = 0
) -> list[list[int]]:
    """Prompts from documents: the beginning of a text, the prompt of a completion, and a chat up to the assistant's
    first turn.

    Prompts are distinct, and have more than special tokens. If there are too few documents, text files provide more
    prompts, spread over all their text.

    Args:
        documents: the documents.
        indices: the documents to use, int64.
        count: most prompts.
        prompt_tokens: tokens of a prompt from a text; prompts from chats have any length.
        seed: selects the documents.

    Returns:
        Up to `count` lists of token ids.

    Raises:
        InputError: more unusable lines than allowed.
        CheckpointError: there are chats, but no usable chat template.
    """
    tokenizer, prompts, further = documents.tokenizer, list[list[int]](), list[list[int]]()
    special = set(map(tokenizer.backend.token_to_id, tokenizer.special_tokens()))
    for index in map(int, indices[permutation(len(indices), seed, "prompts")]):
        if len(prompts) == count:
            break
        record = documents.records([index])[0]
        if isinstance(record, Completion):
            prompt = text_prompt(documents, record, prompt_tokens)
            if not documents.corpus.is_line(index):
                ids = documents.encoder.prompt(record.completion)
                starts = range(prompt_tokens, len(ids) - prompt_tokens + 1, prompt_tokens)
                further += [ids[start : start + prompt_tokens] for start in starts]
        else:
            prompt = (record and OpenChat([], *record).prompt(documents, index)) or []
        if prompt not in prompts and not special.issuperset(prompt):
            prompts.append(prompt)
    for prompt in further[:: max(1, len(further) // max(1, count - len(prompts)))]:
        if len(prompts) < count and prompt not in prompts and not special.issuperset(prompt):
            prompts.append(prompt)
    return prompts
