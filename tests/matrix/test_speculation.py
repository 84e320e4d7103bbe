"""Drafts in every cell of the matrix: the same tokens as without any, greedy and sampled, free and under a grammar.

fp32 on a CPU, with the embedded draft as the model: a step takes it a quarter of the time.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.structured_engine import Ask, Cell, Engine, Key
from penstock.engine_core.embedded import draft_folder
from penstock.protocol.messages import Sampling
from tests.engine_core.grammar.vocabulary import END, OTHER_END, automaton, ids, tokens

CANARY = Path(__file__).parents[1] / "canary.jsonl"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LONGEST = 32
COUNT = 20
ROWS = 64
Outputs = dict[Key, list[int]]

COMPANY = [
    Cell(depth=depth, budget=budget, prefix_caching=prefix, max_num_seqs=16)
    for depth in (1, 2) for budget in (32, 512) for prefix in (False, True)
]  # fmt: skip
ALONE = [Cell(depth=depth, max_num_seqs=1) for depth in (1, 2)]
PAIRS = (0, 3, 5, 6)  # cells of COMPANY in which every two values meet
CELLS = [
    *(pytest.param(cell, marks=() if at in PAIRS else pytest.mark.long) for at, cell in enumerate(COMPANY)),
    pytest.param(ALONE[0], marks=pytest.mark.long),
    ALONE[1],
]
FEW = [pytest.param(cell, marks=() if at in (0, 7) else pytest.mark.long) for at, cell in enumerate([*COMPANY, *ALONE])]
TINY = [Cell(depth=depth, blocks=28, block_size=8, expected_share=0.0, max_num_seqs=16) for depth in (1, 2)]


def texts() -> list[str]:
    """The canary's shorter questions, what is copied among them, and stories, whose words are far less certain."""
    asked = [json.loads(line)["messages"] for line in CANARY.read_text().splitlines()]
    found = [messages[0]["content"] for messages in asked if len(messages) == 1 and len(messages[0]["content"]) < 110]
    copies = ["Please repeat this list: bell; ziaclurk; kloteax; ciatros; thoonia; clumen; drum; piano"] * 2
    stories = [f"Tell me a short story about a {hero}." for hero in ("fox", "king", "robot")]
    return [*copies, *stories, *found][: COUNT - 3]


def asks() -> list[Ask]:
    """A third is sampled, one in five follows a grammar, two have several choices."""
    words = automaton("regex", "([a-z]{2,8}(, | and )){2,6}[a-z]{2,8}")
    fixed = automaton("choice", '["the answer is forty-two", "the answer is not known to me"]')
    found = []
    for number, text in enumerate([*texts(), *("Say what you like.",) * 3]):
        sampling = Sampling(
            temperature=0.8 if number % 3 == 2 else 0.0, max_tokens=LONGEST, eos_token_ids=(END, OTHER_END),
            seed=number, frequency_penalty=0.3 if number % 6 == 5 else 0.0,
        )  # fmt: skip
        bound = (words, fixed)[number % 2] if number % 5 == 4 else None
        prompt = tuple(ids(CHAT.format(text)))
        found.append(Ask(token_ids=prompt, sampling=sampling, automaton=bound, n=2 if number % 9 == 8 else 1))
    return found


def crowd() -> list[Ask]:
    """Greedy, sampled and several choices, for steps of 64 rows."""
    sampling = Sampling(temperature=0.0, max_tokens=24, eos_token_ids=(END, OTHER_END))
    found = texts()
    return [
        Ask(
            token_ids=tuple(ids(CHAT.format(found[number % len(found)]))),
            sampling=msgspec.structs.replace(sampling, temperature=0.7 * (number % 2), seed=number),
            n=1 + (number % 16 == 3),
        )
        for number in range(ROWS)
    ]


def misremembered(said: list[int]) -> tuple[int, ...]:
    """An output that lacks a part and has another where one token stood."""
    third = len(said) // 3
    return (*said[:third], *said[third + 2 : 2 * third], 7, 8, *said[2 * third + 1 :])


def outputs(engine: Engine, asked: list[Ask]) -> Outputs:
    answers = engine.answer(asked)
    assert not [answer.error for answer in answers.values() if answer.error]
    return {key: answer.token_ids for key, answer in answers.items()}


@pytest.fixture(scope="module")
def expected() -> Outputs:
    """What is said without drafts, one request after the other, one step at a time."""
    return outputs(Engine(draft_folder(), tokens(), Cell(depth=1, drafts=False, max_num_seqs=1)), asks())


@pytest.fixture(scope="module")
def predicting(expected: Outputs) -> list[Ask]:
    """The same requests, each with a prediction that is mostly right."""
    return [
        msgspec.structs.replace(ask, prediction=misremembered(expected[number, 0])) for number, ask in enumerate(asks())
    ]


def label(cell: Cell) -> str:
    return f"depth {cell.depth}, budget {cell.budget}, {cell.max_num_seqs} rows, prefix {cell.prefix_caching:d}"


@pytest.mark.parametrize("cell", CELLS, ids=label)
def test_prompt_lookup_changes_no_token(cell: Cell, expected: Outputs) -> None:
    engine = Engine(draft_folder(), tokens(), msgspec.structs.replace(cell, method="ngram"))
    assert outputs(engine, asks()) == expected
    assert engine.scheduled is not None
    assert engine.scheduled.accepted_tokens > 0
    assert engine.scheduled.draft_tokens > engine.scheduled.accepted_tokens, "some drafts were meant to be wrong"


@pytest.mark.parametrize("cell", CELLS, ids=label)
def test_predictions_change_no_token(cell: Cell, expected: Outputs, predicting: list[Ask]) -> None:
    engine = Engine(draft_folder(), tokens(), cell)
    assert outputs(engine, predicting) == expected
    assert engine.scheduled is not None
    assert engine.scheduled.accepted_tokens > 0
    assert engine.scheduled.draft_tokens > engine.scheduled.accepted_tokens


@pytest.mark.parametrize("cell", TINY, ids=label)
def test_preemption_changes_no_token(cell: Cell, expected: Outputs, predicting: list[Ask]) -> None:
    """Both ways at once: a prediction is asked first, and prompt lookup where it is lost."""
    engine = Engine(draft_folder(), tokens(), msgspec.structs.replace(cell, method="ngram"))
    assert outputs(engine, predicting) == expected
    assert engine.scheduled is not None
    assert engine.scheduled.preemptions > 0, "the pool was meant to be too small"
    assert engine.scheduled.accepted_tokens > 0


def test_a_request_may_do_without(expected: Outputs, predicting: list[Ask]) -> None:
    free = [number for number, ask in enumerate(predicting) if ask.automaton is None and ask.n == 1]
    engine = Engine(draft_folder(), tokens(), Cell(method="ngram"))
    without = [msgspec.structs.replace(predicting[number], speculate=False) for number in free]
    said = outputs(engine, without)
    assert [said[place, 0] for place in range(len(free))] == [expected[number, 0] for number in free]
    assert engine.scheduled is not None
    assert engine.scheduled.draft_tokens == 0


def test_a_copy_takes_far_fewer_steps(expected: Outputs) -> None:
    steps = {}
    for method in ("none", "ngram"):
        engine = Engine(draft_folder(), tokens(), Cell(method=method))
        assert outputs(engine, asks()[:1])[0, 0] == expected[0, 0]
        assert engine.scheduled is not None
        steps[method] = engine.scheduled.step
    assert steps["none"] >= 30
    assert steps["ngram"] <= 2 / 3 * steps["none"], "how many drafts are worth it depends on the machine"
