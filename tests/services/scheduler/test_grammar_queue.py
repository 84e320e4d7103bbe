"""Requests wait for their automaton beside the loop, and never for another's."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future

import pytest

from penstock.engine_core.grammar import cache as module
from penstock.engine_core.grammar.cache import cost
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.engine_core.grammar.guide import Guide
from penstock.protocol.errors import GrammarFailure, rejection
from penstock.protocol.links import Role
from penstock.protocol.messages import Automaton, Grammar, Sampling, SubmitTokens
from penstock.services.scheduler.grammar_queue import GrammarQueue
from penstock.services.tokenizer.worker_protocol import allocated
from tests.engine_core.grammar.vocabulary import automaton, tokens
from tests.services.scheduler.fakes import FakePort, Inline


class Later(Executor):
    """Does what it is given when it is told to."""

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.jobs.append((future, fn, args))
        return future

    def run(self) -> None:
        for future, fn, args in self.jobs:
            future.set_result(fn(*args))
        self.jobs = []


def request(number: int, pattern: str = "a+") -> SubmitTokens:
    return SubmitTokens(id=number, token_ids=b"", sampling=Sampling(), automaton=automaton("regex", pattern))


@pytest.fixture
def peer():
    return FakePort(Role.TOKENIZER).join()


def test_one_build_serves_all_who_wait_and_those_who_come_later(peer) -> None:
    threads = Later()
    guides = GrammarQueue(tokens(), threads)
    for number in (1, 2):
        guides.take(peer, request(number))
    guides.take(peer, request(3, "b+"))
    assert (guides.admit(), guides.waiting, len(threads.jobs)) == ([], 3, 2)
    threads.run()
    admitted = guides.admit()
    assert [each.request.id for each in admitted] == [1, 2, 3]
    families = [each.guide.family for each in admitted if isinstance(each.guide, Guide)]
    assert families[0] is families[1] is not families[2]
    guides.take(peer, request(4))
    assert [each.request.id for each in guides.admit()] == [4]
    statistics = guides.statistics()
    assert (statistics.cache.built, statistics.cache.hits, statistics.cache.entries, statistics.waiting) == (2, 1, 2, 0)


def test_an_abort_is_told_with_the_request(peer) -> None:
    threads = Later()
    guides = GrammarQueue(tokens(), threads)
    guides.take(peer, request(1))
    assert guides.abort(1)
    assert not guides.abort(2)
    threads.run()
    assert [each.aborted for each in guides.admit()] == [True]


def test_an_abort_finds_a_request_whose_automaton_was_remembered(peer) -> None:
    """It is ready at once, and it was not returned yet: the abort of the same iteration must not pass it."""
    guides = GrammarQueue(tokens(), Inline())
    guides.take(peer, request(1))
    assert [each.aborted for each in guides.admit()] == [False]
    for number in (2, 3, 4):
        guides.take(peer, request(number))
    assert guides.abort(3)
    assert [(each.request.id, each.aborted) for each in guides.admit()] == [(2, False), (3, True), (4, False)]
    assert not guides.abort(3)


def test_requests_of_a_peer_that_is_gone_are_dropped(peer) -> None:
    threads = Later()
    guides = GrammarQueue(tokens(), threads)
    guides.take(peer, request(1))
    guides.forget(peer)
    threads.run()
    assert guides.admit() == []
    assert guides.waiting == 0
    guides.take(peer, request(2))
    guides.forget(peer)
    assert guides.admit() == []


def test_an_automaton_that_fails_is_an_answer(peer) -> None:
    guides = GrammarQueue(tokens(), Inline())
    guides.take(peer, SubmitTokens(id=1, token_ids=b"", sampling=Sampling(), automaton=Automaton(source="x y")))
    (admitted,) = guides.admit()
    assert isinstance(admitted.guide, GrammarFailure)
    refused = rejection(admitted.request.id, admitted.guide)
    assert (refused.status, refused.code) == (400, "grammar_failed")
    assert guides.statistics().cache.failed == 1
    assert guides.statistics().cache.entries == 0


def test_a_model_without_structures_says_so(peer) -> None:
    guides = GrammarQueue(None, Inline())
    guides.take(peer, request(1))
    (admitted,) = guides.admit()
    assert isinstance(admitted.guide, GrammarFailure)


def test_an_automaton_that_many_start_from_is_made_again(peer) -> None:
    """Rows that start from copies of one automaton are filled one after the other, so there are as many as threads."""
    guides = GrammarQueue(tokens(), Inline(), families=3)
    found = []
    for number in range(8 * module.FAMILY):
        guides.take(peer, request(number))
        found += [each.guide.family for each in guides.admit()]
    assert len(found) == 8 * module.FAMILY
    assert len(set(map(id, found[: module.FAMILY]))) == 1
    last = [id(family) for family in found[4 * module.FAMILY :]]
    assert len(set(last)) == 3
    assert max(last.count(family) for family in last) <= 2 * module.FAMILY
    statistics = guides.statistics()
    assert (statistics.cache.built, statistics.cache.entries) == (3, 1)


def test_a_crowd_that_waits_for_one_automaton_counts_at_once(peer) -> None:
    threads = Later()
    guides = GrammarQueue(tokens(), threads, families=8)
    for number in range(4 * module.FAMILY):
        guides.take(peer, request(number))
    threads.run()
    assert len(guides.admit()) == 4 * module.FAMILY
    assert len(threads.jobs) == 4, "five in all"
    threads.run()
    guides.take(peer, request(99))
    (admitted,) = guides.admit()
    assert admitted.request.id == 99
    assert guides.statistics().cache.built == 5


def test_memory_is_bounded_and_what_does_not_fit_is_told_so(peer) -> None:
    size = cost(automaton("regex", "a"))
    guides = GrammarQueue(tokens(), Inline(), limit=2 * size + 100)
    running = []
    for number, letter in enumerate("abcd"):
        guides.take(peer, request(number, letter))
        (admitted,) = guides.admit()
        assert isinstance(admitted.guide, Guide)
    assert guides.statistics().cache.entries == 2
    assert size <= guides.statistics().cache.bytes <= 2 * size + 100
    for letter in "cd":
        guides.take(peer, request(8, letter))
        running += guides.admit()
    guides.take(peer, request(9, "e"))
    (admitted,) = guides.admit()
    told = rejection(admitted.request.id, admitted.guide)
    assert (told.status, told.code) == (429, "overloaded")
    assert told.retry_after
    assert "--grammar-cache-bytes" in told.message
    running.clear()
    del admitted
    guides.take(peer, request(10, "e"))
    assert isinstance(guides.admit()[0].guide, Guide)
    small = GrammarQueue(tokens(), Inline(), limit=100)
    small.take(peer, request(1))
    assert rejection(2, small.admit()[0].guide).status == 400


def test_a_request_that_runs_holds_no_source(peer) -> None:
    """Megabytes of it, for each of hundreds of requests, beside what the cache counts."""
    guides = GrammarQueue(tokens(), Inline())
    for number, pattern in enumerate(("a" * 3000, "a" * 3000, "b" * 3000)):
        guides.take(peer, request(number, pattern))
    one, two, three = [each.request.automaton for each in guides.admit()]
    assert one is not None
    assert len(one.source) < 20
    assert one == two != three, "what failed with it is still known by it"


@pytest.mark.skipif(not allocated(), reason="the C library doesn't tell what is allocated")
@pytest.mark.parametrize("kind", ["json_schema", "choice"])
def test_a_flood_of_long_grammars_takes_no_more_than_the_limit(peer, kind: str) -> None:
    """Forty of them, which would take 80 MB; each request has ended when the next one comes."""
    guides, limit = GrammarQueue(tokens(), Inline(), limit=16 << 20), 16 << 20
    before = allocated()
    for number in range(40):
        words = [f"word {number} {place:06}" for place in range(900)]
        keys = {"type": "object", "properties": {word: {"type": "string"} for word in words}, "required": words}
        grammar = Grammar(kind=kind, source=json.dumps(keys if kind == "json_schema" else words * 3))
        found = compile_grammar(grammar, tokens(), allocated)
        made = Automaton(source=found.source, memory=found.memory)
        guides.take(peer, SubmitTokens(id=number, token_ids=b"", sampling=Sampling(), automaton=made))
        assert isinstance(guides.admit()[0].guide, Guide)
        assert guides.statistics().cache.bytes <= limit
        assert allocated() - before < limit + (4 << 20)
    assert guides.statistics().cache.entries > 2
