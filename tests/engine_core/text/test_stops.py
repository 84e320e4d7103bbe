"""Stop strings: the same match for every cut of the stream, and no more held back than could still match."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.text.stops import Match, StopScanner, compile_stops
from penstock.protocol.limits import MAX_STOP_LENGTH, MAX_STOP_STRINGS

ALPHABET = "ab\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text(ALPHABET, max_size=6), max_size=12)


def expected(text: str, stops: tuple[str, ...], floor: int = 0) -> tuple[int, str] | None:
    """Where a plain search finds the stop string that is complete first past `floor`; the longest of several."""
    found = []
    for stop in stops:
        start = text.find(stop)
        while start >= 0 and start + len(stop) <= floor:
            start = text.find(stop, start + 1)
        if start >= 0:
            found.append((start + len(stop), start, stop))
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def scan(
    pieces: list[str], stops: tuple[str, ...], *, include: bool = False, unarmed: int = 0
) -> tuple[str, str | None]:
    """The text that goes out and the stop string that was found; the first `unarmed` pieces cannot end the text."""
    scanner, out = StopScanner(compile_stops(stops), include_stop=include), ""
    for number, piece in enumerate(pieces):
        found = scanner.push(piece, armed=number >= unarmed)
        if isinstance(found, Match):
            return out + found.text, found.stop
        out += found
    return out + scanner.release(), None


@settings(max_examples=600, deadline=None)
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), unarmed=st.integers(0, 4))
def test_every_cut_gives_what_a_search_of_the_whole_finds(
    pieces: list[str], stops: tuple[str, ...], include: bool, unarmed: int
) -> None:
    text = "".join(pieces)
    floor = len("".join(pieces[:unarmed]))
    match = expected(text, stops, floor)
    if match is None:
        assert scan(pieces, stops, include=include, unarmed=unarmed) == (text, None)
    else:
        start, stop = match
        end = start + len(stop) if include else start
        assert scan(pieces, stops, include=include, unarmed=unarmed) == (text[:end], stop)


@settings(max_examples=400, deadline=None)
@given(pieces=PIECES, stops=STOPS)
def test_what_is_held_is_the_longest_end_that_could_become_a_stop(pieces: list[str], stops: tuple[str, ...]) -> None:
    scanner, text, out = StopScanner(compile_stops(stops), include_stop=False), "", ""
    for piece in pieces:
        found = scanner.push(piece)
        if isinstance(found, Match):
            return
        text, out = text + piece, out + found
        longest = max(
            length
            for length in range(len(text) + 1)
            for stop in stops
            if length < len(stop) and stop.startswith(text[len(text) - length :])
        )
        assert scanner.held() == longest
        assert out == text[: len(text) - longest]


def test_the_shorter_of_two_stops_that_begin_alike_is_complete_first() -> None:
    assert scan(["one\n\ntwo"], ("\n\n", "\n")) == ("one", "\n")


def test_of_two_complete_at_once_the_longer_counts() -> None:
    assert scan(list("x END y"), ("END", " END")) == ("x", " END")


def test_a_stop_inside_a_longer_one_does_not_wait_for_it() -> None:
    assert scan(list("abcd"), ("abcd", "bc")) == ("a", "bc")


def test_characters_with_a_meaning_in_patterns_are_plain() -> None:
    assert scan(list("a]b^c-d\\e"), ("^c", "-d")) == ("a]b", "^c")


def test_the_worst_stops_cost_little_per_character() -> None:
    """The most and the longest stop strings, all nearly matching all the time: linear in the text."""
    stops = tuple("a" * (MAX_STOP_LENGTH - 1) + chr(0x62 + number) for number in range(MAX_STOP_STRINGS))
    scanner = StopScanner(compile_stops(stops), include_stop=False)
    began = time.thread_time()
    for _ in range(2000):
        scanner.push("aaaa")
    assert time.thread_time() - began < 2.0
    assert scanner.held() == MAX_STOP_LENGTH - 1
