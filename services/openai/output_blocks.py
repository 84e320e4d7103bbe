"""One choice's output as blocks that begin, grow and end in turn: reasoning, text, calls, in the order of writing.

What the APIs that tell an output in items do with it is the same: the blocks of a whole answer are those of its stream,
however the stream was cut.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Iterable

import msgspec

from penstock.protocol.messages import PieceKind
from penstock.services.client.output_collector import Segment


class Block:
    """Text of one kind without anything else between: a call's is its arguments, as the model wrote them."""

    __slots__ = ("_parts", "call", "index", "key", "kind", "name")

    def __init__(self, index: int, kind: int, *, name: str = "", call: str = "") -> None:
        self.index = index
        self.kind = kind  # CONTENT, REASONING or CALL
        self.key = secrets.token_hex(12)  # for an id in whichever API
        self.name = name  # of a CALL's function
        self.call = call  # a CALL's id
        self._parts: list[str] = []

    def append(self, text: str) -> None:
        self._parts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._parts)


class Happening(enum.Enum):
    """What becomes of a block."""

    BEGUN = "begun"
    GROWN = "grown"
    ENDED = "ended"


class Change(msgspec.Struct, frozen=True):
    """It happened to this block; `text` is what it grew by."""

    what: Happening
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one choice; the last one may still grow."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, segments: Iterable[Segment]) -> list[Change]:
        changes: list[Change] = []
        for segment in segments:
            if segment.kind == PieceKind.CALL:
                self._begin(changes, segment.kind, segment.text, segment.id)
                continue
            kind = PieceKind.CALL if segment.kind == PieceKind.ARGUMENTS else segment.kind
            if self._open is None or self._open.kind != kind:
                self._begin(changes, kind)
            assert self._open is not None
            self._open.append(segment.text)
            changes.append(Change(Happening.GROWN, self._open, segment.text))
        return changes

    def end(self) -> list[Change]:
        """Nothing more will come."""
        changes: list[Change] = []
        self._end(changes)
        return changes

    def _begin(self, changes: list[Change], kind: int, name: str = "", call: str = "") -> None:
        self._end(changes)
        self._open = Block(len(self.all), kind, name=name, call=call)
        self.all.append(self._open)
        changes.append(Change(Happening.BEGUN, self._open))

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Change(Happening.ENDED, self._open))
            self._open = None


def blocks_of(segments: Iterable[Segment]) -> list[Block]:
    """The blocks of a choice whose whole output these are."""
    blocks = Blocks()
    blocks.push(segments)
    return blocks.all
