"""A compile worker's own part: frames, and what comes of a grammar. Its limits are tested through its owner."""

from __future__ import annotations

import io

import pytest

from protocol.messages import Grammar
from services.tokenizer import frames, worker
from services.tokenizer.orders import OUTCOME, Done, Refusal
from tests.engine_core.grammar.vocabulary import tokens


def test_frames_come_out_as_they_went_in() -> None:
    stream = io.BytesIO()
    for body in (b"", b"x", b"y" * 100_000):
        frames.write_frame(stream, body)
    stream.seek(0)
    assert [frames.read_frame(stream) for _ in range(4)] == [b"", b"x", b"y" * 100_000, None]


def test_what_compiles_is_done_and_what_does_not_is_refused() -> None:
    done = worker.outcome(Grammar(kind="regex", source="a+"), tokens())
    assert isinstance(done, Done)
    assert "a+" in done.source
    refusal = worker.outcome(Grammar(kind="regex", source="(a"), tokens())
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_grammar"


def test_a_model_without_an_end_is_told() -> None:
    refusal = worker.outcome(Grammar(kind="regex", source="a+"), None)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "unsupported"


def test_what_nobody_foresaw_is_a_refusal_without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(grammar: Grammar, found: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(worker, "compile_grammar", fail)
    refusal = worker.outcome(Grammar(kind="regex", source="a+"), tokens())
    assert isinstance(refusal, Refusal)
    assert "secret" not in refusal.message


def test_both_outcomes_travel() -> None:
    import msgspec

    for outcome in (Done("s", ("a",), 0.1, 0.2), Refusal("m", None)):
        assert OUTCOME.decode(msgspec.msgpack.encode(outcome)) == outcome


def test_the_address_space_is_known() -> None:
    assert frames.address_space() > 1 << 24
