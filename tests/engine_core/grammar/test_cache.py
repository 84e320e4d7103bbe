"""Automata are bounded in bytes, those that run included, and what is charged is no less than what they take."""

from __future__ import annotations

import gc
import json
import random
import string

import pytest

from penstock.engine_core.grammar.cache import FAMILY, GrammarCache, cost
from penstock.engine_core.grammar.compilation import compile_grammar
from penstock.engine_core.grammar.guide import Guide
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.protocol.messages import Automaton, Grammar
from penstock.services.tokenizer.worker_protocol import allocated
from tests.engine_core.grammar.vocabulary import allowed, automaton, tokens

SIZE = cost(Automaton(source="x", memory=1 << 20))


def of(number: int, memory: int = 1 << 20) -> Automaton:
    return Automaton(source=chr(ord("a") + number), memory=memory)


def put(cache: GrammarCache, found: Automaton) -> None:
    charge = cache.reserve(found)
    assert cache.built(found, charge, Guide(tokens(), automaton("regex", "[ab]+"))) is None


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = GrammarCache(3 * SIZE)
    for number in range(3):
        put(cache, of(number))
    assert (cache.statistics().entries, cache.bytes) == (3, 3 * SIZE)
    assert cache.find(of(0)) is not None
    put(cache, of(3))
    assert (cache.statistics().entries, cache.bytes) == (3, 3 * SIZE)
    assert cache.find(of(1)) is None
    assert cache.find(of(0)) is not None


def test_what_requests_run_by_counts_and_is_not_given_up() -> None:
    cache = GrammarCache(2 * SIZE)
    running = []
    for number in range(2):
        put(cache, of(number))
        running.append(cache.find(of(number)))
    choices = [guide.copy() for guide in running if guide is not None]
    running.clear()
    running += [cache.find(of(0)), cache.find(of(1))]
    with pytest.raises(Overloaded, match="--grammar-cache-bytes") as caught:
        cache.reserve(of(2))
    assert caught.value.retry_after > 0
    assert cache.statistics().entries == 2, "giving them up frees nothing"
    running.pop()
    gc.collect()
    put(cache, of(2))
    assert cache.find(of(1)) is None
    assert cache.bytes == 3 * SIZE, "a choice still runs by what was given up"
    choices.clear()
    assert cache.bytes == 2 * SIZE


def test_what_is_being_made_counts() -> None:
    cache = GrammarCache(2 * SIZE)
    charges = [cache.reserve(of(0)), cache.reserve(of(1))]
    with pytest.raises(Overloaded):
        cache.reserve(of(2))
    charges.pop()  # it failed
    assert cache.reserve(of(2))


def test_what_is_larger_than_the_cache_is_refused_for_good() -> None:
    cache = GrammarCache(2 * SIZE)
    put(cache, of(0))
    with pytest.raises(InvalidRequest, match=r"takes 10 MiB of memory; --grammar-cache-bytes leaves 3 MiB") as caught:
        cache.reserve(of(1, memory=9 << 20))
    assert caught.value.code == "grammar_too_complex"
    assert cache.statistics().entries == 1


def test_one_more_of_an_automaton_is_made_where_there_is_room() -> None:
    cache = GrammarCache(2 * SIZE, families=3)
    put(cache, of(0))
    assert cache.wants(of(0)) is None
    for _ in range(3 * FAMILY):
        cache.find(of(0))
    charge = cache.wants(of(0))
    assert charge is not None
    assert cache.wants(of(0)) is None, "no room for a third"
    cache.built(of(0), charge, Guide(tokens(), automaton("regex", "[ab]+")))
    assert (cache.statistics().entries, cache.bytes) == (1, 2 * SIZE)
    assert cache.wants(of(1)) is None, "nobody knows it"


def test_a_build_that_failed_leaves_nothing_and_ends_its_requests() -> None:
    cache = GrammarCache(2 * SIZE)
    error = cache.built(of(0), cache.reserve(of(0)), ValueError("odd\nmore"))
    assert error is not None
    assert error.message == "the structure could not be prepared: odd"
    refused = InvalidRequest("no", param="p")
    assert cache.built(of(0), cache.reserve(of(0)), refused) is refused
    assert cache.find(of(0)) is None
    assert (cache.statistics().failed, cache.statistics().entries, cache.bytes) == (2, 0, 0)


def word(rng: random.Random, length: int = 12) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def keys(rng: random.Random, value: object, count: int) -> str:
    return json.dumps({"type": "object", "properties": {word(rng): value for _ in range(count)}})


GRAMMARS = {
    "object": lambda rng: Grammar(kind="json_schema", source=keys(rng, {"type": "string"}, 600)),
    "numbers": lambda rng: Grammar(
        kind="json_schema", source=keys(rng, {"type": "integer", "minimum": 17, "maximum": 123_456_789}, 60)
    ),
    "choice": lambda rng: Grammar(kind="choice", source=json.dumps([word(rng, 30) for _ in range(3000)])),
    "enum": lambda rng: Grammar(kind="json_schema", source=json.dumps({"enum": [word(rng) for _ in range(3000)]})),
    "regex": lambda rng: Grammar(kind="regex", source=f"({word(rng)}|[a-z]{{1,200}}[0-9]+)*"),
    "small": lambda rng: Grammar(kind="json_schema", source=keys(rng, {"type": "string"}, 5)),
    "lark": lambda rng: Grammar(
        kind="grammar", source="start: " + " ".join([f'"{word(rng)}" /[a-z]+/' for _ in range(900)])
    ),
}


@pytest.mark.skipif(not allocated(), reason="the C library doesn't tell what is allocated")
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_charge_is_no_less_than_what_an_automaton_takes(name: str) -> None:
    """Several of them, built and walked as outputs of hundreds of tokens do, against what the C library counts."""
    rng, held, charged = random.Random(name), [], 0
    found = []
    for _ in range(4):
        grammar = GRAMMARS[name](rng)
        compiled = compile_grammar(grammar, tokens(), allocated)
        found.append(Automaton(source=compiled.source, memory=compiled.memory))
    before = allocated()
    for each in found:
        charged += cost(each)
        guide = Guide(tokens(), each)
        guide.prime()
        held.append(guide)
        for _ in range(3):
            walk(guide.copy(), rng)
    assert allocated() - before <= charged
    assert charged <= 2 * (allocated() - before) + 4 * (1 << 20), "and not so much more that nothing is kept"


def walk(guide: Guide, rng: random.Random) -> None:
    for _ in range(60):
        legal = [token for token in allowed(guide.matcher.compute_bitmask()) if token not in tokens().eos]
        if guide.finished or not legal:
            return
        guide.advance([rng.choice(legal)])
