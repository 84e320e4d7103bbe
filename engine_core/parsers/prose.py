"""The text around calls: content, but for the blanks that follow a call and lead to nothing."""

from __future__ import annotations

from penstock.engine_core.parsers.pieces import content
from penstock.engine_core.parsers.scanning import BLANKS, FreeText
from penstock.protocol.messages import Piece


class Prose:
    """Text up to the marker of a call, any number of times. `markers` as of `FreeText`."""

    __slots__ = ("_free", "_trailing")

    def __init__(self, *markers: str) -> None:
        self._free = FreeText(*markers)
        self._trailing = False  # nothing but blanks since a call

    @property
    def blanks(self) -> str:
        """Those that stood before the marker that came last."""
        return self._free.blanks

    @property
    def marker(self) -> str:
        """The one that came last."""
        return self._free.marker

    def push(self, text: str, out: list[Piece]) -> str | None:
        """Add to `out` what is content for certain. What stands behind a marker; None where there is none yet."""
        given, rest = self._free.push(text)
        if given:
            out += content(given)
            self._trailing = False
        return rest

    def resume(self, *, called: bool) -> None:
        """Text goes on: behind a call, or because what looked like one is none."""
        self._trailing = called

    def flush(self) -> list[Piece]:
        """What was held back when the output ends in text."""
        held = self._free.release()
        return [] if self._trailing and not held.strip(BLANKS) else content(held)
