"""Where a structure begins after reasoning."""

from __future__ import annotations

from engine_core.grammar.reasoning import ReasoningMarkers
from engine_core.text.columns import pack
from tests.engine_core.grammar.vocabulary import ids, vocabulary

OPEN, CLOSE = 4090, 4091


def test_a_prompt_that_opens_reasoning_puts_the_structure_after_it() -> None:
    markers = ReasoningMarkers(vocabulary())
    assert markers.after([*ids("hello"), OPEN, *ids("\n")]) == pack("i", [CLOSE])
    assert markers.after([OPEN, CLOSE, *ids("x"), OPEN]) == pack("i", [CLOSE])


def test_any_other_prompt_is_followed_by_the_structure() -> None:
    markers = ReasoningMarkers(vocabulary())
    assert markers.after(ids("hello")) == b""
    assert markers.after([OPEN, *ids("\n\n"), CLOSE, *ids("\n\n")]) == b""
    assert markers.after([]) == b""


def test_a_vocabulary_without_such_tokens_has_no_markers() -> None:
    class Plain:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

        def raw(self, token_id: int) -> bytes:
            return bytes([token_id])

    assert ReasoningMarkers(Plain()).after([60, 61]) == b""  # type: ignore[arg-type]
