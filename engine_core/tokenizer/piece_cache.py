"""Token ids of parts of chats that were encoded before.

Each turn of a conversation repeats all earlier ones, and encoding 10,000 tokens takes some 20 ms. A tokenizer splits a
text at its added tokens before it does anything else, so what stands between two of them has the same ids in any text.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from tokenizers import AddedToken

LEAST = 256  # characters of a piece that is worth remembering
MOST_BYTES = 64 << 20  # of all pieces


class PieceCache:
    """Encodes texts by pieces, each of which begins with a token at which texts may be cut; those used last are kept.
    May be called by several threads.

    encode: ids of a text without what a post-processor adds, or None where it has none.
    """

    def __init__(
        self, encode: Callable[[str], Sequence[int] | None], cuts: Collection[str], most: int = MOST_BYTES
    ) -> None:
        self._encode = encode
        self._cuts = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self.bytes = 0

    def encode(self, text: str, scope: str) -> list[int] | None:
        """Ids of a text; None where a piece has none. scope: pieces are found again in the same one alone."""
        found: list[int] = []
        run = 0  # where short pieces begin that are encoded together
        for begin, end in self._pieces(text):
            if end - begin < LEAST:
                continue
            before = self._encode(text[run:begin]) if run < begin else ()
            ids = self._piece(scope, text[begin:end])
            if before is None or ids is None:
                return None
            found.extend(before)
            found.extend(ids)
            run = end
        rest = self._encode(text[run:]) if run < len(text) else ()
        if rest is None:
            return None
        found.extend(rest)
        return found

    def _pieces(self, text: str) -> list[tuple[int, int]]:
        if self._cuts is None:
            return []
        places = [match.start() for match in self._cuts.finditer(text)]
        return list(zip([0, *places], [*places, len(text)], strict=True))

    def _piece(self, scope: str, piece: str) -> Sequence[int] | None:
        key = scope, piece
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        ids = self._encode(piece)
        if ids is None:
            return None
        made = array("i", ids)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self.bytes += size(key, made)
            while self.bytes > self._most:
                self.bytes -= size(*self._kept.popitem(last=False))
        return made


def size(key: tuple[str, str], ids: array[int]) -> int:
    """Bytes of an entry."""
    return sum(map(sys.getsizeof, (*key, ids)))


def cut_tokens(added: Collection[AddedToken]) -> list[str]:
    """The added tokens at which a text may be cut: they are found wherever a text spells them, and nothing beside them
    changes with them. No other token begins before one and ends within it or behind it."""
    texts = [token.content for token in added]
    return [
        own.content for own in added
        if own.content and not (own.normalized or own.single_word or own.lstrip or own.rstrip)
        and not any(reaches(other, own.content) for other in texts)
    ]  # fmt: skip


def reaches(other: str, own: str) -> bool:
    """Whether an occurrence of another token may cover the beginning of one of this."""
    if other == own:
        other = other[1:]  # itself, from a place before
    return own in other or any(own.startswith(other[at:]) for at in range(1, len(other)))
