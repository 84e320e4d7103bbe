"""Where a structure begins for a model that reasons first.

A chat whose prompt ends inside an open reasoning marker, as templates of reasoning models leave it, is answered by
reasoning, the closing marker, and then the structure. A prompt that opens nothing is answered by the structure at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.text.columns import pack
from engine_core.text.vocabulary import Vocabulary

MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"))


class ReasoningMarkers:
    """The pairs of markers that are one token each in this vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._closing: dict[int, int] = {}  # opening token → closing token
        for pair in MARKERS:
            token_ids = [vocabulary.encode(marker, add_special_tokens=False) for marker in pair]
            if all(
                len(ids) == 1 and vocabulary.raw(ids[0]) == m.encode() for ids, m in zip(token_ids, pair, strict=True)
            ):
                self._closing[token_ids[0][0]] = token_ids[1][0]

    def after(self, prompt: Sequence[int]) -> bytes:
        """`Automaton.after` for a generation that follows this prompt."""
        if not self._closing:
            return b""
        closed = set(self._closing.values())
        for token in reversed(prompt):
            if token in closed:
                return b""
            if token in self._closing:
                return pack("i", [self._closing[token]])
        return b""
