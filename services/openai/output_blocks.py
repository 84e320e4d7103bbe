"""One choice's output as blocks that begin, grow and end in turn: reasoning, text, calls, in the order of writing.

What the APIs that tell an output in items do with it is the same: the blocks of a whole answer are those of its stream,
however the stream was cut.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

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


class BlockEncoder:
    """The blocks of one choice; the last one may still grow. An API's encoder says what the events are of a block that
    has begun, grown or ended; without one there are none."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def push(self, segments: Iterable[Segment]) -> list[bytes]:
        events: list[bytes] = []
        for segment in segments:
            if segment.kind == PieceKind.CALL:
                events += self._begin(segment.kind, segment.text, segment.id)
                continue
            kind = PieceKind.CALL if segment.kind == PieceKind.ARGUMENTS else segment.kind
            if self._open is None or self._open.kind != kind:
                events += self._begin(kind)
            assert self._open is not None
            self._open.append(segment.text)
            events += self._grown(self._open, segment.text)
        return events

    def close(self) -> list[bytes]:
        """Nothing more will come."""
        block, self._open = self._open, None
        return [] if block is None else self._ended(block)

    def _begin(self, kind: int, name: str = "", call: str = "") -> list[bytes]:
        block = Block(len(self.blocks), kind, name=name, call=call)
        self.blocks.append(block)
        events = self.close()
        self._open = block
        return events + self._begun(block)

    def _begun(self, block: Block) -> list[bytes]:
        return []

    def _grown(self, block: Block, text: str) -> list[bytes]:
        return []

    def _ended(self, block: Block) -> list[bytes]:
        return []


def blocks_of(segments: Iterable[Segment]) -> list[Block]:
    """The blocks of a choice whose whole output these are."""
    encoder = BlockEncoder()
    encoder.push(segments)
    return encoder.blocks
