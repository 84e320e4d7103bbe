"""Structured output in every cell of the matrix: the same tokens, and those of free output where all is allowed.

fp32 on a CPU, the embedded model.
"""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from benchmarks.structured_engine import Answer, Ask, Cell, Engine
from penstock.engine_core.embedded import demo_folder, draft_folder
from penstock.protocol.messages import Finish, Sampling
from tests.engine_core.grammar.vocabulary import END, OTHER_END, automaton, ids, tokens, vocabulary

PERSON = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
                   "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}},
    "required": ["name", "age", "tags"], "additionalProperties": False,
})  # fmt: skip
LONGEST = 90


def asks() -> list[Ask]:
    """Constrained and free requests, greedy and sampled, with a seed each."""
    automata = [
        automaton("json_schema", PERSON, whitespace="none"), automaton("json_schema", PERSON), None,
        automaton("regex", "[a-z]{4,9}@[a-z]{3}[.](com|org)"),
        automaton("choice", '["left", "right turn", "straight on"]'),
        automaton("grammar", 'root ::= "(" root ")" | [xy]{1,3}'),
    ]  # fmt: skip
    found = []
    for number in range(12):
        sampling = Sampling(
            temperature=float(number % 3 > 0), max_tokens=LONGEST, eos_token_ids=(END, OTHER_END), seed=number,
            min_tokens=3 if number % 7 == 0 else 0,
        )  # fmt: skip
        prompt = tuple(ids("Say something about Tom: "[: 10 + number]))
        found.append(Ask(token_ids=prompt, sampling=sampling, automaton=automata[number % 6], n=1 + number % 3))
    return found


def answers(cell: Cell) -> tuple[dict[tuple[int, int], Answer], Engine]:
    engine = Engine(
        draft_folder(), tokens(), cell
    )  # which takes a quarter of the time, and what it says is random, too
    return engine.answer(asks()), engine


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Answer]:
    return answers(Cell(depth=1, drafts=False))[0]


@pytest.mark.parametrize(
    "cell",
    [Cell(), Cell(drafts=False), Cell(depth=1), Cell(budget=64), Cell(blocks=16, expected_share=0.0, block_size=8)],
    ids=["overlap and forced runs", "overlap", "forced runs", "chunks", "preemption"],
)
def test_every_cell_gives_the_same_structured_tokens(cell: Cell, expected: dict[tuple[int, int], Answer]) -> None:
    found, engine = answers(cell)
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in expected.items()
    }
    assert [answer.finish for answer in found.values()].count(Finish.ERROR) == 0
    assert [answer.finish for answer in found.values()].count(Finish.GRAMMAR) == 0
    assert engine.scheduled is not None
    assert (engine.scheduled.accepted_tokens > 0) == cell.drafts
    assert (engine.scheduled.preemptions > 0) == (cell.blocks == 16)


def test_a_schema_that_allows_what_the_model_says_changes_no_token() -> None:
    """Greedy, the embedded model: free and under a grammar of any text, and JSON under a schema that holds it."""
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    questions = ["What is 128 + 457?", "Sort these numbers: 5, 3, 9.", "Tell me a short story about a fox."]
    greedy = Sampling(temperature=0.0, max_tokens=60, eos_token_ids=(END, OTHER_END))
    free = [Ask(token_ids=tuple(ids(chat.format(text))), sampling=greedy) for text in questions]
    person = "Extract the fields as JSON: My name is Anna, I am 31 years old and I live in Paris."
    free.append(Ask(token_ids=tuple(ids(chat.format(person))), sampling=greedy))
    for cell in (Cell(), Cell(depth=1, drafts=False)):
        engine = Engine(demo_folder(), tokens(), cell)
        said = engine.answer(free)
        anything = automaton("regex", "(?s:.*)")
        bound = engine.answer([msgspec.structs.replace(ask, automaton=anything) for ask in free])
        assert {key: answer.token_ids for key, answer in bound.items()} == {
            key: answer.token_ids for key, answer in said.items()
        }
        text = vocabulary().decode(said[3, 0].token_ids, skip_special_tokens=True)
        value = json.loads(text)
        schema = {"type": "object", "properties": {name: {} for name in value}, "required": list(value)}
        exact = automaton("json_schema", json.dumps(schema))
        again = engine.answer([msgspec.structs.replace(free[3], automaton=exact)])
        assert again[0, 0].token_ids == said[3, 0].token_ids


@pytest.mark.parametrize("cell", [Cell(), Cell(depth=1), Cell(drafts=False)], ids=["overlap", "steps", "no drafts"])
def test_a_structure_begins_after_the_marker_that_it_waits_for(cell: Cell) -> None:
    """The model is pushed to close its reasoning; what follows is the structure, and nothing before it was touched."""
    close = 4091
    pushed = Sampling(
        temperature=1.0, max_tokens=40, eos_token_ids=(END, OTHER_END), logit_bias=((close, 11.0),), min_tokens=2
    )
    digits = automaton("regex", "[0-9]{3}-[0-9]{3}", after=(close,))
    prompt = tuple(ids("Think, then say a number: "))
    samplings = [msgspec.structs.replace(pushed, seed=seed) for seed in range(8)]
    asked = [Ask(token_ids=prompt, sampling=sampling, automaton=digits) for sampling in samplings]
    found = Engine(demo_folder(), tokens(), cell).answer(asked)
    structured = 0
    for answer in found.values():
        if close in answer.token_ids:
            begun = answer.token_ids[answer.token_ids.index(close) + 1 :]
            text = vocabulary().decode(begun, skip_special_tokens=True)
            structured += answer.finish == Finish.STOP
            assert re.fullmatch("[0-9]{3}-[0-9]{3}", text) if answer.finish == Finish.STOP else len(text) < 8
    assert structured > 3


@pytest.mark.parametrize("cell", [Cell(), Cell(drafts=False), Cell(blocks=16, expected_share=0.0, block_size=8)],
                         ids=["overlap and forced runs", "overlap", "preemption"])  # fmt: skip
def test_unique_items_are_unique_and_all_that_there_are(cell: Cell) -> None:
    """Few texts, so that an output repeats itself where nothing stops it, and has to find the last one of them."""
    items = {"type": "string", "pattern": "^[ab]{1,2}$"}
    unique = {"type": "array", "items": items, "uniqueItems": True, "minItems": 6}
    pair = {"type": "object", "properties": {"x": unique, "y": unique}, "required": ["x", "y"],
            "additionalProperties": False}  # fmt: skip
    automata = [automaton("json_schema", json.dumps(schema), whitespace="none") for schema in (unique, pair)]
    asks = [
        Ask(token_ids=tuple(ids("Say a, b, aa, and a: ")), automaton=automata[seed % 2], n=2, sampling=Sampling(
            temperature=0.7 * (seed > 1), max_tokens=LONGEST, eos_token_ids=(END, OTHER_END), seed=seed))
        for seed in range(4)
    ]  # fmt: skip
    for answer in Engine(demo_folder(), tokens(), cell).answer(asks).values():
        text = vocabulary().decode(answer.token_ids, skip_special_tokens=True)
        assert answer.finish == Finish.STOP, text
        value = json.loads(text)
        for found in [value[name] for name in ("x", "y")] if isinstance(value, dict) else [value]:
            assert len(found) == len(set(found)) == 6
