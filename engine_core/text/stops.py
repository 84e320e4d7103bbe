"""Stop strings in a stream of text.

The match is the stop string that is complete first, character by character; of several complete at the same character
the longest. So the result is the same for any way of cutting the stream, and text never waits for a longer match.
What is held back is exactly the longest end of the text that could still become a stop string.
"""

from __future__ import annotations

import re

import msgspec


class Stops(msgspec.Struct, frozen=True):
    """The stop strings of a request."""

    strings: tuple[str, ...]
    longest: int  # characters
    first: re.Pattern[str]  # any first character of a stop string


class Match(msgspec.Struct, frozen=True):
    """A stop string was found: `text` is what goes out before it (and with it, under include_stop)."""

    text: str
    stop: str


def compile_stops(strings: tuple[str, ...]) -> Stops:
    """`strings` are not empty."""
    firsts = "".join(sorted({re.escape(string[0]) for string in strings}))
    return Stops(strings, max(map(len, strings)), re.compile(f"[{firsts}]"))


class StopScanner:
    """The scan of one choice's text."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Stops, *, include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | Match:
        """Text that can go out, or the match. Not `armed` (before min_tokens), stop strings that complete are text."""
        held, stops = len(self._held), self._stops
        if not held and stops.first.search(text) is None:
            return text
        whole = self._held + text
        if armed:
            starts = [(whole.find(stop, max(0, held + 1 - len(stop))), stop) for stop in stops.strings]
            if found := [(start + len(stop), start, stop) for start, stop in starts if start >= 0]:
                end, start, stop = min(found)
                self._held = ""
                return Match(whole[: end if self._include else start], stop)
        near = stops.first.finditer(whole, max(0, len(whole) + 1 - stops.longest))
        end = next((found.start() for found in near if self._begins_stop(whole[found.start() :])), len(whole))
        self._held = whole[end:]
        return whole[:end]

    def release(self) -> str:
        """What was held: the stream is over."""
        held, self._held = self._held, ""
        return held

    def held(self) -> int:
        return len(self._held)

    def _begins_stop(self, text: str) -> bool:
        return any(len(text) < len(stop) and stop.startswith(text) for stop in self._stops.strings)
