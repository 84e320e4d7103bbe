"""Stop strings in a stream of text.

The match is the stop string that is complete first, character by character; of several complete at the same character
the longest. So the result is the same for any way of cutting the stream, and text never waits for a longer match.
What is held back is exactly the longest end of the text that could still become a stop string.
"""

from __future__ import annotations

import re
from array import array

import msgspec


class Stops(msgspec.Struct, frozen=True):
    """The stop strings of a request, with their failure functions (Knuth, Morris and Pratt, 1977)."""

    strings: tuple[str, ...]
    failures: tuple[array[int], ...]
    first: re.Pattern[str]  # any first character of a stop string


class Match(msgspec.Struct, frozen=True):
    """A stop string was found: `text` is what goes out before it (and with it, under include_stop)."""

    text: str
    stop: str


def compile_stops(strings: tuple[str, ...]) -> Stops:
    """`strings` are not empty."""
    firsts = "".join(sorted({re.escape(string[0]) for string in strings}))
    return Stops(strings, tuple(failure(string) for string in strings), re.compile(f"[{firsts}]"))


def failure(string: str) -> array[int]:
    """For each length k of a prefix: the longest proper prefix of `string` that is also an end of string[:k]."""
    table = array("H", [0, 0])
    length = 0
    for character in string[1:]:
        while length and string[length] != character:
            length = table[length]
        length += string[length] == character
        table.append(length)
    return table


class StopScanner:
    """The scan of one choice's text."""

    __slots__ = ("_held", "_include", "_states", "_stops")

    def __init__(self, stops: Stops, *, include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""
        self._states = [0] * len(stops.strings)  # characters of each stop string that the text ends with

    def push(self, text: str, *, armed: bool = True) -> str | Match:
        """Text that can go out, or the match. Not `armed` (before min_tokens), stop strings that complete are text."""
        if not self._held:
            found = self._stops.first.search(text)
            if found is None:
                return text
            start = found.start()
        else:
            start = 0
        for at in range(start, len(text)):
            stop = self._step(text[at], armed)
            if stop:
                whole = self._held + text[: at + 1]
                self._held = ""
                return Match(whole if self._include else whole[: len(whole) - len(stop)], stop)
        whole = self._held + text
        length = max(self._states)
        self._held = whole[len(whole) - length :]
        return whole[: len(whole) - length]

    def release(self) -> str:
        """What was held: the stream is over."""
        held, self._held = self._held, ""
        return held

    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def _step(self, character: str, armed: bool) -> str:
        """Advance every stop string by one character. The longest one that is now complete, or nothing."""
        states, longest = self._states, ""
        for index, (string, table) in enumerate(zip(self._stops.strings, self._stops.failures, strict=True)):
            state = states[index]
            while state and string[state] != character:
                state = table[state]
            if string[state] == character:
                state += 1
                if state == len(string):
                    if armed and state > len(longest):
                        longest = string
                    state = table[state]
            states[index] = state
        return longest
