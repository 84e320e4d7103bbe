"""A choice whose output is parsed: the same pieces however its tokens come, whole or streamed, merged or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.parsers.dialect import THINK, Parsing
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.parsers.scanning import content, merged
from penstock.engine_core.text.choice import Choice, Delta
from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.text.outbox import Outbox, Seat
from penstock.engine_core.text.request import Kept
from penstock.engine_core.text.stops import StopScanner, compile_stops
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece, TextBatch
from tests.engine_core.grammar.vocabulary import END, ids, vocabulary
from tests.engine_core.parsers.outputs import SOUPS, calls_of, content_of, reasoning_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PARSING = Parsing(reasoning=THINK, calls=CallFormat.HERMES)


def choice(*stops: str, parsing: Parsing = PARSING) -> Choice:
    return Choice(
        vocabulary(),
        detokenizer(vocabulary(), skip_special_tokens=True),
        StopScanner(compile_stops(stops), include_stop=False) if stops else None,
        echo="",
        prompt_tokens=1,
        min_tokens=0,
        include_stop=False,
        parser=parsing.parser(),
    )


def steps(text: str, cuts: Sequence[int]) -> list[list[int]]:
    """The text's tokens and the one that ends it, in steps of one or more."""
    tokens = [*ids(text), END]
    ends = sorted({cut % len(tokens) for cut in cuts} | {0, len(tokens)})
    return [tokens[start:end] for start, end in pairwise(ends)]


def deltas(machine: Choice, parts: Sequence[list[int]], last: Finish = Finish.STOP) -> list[Delta]:
    found = []
    for number, part in enumerate(parts):
        found.append(machine.advance(part, last if number == len(parts) - 1 else Finish.NONE))
        if machine.ended:
            break
    return found


def pieces(found: Sequence[Delta]) -> tuple[Piece, ...]:
    return merged([piece for delta in found for piece in (*content(delta.text), *delta.pieces)])


@settings(max_examples=200, deadline=None)
@given(text=SOUPS, cuts=st.lists(st.integers(0, 200), max_size=20), stop=st.sampled_from(["", "b", "}\n", "<th", "a1"]))
def test_whole_and_streamed_and_merged_are_the_same(text: str, cuts: list[int], stop: str) -> None:
    stops = (stop,) if stop else ()
    one_by_one = deltas(choice(*stops), [[token] for part in steps(text, []) for token in part])
    in_steps = deltas(choice(*stops), steps(text, cuts))
    expected = pieces(one_by_one)
    assert pieces(in_steps) == expected
    assert one_by_one[-1].finish == in_steps[-1].finish
    kept = Kept()
    for delta in in_steps[:-1]:
        kept.add(delta, ())
    joined = kept.join(in_steps[-1], ())
    assert pieces([joined]) == expected
    outbox, seat = Outbox(), Seat(1, 0)
    for delta in in_steps:
        outbox.add(seat, delta)
    batch = outbox.next()
    assert isinstance(batch, TextBatch)
    row = [piece for parsed in batch.parsed for piece in parsed.pieces]
    assert merged([*content(batch.text[0]), *row]) == expected
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=TextBatch) == batch


def test_an_output_of_everything() -> None:
    found = deltas(choice(), steps(f"<think>\nwhy not\n</think>\n\nLet me see.\n{CALL}", [3, 9]))
    told = pieces(found)
    assert (reasoning_of(told), content_of(told), calls_of(told)) == ("why not", "Let me see.", [("f", '{"a": 1}')])
    assert found[-1].finish == Finish.CALLS
    extra = found[-1].extra
    assert extra is not None
    assert extra.reasoning_tokens == len(ids("<think>\nwhy not\n</think>"))


def test_how_calls_end() -> None:
    tokens = ids(CALL)
    assert deltas(choice(), [tokens], Finish.LENGTH)[-1].finish == Finish.LENGTH
    assert deltas(choice(), [[*tokens[:-8], END]])[-1].finish == Finish.STOP
    assert deltas(choice("}"), [[token] for token in tokens])[-1].finish == Finish.STOP
    assert deltas(choice(), [[*tokens, END]])[-1].finish == Finish.CALLS


def test_a_stop_string_ends_what_was_held() -> None:
    found = deltas(choice("lo"), [[token] for token in ids("<think>why</think>\n\nhello there")])
    assert content_of(pieces(found)) == "hel"
    assert found[-1].stop_hit
    assert found[-1].extra is not None
    assert found[-1].extra.reasoning_tokens == len(ids("<think>why</think>"))


def test_special_tokens_that_a_parser_needs_are_text() -> None:
    shown = detokenizer(vocabulary(), skip_special_tokens=True, shown=frozenset((END,)))
    hidden = detokenizer(vocabulary(), skip_special_tokens=True)
    assert (shown.push(END), hidden.push(END)) == ("<|im_end|>", "")


def test_pieces_are_nothing_but_content_without_a_parser() -> None:
    machine = choice(parsing=Parsing())
    found = deltas(machine, [[token] for token in [*ids("<tool_call>x"), END]])
    assert all(piece.kind == PieceKind.CONTENT for piece in pieces(found))
    assert content_of(pieces(found)) == "<tool_call>x"
