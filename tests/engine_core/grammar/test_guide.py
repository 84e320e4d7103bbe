"""A guide follows an output, says what must come and when it is over, and fails loudly."""

from __future__ import annotations

import random

import pytest

from penstock.engine_core.grammar.guide import Guide, first_line, follow
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.messages import Automaton
from tests.engine_core.grammar.vocabulary import END, allowed, guide, ids, tokens

PERSON = (
    '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},'
    '"required":["name","age"],"additionalProperties":false}'
)
THINK = 4091  # </think>


def test_it_takes_a_valid_output_to_its_end() -> None:
    found = guide("json_schema", PERSON, whitespace="none")
    assert found.bound
    found.advance(ids('{"name":"Tom","age":5}'))
    assert found.finished
    assert found.forced() == [END]
    found.advance([END])
    assert found.ended
    assert found.forced() == []


def test_a_token_outside_the_structure_is_a_failure() -> None:
    found = guide("json_schema", PERSON)
    with pytest.raises(GrammarFailure):
        found.advance(ids("hello"))


def test_an_end_inside_the_structure_is_a_failure() -> None:
    found = guide("json_schema", PERSON)
    found.advance(ids('{"name"'))
    assert not found.finished
    with pytest.raises(EngineFailure, match="inside its structure"):
        found.advance([END])


def test_nothing_but_ends_follows_an_end() -> None:
    found = guide("regex", "a+")
    found.advance([*ids("aa"), END, END])
    with pytest.raises(EngineFailure, match="after its end"):
        found.advance(ids("a"))


def test_a_wrong_grammar_fails_when_the_guide_is_made() -> None:
    with pytest.raises(GrammarFailure) as caught:
        Guide(tokens(), Automaton(source="start: ("))
    assert "\n" not in caught.value.message


def test_a_reported_failure_is_raised_by_the_next_token() -> None:
    found = guide("regex", "a+")
    found.fail("too complex")
    found.fail("something else")
    assert found.failed
    assert found.copy().failed
    with pytest.raises(GrammarFailure, match="too complex"):
        found.advance(ids("a"))


def test_forced_runs_are_what_any_output_begins_with() -> None:
    found = guide("json_schema", PERSON, whitespace="none")
    run = found.forced()
    assert run == ids('{"name')
    found.advance(run)
    found.advance(ids('":"x'))
    assert found.forced() == []  # the name may go on
    found.advance(ids('",'))
    assert found.forced()[:1] == ids('"age')[:1]


def test_forced_runs_are_bounded_and_guesses_that_the_automaton_takes() -> None:
    found = guide("regex", "a{500}b")
    run = found.forced()
    assert 0 < len(run) <= 64
    found.advance(run)
    assert found.forced()


def test_copies_go_their_own_ways() -> None:
    one = guide("choice", '["left","right"]')
    two = one.copy()
    one.advance(ids("left"))
    two.advance(ids("right"))
    assert one.finished
    assert two.finished


def test_the_output_is_free_until_the_marker_has_come() -> None:
    found = guide("regex", "[0-9]{2}", after=(THINK,))
    assert not found.bound
    assert found.forced() == []
    assert not found.finished
    found.advance(ids("I think, 7"))
    assert not found.bound
    found.advance([THINK, *ids("4")])
    assert found.bound
    with pytest.raises(GrammarFailure):
        found.advance(ids("x"))


def test_a_marker_of_several_tokens_is_found_wherever_it_stands() -> None:
    marker = (5, 6, 5, 7)
    rng = random.Random(3)
    for _ in range(300):
        text = [rng.choice((5, 6, 7)) for _ in range(rng.randrange(12))]
        seen, bound = 0, None
        for place, token in enumerate(text):
            seen = follow(marker, seen, token)
            if seen == len(marker):
                bound = place
                break
        ends = [place for place in range(len(text)) if tuple(text[: place + 1][-4:]) == marker]
        assert bound == (ends[0] if ends else None)


def test_entries_before_the_marker_are_free() -> None:
    found = guide("regex", "[0-9]{2}", after=(THINK,))
    assert found.free_before([]) == 1
    assert found.free_before(ids("hm")) == len(ids("hm")) + 1
    assert found.free_before([THINK, *ids("4")]) == 1
    assert guide("regex", "a").free_before([1, 2]) == 0
    assert not found.bound  # a look leaves it as it was


def test_drafts_after_an_end_are_nothing() -> None:
    found = guide("regex", "a+")
    assert found.before_end([1, 2, END, 3]) == [1, 2]
    assert found.before_end([1, 2]) == [1, 2]


@pytest.mark.parametrize("whitespace", ["none", "bounded"])
def test_random_walks_under_the_mask_end_in_valid_outputs(whitespace: str) -> None:
    import json

    import jsonschema

    from tests.engine_core.grammar.vocabulary import vocabulary

    schema = json.loads(PERSON) | {"properties": {"name": {"type": "string", "maxLength": 9}, "age": {"maximum": 99,
                                                  "minimum": 0, "type": "integer"}}}  # fmt: skip
    rng = random.Random(11)
    for _ in range(20):
        found, out = guide("json_schema", json.dumps(schema), whitespace=whitespace), []
        while not found.ended:
            token = rng.choice(sorted(allowed(found.matcher.compute_bitmask())))
            found.advance([token])
            out.append(token)
            assert len(out) < 200
        text = vocabulary().decode(out, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)


def test_errors_are_told_in_one_line() -> None:
    assert first_line("\n a\nb") == "a"
    assert first_line("") == "no reason was given"
    assert len(first_line("x" * 1000)) == 300


def test_priming_fails_where_the_automaton_does() -> None:
    guide("regex", "a+").prime()
    hollow = Guide(tokens(), Automaton(source="start: start"))
    with pytest.raises(GrammarFailure, match="NoExtension"):
        hollow.prime()


def test_a_run_that_would_be_followed_too_far_is_a_failure() -> None:
    found = guide("grammar", 'start: "x" tail\ntail: "y" tail')
    assert found.forced() == []
    with pytest.raises(GrammarFailure, match="without a choice"):
        found.advance(ids("x"))


def test_time_beyond_what_is_free_adds_up_and_is_paid_back() -> None:
    found = guide("regex", "[ab]*")
    for _ in range(1000):
        found.spend(0.2, 1)
        found.spend(0.0, 20)
    assert not found.failed
    twin = found.copy()
    for _ in range(30):
        twin.spend(0.02, 1)
    assert twin.failed
    assert not found.failed
    with pytest.raises(GrammarFailure, match="ms a token"):
        twin.advance(ids("a"))
