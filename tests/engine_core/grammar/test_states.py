"""What is remembered of a state is what an automaton says that took the same tokens, whatever other outputs came by."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from penstock.engine_core.grammar import guide as guides
from penstock.engine_core.grammar import states
from penstock.engine_core.grammar.guide import Guide, go_on
from penstock.engine_core.grammar.masks import MaskRow, MaskStore
from penstock.engine_core.grammar.states import State, States
from penstock.protocol.errors import GrammarFailure, RequestError
from penstock.protocol.messages import Automaton
from tests.engine_core.grammar.vocabulary import END, allowed, automaton, guide, ids, tokens

SCHEMAS = Path(__file__).parents[3] / "benchmarks" / "schemas"
ROW = {"id": {"type": "integer", "minimum": 7, "maximum": 1200}, "name": {"type": "string", "maxLength": 6},
       "n": {"type": "number"}, "any": {}, "bits": {"type": "array", "items": {"type": "boolean"}, "minItems": 2,
       "maxItems": 3}, "kind": {"enum": ["a", "ab", 1]}, "one": {"anyOf": [{"type": "string", "pattern": "^a+$"},
       {"type": "string", "maxLength": 2}, {"type": "null"}]}}  # fmt: skip
ROWS = {"type": "array", "minItems": 100, "maxItems": 200, "items": {
    "type": "object", "properties": ROW, "required": ["id", "name"], "additionalProperties": False}}  # fmt: skip
KEYS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 2}}, "required":
        ["b"], "patternProperties": {"^x-": {"type": "string"}, "^y": {"type": "integer"}}}  # fmt: skip
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"v": {"type": ["string", "null"]}, "of": {
    "type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["v"], "additionalProperties": False}}}  # fmt: skip


def agrees(
    origin: Guide, source: str, rng: random.Random, store: MaskStore, written: list[int], longest: int
) -> tuple[int, int]:
    """Walk a copy along `written` and then anywhere, and an automaton beside it. How many masks were there already, and
    how many were made."""
    found, oracle, step, hits = origin.copy(), tokens().matcher(source), int(store._last.max()) + 1, 0
    for place in range(longest):
        drafts = written[place : place + rng.randrange(3)]
        hits += store.soon(step, 0, [MaskRow(found, [], 0)]) is not None
        filled = store.fill(step + 1, step, [MaskRow(found, drafts, 0)])
        step += 2
        slots = np.frombuffer(filled.slots, np.int32).tolist()
        legal = sorted(allowed(oracle.compute_bitmask()))
        assert sorted(allowed(store._stored[slots[0]].text)) == legal, tokens().text(written[:place])
        assert found.finished == oracle.is_stopped()
        assert found.may_end() == oracle.is_accepting()
        assert found.forced() == ([END] if oracle.is_stopped() else oracle.compute_ff_tokens()[:64])
        for count in range(1, len(drafts) + 1):
            behind = oracle.deep_copy()
            if not behind.consume_tokens(drafts[:count]):
                break
            assert allowed(store._stored[slots[count]].text) == allowed(behind.compute_bitmask())
        going = [token for token in legal if token not in tokens().eos]
        if place < len(written):
            token = written[place]
        elif not going or (len(going) < len(legal) and rng.random() < 0.3):
            break
        else:
            token = min(rng.choices(going, k=3), key=lambda each: len(tokens().text([each])))
            written = [*written, token]
        if token in tokens().eos or rng.random() < 0.2 or not found.step(token):
            found.advance([token])
        assert oracle.consume_token(token)
    return hits, place + 1


def check(automaton_: Automaton, examples: list[object], rng: random.Random, longest: int) -> tuple[int, int]:
    """Hits and steps of walks that share their states, along examples and along nothing."""
    origin, store, hits, made = Guide(tokens(), automaton_), MaskStore(tokens(), 1024, 1), 0, 0
    for example in [*examples, "", "", ""]:
        ways = (json.dumps(example), json.dumps(example, ensure_ascii=False, indent=1))
        written = tokens().split(rng.choice(ways).encode()) if example != "" else []
        del written[tokens().matcher(automaton_.source).try_consume_tokens(written) :]
        found = agrees(origin, automaton_.source, rng, store, written, longest)
        hits, made = hits + found[0], made + found[1]
    return hits, made


@pytest.mark.parametrize("whitespace", ["bounded", "none", "[ \t]*"])
@pytest.mark.parametrize("schema", [ROWS, KEYS, TREE, {}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}])
def test_what_is_remembered_is_what_the_automaton_says(schema: dict[str, object], whitespace: str) -> None:
    rng = random.Random(f"{schema} {whitespace}")
    row = {
        "id": 70,
        "name": 'é"\\',
        "n": -1.5e3,
        "any": [{"x": [1, {}]}],
        "bits": [True, False],
        "kind": "ab",
        "one": "aa",
    }
    examples = [
        [row] * 3,
        {"b": "\\u0041b", "x-1": "y", "y": 3, "z": [None]},
        {"v": "é", "of": [{"v": None, "of": []}]},
    ]
    check(automaton("json_schema", json.dumps(schema), whitespace=whitespace), examples, rng, 90)


def test_an_output_without_a_position_follows_its_automaton() -> None:
    """Deeper than positions are told apart, and a key and a value that are longer."""
    origin, store = guide("json_object"), MaskStore(tokens(), 64, 1)
    for step, text in enumerate(
        ("[" * 2000 + "1" + "]" * 2000, '{"k":' * 70 + "1" + "}" * 70, f'{{"{"k" * 999}":""}}')
    ):
        one, oracle = origin.copy(), tokens().matcher(automaton("json_object").source)
        written = tokens().tokenizer.greedy_tokenize(f'{{"a":{text}')
        one.advance(written)
        assert oracle.consume_tokens(written)
        (slot,) = np.frombuffer(store.fill(step + 1, step, [MaskRow(one, [], 0)]).slots, np.int32).tolist()
        assert allowed(store._stored[slot].text) == allowed(oracle.compute_bitmask())


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(path.stem for path in SCHEMAS.glob("*.json")))
def test_what_is_remembered_is_what_the_automaton_says_of_people_s_schemas(family: str) -> None:
    for case in json.loads((SCHEMAS / f"{family}.json").read_text()):
        rng = random.Random(case["name"])
        try:
            found = automaton("json_schema", json.dumps(case["schema"]), whitespace=rng.choice(("bounded", "none")))
        except RequestError:
            continue
        if not found.unique:
            check(found, case["valid"][:4], rng, 150)


@pytest.mark.parametrize(
    ("kind", "source"), [("regex", "[ab]{2,9}c*"), ("choice", '["left","lef","right"]'), ("json_object", "")]
)
def test_other_automata_are_remembered_by_what_was_written(kind: str, source: str) -> None:
    hits, steps = check(automaton(kind, source), [], random.Random(3), 40)
    assert 0 < hits < steps


def test_values_of_a_place_are_one_state_when_they_are_complete() -> None:
    origin = guide("json_schema", json.dumps(ROWS))
    found = []
    for text in (
        '[{"id": 70, "name": "ab", ',
        '[{"id": 9, "name":\n"x\\n"},{"id": 911, "name": ""}, {"id": 8,"name": "b", ',
    ):
        one = origin.copy()
        one.advance(tokens().tokenizer.greedy_tokenize(text))
        found.append(one.state)
    assert found[0] is found[1] is not None


def test_items_are_counted_where_a_bound_is_near() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 90, "maxItems": 180}
    origin = guide("json_schema", json.dumps(schema), whitespace="none")
    far, states_of = tokens().far, {}
    one = origin.copy()
    one.advance(ids("[")[:1])
    for count in range(180):
        states_of[count] = one.state
        one.advance(tokens().tokenizer.greedy_tokenize("true" + ("," if count < 179 else "]")))
    distinct = {count for count in range(1, 180) if states_of[count] is not states_of[count - 1]}
    assert {*range(91 - far, 91), *range(181 - far, 180)} <= distinct
    assert len(distinct) < 180 - 90
    assert one.finished


def test_items_of_arrays_in_arrays_are_counted_whatever_outputs_came_before() -> None:
    """Bounds of both are far and near by turns, arrays end and begin within one token, and few states are new."""
    far, rng = tokens().far, random.Random(6)
    inner = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2 * far}
    schema = {"type": "array", "items": inner, "minItems": far + 2, "maxItems": 3 * far}
    found = automaton("json_schema", json.dumps(schema), whitespace="none")
    origin, store, known = Guide(tokens(), found), MaskStore(tokens(), 1024, 1), 0
    for _ in range(12):
        sizes = [rng.choice((0, 0, 1, 2 * far - 1, 2 * far)) for _ in range(rng.choice((far + 2, 3 * far)))]
        text = json.dumps([[rng.random() < 0.5] * size for size in sizes], separators=(",", ":"))
        cuts = sorted({0, len(text), *rng.choices(range(len(text)), k=len(text) // 5)})
        parts = [text[start:end].encode() for start, end in itertools.pairwise(cuts)]
        written = [token for part in parts for token in tokens().split(part)]
        known += agrees(origin, found.source, rng, store, written, len(written))[0]
    assert known > 300


def test_a_token_that_a_known_mask_forbids_is_a_failure_wherever_it_leads() -> None:
    origin, store = guide("json_schema", json.dumps(KEYS), whitespace="none"), MaskStore(tokens(), 64, 1)
    one, two, three = origin.copy(), origin.copy(), origin.copy()
    for place, token in enumerate([tokens().single[byte] for byte in b'{"a":1,"b":"ccc"}']):
        one.advance([token])
        store.fill(place + 1, place, [MaskRow(one, [], 0)])
    for each in (two, three):
        each.advance([tokens().single[byte] for byte in b'{"a":1,"b":"'])
    (early,) = ids('"')
    assert not two.step(early)
    with pytest.raises(GrammarFailure, match="cannot be followed"):
        two.advance([early])
    store.close()
    with pytest.raises(GrammarFailure, match="cannot be followed"):
        three.advance([early])


def test_where_it_goes_on_for_certain_a_token_is_a_look_up() -> None:
    """No automaton is asked; one that may end, or whose state is new, is not for certain."""
    origin = guide("json_schema", json.dumps(KEYS), whitespace="none")
    one, two, written = origin.copy(), origin.copy(), ids('{"a":17,"b":"cc"}')
    assert not one.step(written[0])
    for token in written:
        one.advance([token])
        assert one.finished == (token == written[-1])
    two._matcher = None  # type: ignore[assignment]
    assert [two.step(token) for token in written] == [True] * (len(written) - 1) + [False]
    assert not two.step(END)


def test_an_automaton_is_never_far_behind_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "MOST_UNTAKEN", 8)
    origin = guide("json_schema", '{"type":"array","items":{"type":"boolean"}}', whitespace="none")
    one, two = origin.copy(), origin.copy()
    written = [tokens().single[byte] for byte in b"[" + b"true," * 20]
    for token in written:
        one.advance([token])
        assert not one.finished
    stepped = 0
    for token in written:
        if two.step(token):
            stepped += 1
        else:
            two.advance([token])
        assert len(two._untaken) <= 8
    assert stepped > 80


def test_outputs_that_go_on_together_are_where_each_alone_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those take nothing that are set aside, whose last mask was slow, or behind whose token too much is forced."""
    monkeypatch.setattr(guides, "MOST_UNTAKEN", 8)
    rng, origin, went_on = random.Random(4), guide("json_schema", json.dumps(ROWS)), 0
    together, alone = [origin.copy() for _ in range(12)], [origin.copy() for _ in range(12)]
    together[0].seconds = 1.0
    for place in range(80):
        said = [rng.choice(sorted(allowed(one.matcher.compute_bitmask()) - tokens().eos)) for one in alone]
        aside, most = [rng.random() < 0.1 for _ in said], place % 3
        others = go_on(together, said, aside, set(), most, 0.5)
        for number, (one, two, token) in enumerate(zip(together, alone, said, strict=True)):
            two.advance([token])
            assert not two.finished
            if number in others:
                one.advance([token])
            else:
                assert number
                assert not aside[number]
                assert len(two.forced()) <= most
                went_on += 1
            assert one.state is two.state
            assert one.forced() == two.forced()
            assert len(one._untaken) <= 8
    assert went_on > 200
    assert [one.matcher.compute_bitmask() for one in together] == [one.matcher.compute_bitmask() for one in alone]


def test_one_that_may_end_does_not_go_on_with_others() -> None:
    origin = guide("json_schema", json.dumps(KEYS), whitespace="none")
    one, two, written = origin.copy(), origin.copy(), ids('{"b":"cc"}')
    for token in written:
        one.advance([token])
        assert one.finished == (token == written[-1])
        one.forced()
    assert [go_on([two], [token], [False], set(), 99, 0.0) for token in written] == [[]] * (len(written) - 1) + [[0]]
    two.advance(written[-1:])
    assert go_on([two], [END], [False], set(), 99, 0.0) == [0]


def test_a_state_of_which_nothing_is_known_is_stepped_to_by_nobody() -> None:
    one = guide("json_schema", json.dumps(KEYS), whitespace="none")
    two, token = one.copy(), ids('{"b":"cc"}')[0]
    one.advance([token])
    assert not one.finished
    assert one.state is not None
    one.state.stopped = None
    assert not two.step(token)
    one.state.stopped = False
    assert two.step(token)
    assert one.state is two.state


def test_as_many_states_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST", 20)
    monkeypatch.setattr(states, "MOST_STEPS", 30)
    found = automaton("json_schema", json.dumps(KEYS))
    origin, rng, store = Guide(tokens(), found), random.Random(8), MaskStore(tokens(), 64, 1)
    for _ in range(6):
        agrees(origin, found.source, rng, store, [], 60)
        assert origin.states is not None
        assert origin.states.size <= 20 * states.BYTES + 30 * states.BYTES // 4


def test_states_that_outputs_come_to_outlive_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST", 40)
    origin = guide("json_schema", '{"type":"array","items":{"type":"boolean"}}', whitespace="none")
    store, written = MaskStore(tokens(), 64, 1), [tokens().single[byte] for byte in b"[true,false]"]
    shared = origin.states
    assert shared is not None

    def follow() -> list[State]:
        one, found = origin.copy(), []
        for place, token in enumerate(written):
            store.fill(place, place, [MaskRow(one, [], 0)])
            found.append(one.spot)
            one.advance([token])
        return found

    before = follow()
    for number in range(70):
        shared.find(b"%d" % number, make=True)
        if number % 10 == 0:
            assert follow() == before, "they are in use"
    assert len(shared._known) <= 40
    for number in range(100):
        shared.find(b"other %d" % number, make=True)
    assert not {state.name for state in before[1:]} & shared._known.keys(), "nobody has come to them for long"


def test_control_tokens_are_no_text() -> None:
    shared = States(tokens(), 'start: "x"')
    marked = [token for token in tokens().specials.values() if tokens().text([token])]
    assert marked
    for token in marked:
        spelled = tokens().tokenizer.greedy_tokenize(tokens().text([token]).decode())
        assert shared.follow(shared.start, b"", token)[0] != tokens().text(spelled)


def test_alternatives_and_kinds_of_keys_are_states_of_their_own() -> None:
    kinds = [{"type": "object", "properties": {"k": {"enum": [key]}, "v": {"type": value}}, "required": ["k", "v"],
              "additionalProperties": False} for key, value in (("x", "integer"), ("y", "string"))]  # fmt: skip
    for schema, texts in (
        ({"anyOf": kinds}, ('{"k":"x","v":', '{"k":"y","v":')),
        (KEYS, ('{"b":"cc","x-1":', '{"b":"cc","y":')),
    ):
        origin = guide("json_schema", json.dumps(schema), whitespace="none")
        found = [origin.copy(), origin.copy()]
        for one, text in zip(found, texts, strict=True):
            one.advance(tokens().tokenizer.greedy_tokenize(text))
        assert found[0].state is not found[1].state


def test_outputs_that_have_written_as_many_items_count_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the items were: the name with all items counted is the same object for all of them."""
    items = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9}
    origin = Guide(tokens(), automaton("json_schema", json.dumps(items)))
    assert origin.states is not None
    outputs = [origin.copy() for _ in range(8)]
    walked: list[int] = []
    follow = States.follow
    monkeypatch.setattr(States, "follow", lambda *words: walked.append(1) or follow(*words))
    for number, (one, said) in enumerate(zip(outputs, itertools.product(("true", "false"), repeat=3), strict=True)):
        for text in ("[", said[0], ",", said[1], ",", said[2], ","):
            one.advance(ids(text))
        assert one._name is outputs[0]._name
        if number == 3:
            walked.clear()  # both have been said at the second place, and one at the first
    assert len(walked) <= 4, "what the others know, behind another first word"
    last = outputs[-1]
    for text in ("true,",) * 5:
        last.advance(ids(text))
    last.advance(ids("true"))
    with pytest.raises((GrammarFailure, RequestError)):
        last.advance(ids(","))


def test_what_counts_know_of_outputs_is_forgotten_with_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "MOST_COUNTED", 2)
    origin = Guide(tokens(), automaton("json_schema", json.dumps({"type": "array", "items": {}, "minItems": 9})))
    assert origin.states is not None
    for text in ("[", *("true", ",") * 6):
        origin.advance(ids(text))
        assert len(origin.states._counted) <= 2
        assert origin.states.size >= len(origin.states._counted) * states.BYTES // 2
