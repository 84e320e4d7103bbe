"""Blocks: the same for every cut, each begun once, ended once, and grown by what it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece
from penstock.services.client.output_collector import Segment, Segments
from penstock.services.openai.output_blocks import Block, BlockEncoder, blocks_of

TEXT = st.text(min_size=1, max_size=6)
PIECES = st.lists(
    st.one_of(
        st.builds(Piece, st.sampled_from((int(PieceKind.CONTENT), int(PieceKind.REASONING))), TEXT).map(lambda p: [p]),
        st.tuples(TEXT, st.lists(TEXT, max_size=3)).map(
            lambda call: [Piece(PieceKind.CALL, call[0]), *(Piece(PieceKind.ARGUMENTS, text) for text in call[1])]
        ),
    ),
    max_size=8,
).map(lambda parts: [piece for part in parts for piece in part])


class Noted(BlockEncoder):
    """Notes what becomes of each block in place of events."""

    def __init__(self) -> None:
        super().__init__()
        self.life: dict[int, list[str]] = {}
        self.grown: dict[int, str] = {}

    def _note(self, block: Block, what: str, text: str = "") -> list[bytes]:
        self.life.setdefault(block.index, []).append(what)
        self.grown[block.index] = self.grown.get(block.index, "") + text
        return [b"%d %b" % (block.index, what.encode())]

    def _begun(self, block: Block) -> list[bytes]:
        return self._note(block, "begun")

    def _grown(self, block: Block, text: str) -> list[bytes]:
        return self._note(block, "grown", text)

    def _ended(self, block: Block) -> list[bytes]:
        return self._note(block, "ended")


def facts(blocks: list[Block]) -> list[tuple[int, int, str, str]]:
    return [(block.index, block.kind, block.name, block.text) for block in blocks]


@given(PIECES, st.lists(st.booleans(), min_size=40, max_size=40))
@settings(max_examples=200)
def test_blocks_are_the_same_for_every_cut(pieces: list[Piece], cuts: list[bool]) -> None:
    whole = Segments()
    whole.push(pieces)
    segments, encoder = Segments(), Noted()
    events = []
    for piece, cut in zip(pieces, cuts, strict=False):
        segments.push([piece])
        if cut:
            events += encoder.push(segments.take(""))
    events += encoder.push(segments.take("")) + encoder.close()
    assert facts(encoder.blocks) == facts(blocks_of(whole.take("")))
    assert list(encoder.life) == list(range(len(encoder.blocks)))  # one after the other
    told = [b"%d %b" % (index, what.encode()) for index, life in encoder.life.items() for what in life]
    assert events == told
    for block in encoder.blocks:
        life = encoder.life[block.index]
        assert (life[0], life[-1]) == ("begun", "ended")
        assert set(life[1:-1]) <= {"grown"}
        assert encoder.grown[block.index] == block.text


def test_kinds_follow_one_another() -> None:
    segments = [
        Segment(PieceKind.REASONING, "hm"),
        Segment(PieceKind.CONTENT, "so"),
        Segment(PieceKind.CALL, "f", 0, "call_1"),
        Segment(PieceKind.ARGUMENTS, "{}", 0),
        Segment(PieceKind.CALL, "g", 1, "call_2"),
        Segment(PieceKind.CONTENT, "done"),
    ]
    found = blocks_of(segments)
    assert facts(found) == [
        (0, PieceKind.REASONING, "", "hm"), (1, PieceKind.CONTENT, "", "so"), (2, PieceKind.CALL, "f", "{}"),
        (3, PieceKind.CALL, "g", ""), (4, PieceKind.CONTENT, "", "done"),
    ]  # fmt: skip
    assert [block.call for block in found] == ["", "", "call_1", "call_2", ""]
    assert len({block.key for block in found}) == 5


def test_an_end_without_a_beginning_is_nothing() -> None:
    encoder = Noted()
    assert encoder.close() == []
    assert encoder.blocks == []
