"""Token ids of parts of chats that were encoded before.

Each turn of a conversation repeats all earlier ones, and encoding 10,000 tokens takes some 20 ms. A tokenizer splits a
text at its added tokens before it does anything else, so what stands between two of them has the same ids in any text.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from tokenizers import AddedToken

LEAST = 256  # characters of a piece that is worth remembering
MOST_BYTES = 32 << 20  # of all pieces
ENTRY = 250  # bytes of one beside its texts and ids
HEAD = 3  # characters by which texts are searched for cuts
Encode = Callable[[str], Sequence[int] | None]


class PieceCache:
    """Encodes texts by pieces, each of which begins with a token at which texts may be cut; those used last are kept.
    May be called by several threads. most: bytes.
    """

    def __init__(self, cuts: Collection[str], most: int = MOST_BYTES) -> None:
        self._cuts = Cuts(cuts)
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self.bytes = 0

    def encode(self, text: str, scope: str, encode: Encode) -> list[int] | None:
        """Ids of a text; None where a piece has none. scope: pieces are found again in the same one alone. encode:
        ids of a text without what a post-processor adds, the same at every call."""
        found: list[int] = []
        run = 0  # where short pieces begin that are encoded together
        places = list(self._cuts.find(text))
        for begin, end in zip([0, *places], [*places, len(text)], strict=True):
            if end - begin < LEAST:
                continue
            before = encode(text[run:begin]) if run < begin else ()
            ids = self._piece(scope, text[begin:end], encode)
            if before is None or ids is None:
                return None
            found.extend(before)
            found.extend(ids)
            run = end
        rest = encode(text[run:]) if run < len(text) else ()
        if rest is None:
            return None
        found.extend(rest)
        return found

    def _piece(self, scope: str, piece: str, encode: Encode) -> Sequence[int] | None:
        key = scope, piece
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        ids = encode(piece)
        if ids is None:
            return None
        made = array("i", ids)
        taken = size(key, made)
        with self._lock:
            if key not in self._kept and taken <= self._most:
                self._kept[key] = made
                self.bytes += taken
            while self.bytes > self._most:
                self.bytes -= size(*self._kept.popitem(last=False))
        return made


def size(key: tuple[str, str], ids: array[int]) -> int:
    """Bytes of an entry."""
    return ENTRY + sum(map(sys.getsizeof, (*key, ids)))


class Cuts:
    """Finds tokens in texts, of which there may be thousands that begin alike."""

    def __init__(self, tokens: Collection[str]) -> None:
        heads: defaultdict[str, set[int]] = defaultdict(set)
        for token in tokens:
            heads[token[:HEAD]].add(len(token))
        self._tokens = frozenset(tokens)
        self._lengths = {head: sorted(lengths, reverse=True) for head, lengths in heads.items()}
        longest_first = sorted(heads, key=len, reverse=True)
        self._heads = re.compile("|".join(map(re.escape, longest_first))) if heads else None

    def find(self, text: str) -> Iterator[int]:
        """Where the leftmost and longest begin, one behind the other."""
        if self._heads is None:
            return
        end = 0
        for match in self._heads.finditer(text):
            at = match.start()
            if at < end:
                continue
            for length in self._lengths[match[0]]:
                if text[at : at + length] in self._tokens:
                    yield at
                    end = at + length
                    break


def cut_tokens(added: Collection[AddedToken]) -> list[str]:
    """The added tokens at which a text may be cut: they are found wherever a text spells them, and nothing beside them
    changes with them. No other token begins before one and ends within it or behind it, or is longer and begins as it
    does; and none is cut within a word, whose end another token may want."""
    texts = {token.content for token in added}
    fit = {
        own.content for own in added
        if own.content and not (own.normalized or own.single_word or own.lstrip or own.rstrip)
        and not re.match(r"\w", own.content)
    }  # fmt: skip
    begin: defaultdict[str, set[str]] = defaultdict(set)  # those that begin so
    for text in fit:
        for end in range(1, len(text) + 1):
            begin[text[:end]].add(text)
    covered: set[str] = set()
    for text in texts:
        for at in range(len(text)):
            end = at + 1
            while end <= len(text) and (part := text[at:end]) in begin:
                if part in fit and (at or end < len(text)):
                    covered.add(part)
                end += 1
            if at and end > len(text):
                covered |= begin[text[at:]]
    return sorted(fit - covered)
