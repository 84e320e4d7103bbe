"""Outputs in pieces, cut anywhere, and the replies and streams that they make: for property tests of any API."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece, TextExtra
from penstock.services.client.output_collector import OutputCollector
from penstock.services.metrics.requests import Timings
from penstock.services.openai.generation import ResponseEncoder

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
CALL = st.tuples(st.text("abc", min_size=1, max_size=5), st.lists(TEXT, max_size=3))
FINISHES = (Finish.STOP, Finish.LENGTH, Finish.CALLS)


@st.composite
def outputs(draw: st.DrawFn) -> list[tuple[list[Piece], bool]]:
    """Pieces of one output, in rows, and whether a stream takes what there is behind each row."""
    pieces: list[Piece] = []
    if draw(st.booleans()):
        pieces += [Piece(PieceKind.REASONING, text) for text in draw(st.lists(TEXT, max_size=4))]
    pieces += [Piece(PieceKind.CONTENT, text) for text in draw(st.lists(TEXT, max_size=4))]
    for name, arguments in draw(st.lists(CALL, max_size=3)):
        pieces += [Piece(PieceKind.CALL, name), *(Piece(PieceKind.ARGUMENTS, text) for text in arguments)]
    rows: list[tuple[list[Piece], bool]] = [([], draw(st.booleans()))]
    for piece in pieces:
        if draw(st.booleans()):
            rows.append(([], draw(st.booleans())))
        rows[-1][0].append(piece)
    return rows


def replay(
    rows: list[tuple[list[Piece], bool]], finish: Finish, framing: ResponseEncoder | None, *, reasons: bool = False
) -> tuple[OutputCollector, str]:
    """The collector that the rows make, and the stream where there is a framing."""
    collector = OutputCollector(1, 1, stream=framing is not None, timings=Timings(), now=1.0)
    sent = b""
    for step, (pieces, taken) in enumerate(rows):
        last = step == len(rows) - 1
        extra = TextExtra(row=0, prompt_tokens=7, cached_tokens=3, reasons=reasons) if step == 0 else None
        plain = all(piece.kind == PieceKind.CONTENT for piece in pieces) and step % 2 == 0
        text = "".join(piece.text for piece in pieces) if plain else ""  # as a choice that nothing was parsed of
        collector.put(0, text, 1, finish if last else Finish.NONE, extra, 2.0 + step, [] if plain else pieces)
        if framing is not None and (taken or last):
            sent += framing.take(collector, collector.get_nowait())
    return collector, (sent + (framing.end(collector) if framing is not None else b"")).decode()


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream whose names stand in its data too."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
