"""Blocks: the same for every cut, each begun once, ended once, and grown by what it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece
from penstock.services.client.output_collector import Segment, Segments
from penstock.services.openai.output_blocks import Block, Blocks, Happening, blocks_of

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


def facts(blocks: list[Block]) -> list[tuple[int, int, str, str]]:
    return [(block.index, block.kind, block.name, block.text) for block in blocks]


@given(PIECES, st.lists(st.booleans(), min_size=40, max_size=40))
@settings(max_examples=200)
def test_blocks_are_the_same_for_every_cut(pieces: list[Piece], cuts: list[bool]) -> None:
    whole = Segments()
    whole.push(pieces)
    segments, blocks = Segments(), Blocks()
    changes = []
    for piece, cut in zip(pieces, cuts, strict=False):
        segments.push([piece])
        if cut:
            changes += blocks.push(segments.take(""))
    changes += blocks.push(segments.take("")) + blocks.end()
    assert facts(blocks.all) == facts(blocks_of(whole.take("")))
    life: dict[int, list[Happening]] = {}
    grown: dict[int, str] = {}
    for change in changes:
        life.setdefault(change.block.index, []).append(change.what)
        grown[change.block.index] = grown.get(change.block.index, "") + change.text
    assert list(life) == list(range(len(blocks.all)))  # one after the other
    for block in blocks.all:
        assert life[block.index][0] is Happening.BEGUN
        assert life[block.index][-1] is Happening.ENDED
        assert set(life[block.index][1:-1]) <= {Happening.GROWN}
        assert grown[block.index] == block.text


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
    blocks = Blocks()
    assert blocks.end() == []
    assert blocks.all == []
