"""A compile worker's own part: frames, and what comes of a grammar. Its limits are tested through its owner."""

from __future__ import annotations

import io

import pytest

from penstock.engine_core.grammar import patterns
from penstock.protocol.messages import Grammar
from penstock.services.tokenizer import compile_worker, worker_protocol
from penstock.services.tokenizer.worker_protocol import COMPILED, Done, Refusal
from tests.engine_core.grammar.vocabulary import tokens


def test_frames_come_out_as_they_went_in() -> None:
    stream = io.BytesIO()
    for body in (b"", b"x", b"y" * 100_000):
        worker_protocol.write_frame(stream, body)
    stream.seek(0)
    assert [worker_protocol.read_frame(stream) for _ in range(4)] == [b"", b"x", b"y" * 100_000, None]


def test_what_compiles_is_done_and_what_does_not_is_refused() -> None:
    done = compile_worker.outcome(Grammar(kind="regex", source="a+"), tokens())
    assert isinstance(done, Done)
    assert "a+" in done.source
    refusal = compile_worker.outcome(Grammar(kind="regex", source="(a"), tokens())
    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid_grammar"


def test_a_model_without_an_end_is_told() -> None:
    refusal = compile_worker.outcome(Grammar(kind="regex", source="a+"), None)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "unsupported"


def test_what_nobody_foresaw_is_a_refusal_without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(grammar: Grammar, found: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(compile_worker, "compile_grammar", fail)
    refusal = compile_worker.outcome(Grammar(kind="regex", source="a+"), tokens())
    assert isinstance(refusal, Refusal)
    assert "secret" not in refusal.message


def test_both_outcomes_travel() -> None:
    import msgspec

    for outcome in (Done("s", ("a",), 0.1), Refusal("m", None)):
        assert COMPILED.decode(msgspec.msgpack.encode(outcome)) == outcome


def test_the_address_space_is_known() -> None:
    assert worker_protocol.address_space() > 1 << 24


def test_a_flood_of_patterns_leaves_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schema has patterns of its own, whose trees are remembered for the next one: without a bound, gigabytes."""
    monkeypatch.setattr(compile_worker, "MOST_REMEMBERED", 4 << 20)
    remembered, before = compile_worker.CacheLimit(), compile_worker.memory_used()
    most = 0
    for number in range(16):  # a megabyte each
        piece = "".join(f"({letter}{number}|x)" for letter in "abcdefghijklmnopqrstuvwxyz" * 40)
        patterns.read(f"^{piece}$")
        remembered.trim()
        most = max(most, compile_worker.memory_used() - before)
    assert compile_worker.MOST_REMEMBERED // 2 < most < 2 * compile_worker.MOST_REMEMBERED


def test_what_stays_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are remembered from one compilation to the next as long as they are small, whatever else has grown."""
    most = compile_worker.MOST_REMEMBERED
    held = iter([0, most + 1, most + 1, most + 2])
    monkeypatch.setattr(compile_worker, "memory_used", lambda: next(held))
    forgotten: list[bool] = []
    monkeypatch.setattr(compile_worker.automata, "forget", lambda: forgotten.append(True))
    remembered = compile_worker.CacheLimit()
    remembered.trim()
    remembered.trim()
    assert forgotten == [True]
