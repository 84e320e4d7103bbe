"""Reasoning between its markers, at the beginning of an output. Blanks beside the markers belong to them, except where
a structure begins right behind the closing one: then they are part of it."""

from __future__ import annotations

import msgspec

from penstock.engine_core.parsers.scanning import Reading, Scan, StreamParser
from penstock.protocol.messages import PieceKind


class Markers(msgspec.Struct, frozen=True):
    """What stands before a model's reasoning and behind it. `others` are found too; `answer` is what some outputs put
    around what follows, which is dropped."""

    opening: str
    closing: str
    others: tuple[Markers, ...] = ()
    answer: tuple[str, ...] = ()


class ReasoningParser(StreamParser):
    """Content behind the reasoning is told as it came, but for the marks of an answer. `inside`: the output begins
    within the reasoning; an opening marker that the model still writes is dropped. `exact`: what stands behind the
    closing marker is content to the letter."""

    __slots__ = ("_exact", "_inside", "_markers", "over")

    def __init__(self, markers: Markers, *, inside: bool, exact: bool = False) -> None:
        super().__init__()
        self._markers = markers
        self._exact = exact
        self._inside = self.thinking = inside
        self.over = False  # what comes is none of this parser's

    def _read(self, scan: Scan) -> Reading[None]:
        known = (self._markers, *self._markers.others)
        blanks = yield from scan.lead()
        opened = yield from scan.mark(tuple([each.opening for each in known]))
        if opened or self._inside:
            self.thinking = True
            yield from scan.skip_blanks()
            closed = yield from scan.until(tuple([each.closing for each in known]), self._reasoned)
            if not closed:
                self._reasoned(scan.text)
                return
            self.thinking = False
            if not self._exact:
                yield from self._read_answer(scan)
        else:
            scan.text = blanks + scan.text
        self.over = True
        scan.tell(scan.text)

    def _read_answer(self, scan: Scan) -> Reading[None]:
        """Drop the marks of an answer, and the blanks in front of it."""
        yield from scan.skip_blanks()
        answer = self._markers.answer
        if (yield from scan.mark(answer[:1])):
            yield from scan.skip_blanks()
            yield from scan.until(answer[1:])

    def _reasoned(self, text: str) -> None:
        self._scan.tell(text, PieceKind.REASONING)
