"""The tokens of text in the order of their bytes, and those whose bytes may end an item of JSON and go on."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
LAST = b"\xff" * 8  # behind all tokens that begin alike
ESCAPED = re.compile(rb".*\\", re.DOTALL)
INSIDE = re.compile(rb'.*".*".*"', re.DOTALL)
OUTSIDE = re.compile(rb'.*".*".*"|[^"]+".*"', re.DOTALL)
INSIDE_ANY = re.compile(rb'.*".*"', re.DOTALL)
OUTSIDE_ANY = re.compile(rb'.+"', re.DOTALL)
BREAKING = re.compile(rb"[][,\s]")  # ends a number in an array, or opens an array
NUMBERS = re.compile(rb".*[-0-9]", re.DOTALL)
OPENING = re.compile(rb'.*\[(.*".*".*"|.*[0-9]\s*,\s*[-0-9])', re.DOTALL)


class TokenIndex:
    """Ids of tokens by their bytes. `texts`: the tokens of text alone."""

    def __init__(self, texts: Iterable[tuple[bytes, int]]) -> None:
        heads: list[list[tuple[bytes, int]]] = [[] for _ in range(256)]
        for text, token_id in texts:
            heads[text[0]].append((text, token_id))
        for group in heads:
            group.sort()  # one by one: other threads run between them
        ordered = [pair for group in heads for pair in group]
        self._texts = [text for text, _ in ordered]
        self.all = ids_of(ordered)
        quoted = [(text, each) for text, each in ordered if b'"' in text or b"\\" in text]
        self.escaped = ids_of(quoted, ESCAPED)
        # From within a string: two strings end in it. From without one: so it is, or one begins behind something else.
        self.inside, self.outside = ids_of(quoted, INSIDE), ids_of(quoted, OUTSIDE)
        # The same, where a string that only begins counts as one that ends.
        self.inside_any, self.outside_any = ids_of(quoted, INSIDE_ANY), ids_of(quoted, OUTSIDE_ANY)
        breaking = [(text, each) for text, each in ordered if BREAKING.search(text)]
        self.numbers = ids_of(breaking, NUMBERS)  # of a number, and what may end one
        self.opening = ids_of(breaking, OPENING)  # an array and two of its items

    def beginning(self, text: bytes) -> Ids:
        """The tokens that begin with these bytes."""
        first = bisect_left(self._texts, text)
        return self.all[first : bisect_left(self._texts, text + LAST, first)]


def ids_of(texts: Iterable[tuple[bytes, int]], pattern: re.Pattern[bytes] | None = None) -> Ids:
    """Those whose texts begin with the pattern."""
    return np.array([each for text, each in texts if pattern is None or pattern.match(text)], np.int32)
