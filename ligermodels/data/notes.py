"""Documents that are not used in full: counted by reason, and reported once each with the first one's name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

MOST = 1 << 20
"""Documents that are counted for each reason: streams do not end, and memory is limited."""


class Notes:
    """Counts of documents by reason.

    Args:
        say: called with a message for the first document of each reason, and with the totals.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self._tokens: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._told: dict[str, int] = {}
        self._uncounted = set[str]()

    def add(self, reason: str, index: int, message: Callable[[], str], tokens: int = 0) -> None:
        """Count a document.

        Args:
            reason: ends the sentence "3 documents in all ...".
            index: index of the document; a document is counted once for each reason.
            message: returns the message about the first document.
            tokens: number of its tokens that are left out.
        """
        if not self._tokens[reason]:
            self.say(f"{message()}; such documents are counted")
        if index in (known := self._tokens[reason]) or len(known) < MOST:
            known[index] = tokens
        else:
            self._uncounted.add(reason)

    def indices(self, reason: str) -> set[int]:
        """Indices of the documents counted for `reason`."""
        return set(self._tokens[reason])

    def totals(self) -> dict[str, tuple[int, int]]:
        """Reason -> number of documents, and of their tokens that are left out."""
        return {reason: (len(tokens), sum(tokens.values())) for reason, tokens in self._tokens.items() if tokens}

    def say_totals(self) -> None:
        """Report the totals that have changed since the last call."""
        for reason, (documents, tokens) in self.totals().items():
            if documents > self._told.get(reason, 0):
                lost = f" ({tokens:,} tokens are left out)" if tokens else ""
                more = "more than " if reason in self._uncounted else ""
                self.say(f"{more}{documents:,} documents in all {reason}{lost}")
                self._told[reason] = documents
