"""Prompt lookup: what followed the last few tokens at an earlier place (Saxena, Prompt Lookup Decoding, 2023).

The latest earlier place of the longest run wins, and as long as the output copies it there is nothing to look up. Runs
are found through one hash table per length that grows with the sequence: a token costs a few hashes, a prompt costs
array operations, nothing is ever scanned. A table keeps one place per hash, so an older run may be forgotten for
another; a run that is found is compared token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

BITS = 30  # of a hash: products of two stay small integers
FACTOR = 0x2545F491  # odd, 30 bits: one multiplication spreads what comes in over the upper bits
WORD = (1 << BITS) - 1
BULK = 24  # from so many new tokens on, array operations are cheaper


class PromptLookup:
    """Owner of the places of all runs of `shortest` to `longest` tokens in one sequence of at most `limit` tokens."""

    def __init__(self, limit: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest, self._longest = shortest, longest
        self._shift = BITS - min(BITS, max(6, limit.bit_length()))
        self._tables: list[array[int]] = []  # by length; where the last run with a hash ends, 0: nowhere
        self._indexed = 0  # runs that end at or before this place are in the tables
        self._known = 0  # tokens at the last call
        self._source = 0  # where the token that would follow them was found, 0: nowhere

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """What followed the latest earlier place of the longest known run that ends `tokens` and `ahead`."""
        known, source, length = self._known, self._source, len(tokens)
        if source and tokens[known:] == tokens[source : source + length - known]:
            source += length - known
        else:
            source = self._find(tokens, tokens[-self._longest :].tolist())
        self._known, self._source = length, source
        if ahead and not (source and copied(tokens, (), source, len(ahead)) == list(ahead)):
            place = self._find(tokens, [*tokens[-self._longest :], *ahead][-self._longest :])
            return copied(tokens, ahead, place, most) if place else []
        if not source:
            return []
        return copied(tokens, (), source, most + len(ahead))[len(ahead) :]

    def _find(self, tokens: array[int], tail: list[int]) -> int:
        """Where the latest earlier run ends that equals the end of `tail`; 0 if there is none."""
        if self._indexed < len(tokens) - 1:
            self._index(tokens)
        if not self._tables:
            return 0
        places, value = [], 0
        for length, token in enumerate(reversed(tail), 1):
            value = (value + token + 1) * FACTOR & WORD
            if length >= self._shortest:
                place = self._tables[length - self._shortest][value >> self._shift]
                if not place:
                    break  # so there is no longer run either
                places.append(place)
        while places:
            length = self._shortest + len(places) - 1
            place = places.pop()
            if tokens[place - length : place].tolist() == tail[-length:]:
                return place
        return 0

    def _index(self, tokens: array[int]) -> None:
        """Index the runs that have ended since. The last place is left out: nothing follows it yet."""
        if not self._tables:
            empty = bytes(4 << BITS - self._shift)
            self._tables = [array("i", empty) for _ in range(self._shortest, self._longest + 1)]
        first, last = self._indexed + 1, len(tokens) - 1
        self._indexed = last
        if last - first >= BULK:
            self._index_many(np.frombuffer(tokens, np.int32), first, last)
            return
        shortest, longest, tables, shift = self._shortest, self._longest, self._tables, self._shift
        for place in range(first, last + 1):
            value = 0
            for length in range(1, min(longest, place) + 1):
                value = (value + tokens[place - length] + 1) * FACTOR & WORD
                if length >= shortest:
                    tables[length - shortest][value >> shift] = place

    def _index_many(self, tokens: np.typing.NDArray[np.int32], first: int, last: int) -> None:
        places = np.arange(first, last + 1, dtype=np.int32)
        wide = tokens[: last + 1].astype(np.int64) + 1
        value = np.zeros(len(places), np.int64)
        for length in range(1, self._longest + 1):
            if length > last:
                return
            skipped = max(0, length - first)  # places with fewer tokens before them
            value[skipped:] = (value[skipped:] + wide[places[skipped:] - length]) * FACTOR & WORD
            if length >= self._shortest:
                table = np.frombuffer(self._tables[length - self._shortest], np.int32)
                table[value[skipped:] >> self._shift] = places[skipped:]  # of equal slots the last one stays


def copied(tokens: array[int], ahead: Sequence[int], place: int, most: int) -> list[int]:
    """`most` tokens from `place` on; a copy that reaches the end goes on with what it has copied itself."""
    found = tokens[place : place + most].tolist()
    if len(found) == most:
        return found
    line = [*ahead, *found]
    for source in range(most - len(found)):
        line.append(line[source])
    return line[len(ahead) :]
