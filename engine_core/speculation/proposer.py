"""What guesses how a sequence goes on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """One way to guess, for one choice; it may keep what it has learned of it."""

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """At most `most` token ids that may follow `tokens` and then `ahead`; fewer, or none, where nothing is known.

        `tokens` are the choice's, prompt and output: from call to call they grow at their end and nothing else changes.
        """
        ...
