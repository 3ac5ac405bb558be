"""Text of tokens that arrive one by one, decoded as `tokenizers.DecodeStream` decodes it."""

from collections.abc import Sequence
from typing import Protocol

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for the bytes of an incomplete character."""


class TextDecoder(Protocol):
    """A tokenizer, of this package or of transformers."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of the token ids."""


class TextStream:
    """Decodes tokens one by one, for streaming: a token may be part of a character, or depend on earlier tokens.

    The text of a token is read from a decoded window that begins at a character: with byte fallback (Llama 2, Mistral,
    Gemma) a window that begins inside a character decodes to U+FFFD only.

    Args:
        tokenizer: the tokenizer.
        prompt: token ids before the first pushed token. If they end inside a character, its text is new text.
        skip_special_tokens: leave special tokens out of the text.

    Attributes:
        start: number of tokens of the prompt before its incomplete last character, if it has one.

    Examples:
        >>> tokenizer = Tokenizer("MODEL")
        >>> stream = TextStream(tokenizer, [])
        >>> "".join([*map(stream.push, tokenizer.encode("über alles")), stream.flush()])
        'über alles'
    """

    CONTEXT = 8
    """Fewest tokens of the prompt that are decoded together with the first new token."""

    def __init__(self, tokenizer: TextDecoder, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        window = self._window(list(prompt))
        # A character has at most four bytes, so at most its first three are at the end of the prompt.
        ends = range(len(window), max(-1, len(window) - 4), -1)
        end = next((end for end in ends if not self._decode(window[:end]).endswith(INCOMPLETE)), len(window))
        self._context, self._new = window[:end], window[end:]
        self.start = len(prompt) - len(self._new)
        self._prefix = self._decode(self._context)

    def _window(self, prompt: list[int]) -> list[int]:
        """The last tokens of the prompt, with some text, and from the beginning of a character."""
        size = self.CONTEXT
        while size < len(prompt):
            text = self._decode(prompt[-size:])
            if text and not text.startswith(INCOMPLETE):
                break
            size *= 2
        return prompt[-size:]

    def push(self, token: int) -> str:
        """Text up to and including `token` that was not returned before; empty while a character is incomplete."""
        self._new.append(token)
        text = self._text()
        return "" if not text or text.endswith(INCOMPLETE) else self._accept(text)

    @property
    def pending(self) -> str:
        """Complete characters of pushed tokens that `push` did not return yet: a token may end inside a character."""
        return self._text().rstrip(INCOMPLETE)

    def flush(self) -> str:
        """The remaining text, such as an incomplete last character."""
        return self._accept(self._text())

    def _text(self) -> str:
        """Text of the new tokens."""
        if not self._new:
            return ""
        text = self._decode(self._context + self._new)
        # Bytes that are no character make byte fallback write U+FFFD for the bytes around them too.
        return text[len(self._prefix) :] if text.startswith(self._prefix) else self._decode(self._new)

    def _accept(self, text: str) -> str:
        """`text`, of the new tokens, which become the context of later tokens."""
        if self._new:
            self._context, self._new = self._new, []
            self._prefix = self._decode(self._context)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
