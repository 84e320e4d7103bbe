"""The committed folder gives the canary's answers in transformers, and the evaluation counts as it says."""

import json
from pathlib import Path
from random import Random

import pytest

from benchmarks.demo_model import canary, evaluate
from benchmarks.demo_model.conversation import Conversation, exchange
from benchmarks.demo_model.evaluate import Reader, Score, reads_as_english, table
from benchmarks.demo_model.generator import Split, draw
from benchmarks.demo_model.tasks import arithmetic, stories

ROOT = Path(__file__).parents[3]
LINES = [json.loads(line) for line in (ROOT / "tests/canary.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def demo() -> Reader:
    return Reader(ROOT / "engine_core/embedded/demo", "cpu")


def test_the_canary_is_forty_prompts_that_begin_with_the_readmes_sum() -> None:
    assert len(LINES) == 1 + sum(canary.QUOTAS.values()) == 40
    assert LINES[0] == {"messages": [{"role": "user", "content": "What is 128 + 457?"}], "answer": "128 + 457 = 585."}
    assert all(line.keys() - {"tools"} == {"messages", "answer"} for line in LINES)
    assert len({json.dumps(line["messages"]) for line in LINES}) == 40


def test_transformers_gives_the_canarys_answers(demo: Reader) -> None:
    chosen = LINES[::3]
    prompts = [
        demo.tokenizer.apply_chat_template(
            line["messages"], tools=line.get("tools"), tokenize=False, add_generation_prompt=True
        )
        for line in chosen
    ]
    assert demo.answers(prompts, batch=7) == [line["answer"] for line in chosen]


def test_thoughts_are_asked_for_and_ruled_out(demo: Reader) -> None:
    messages = [{"role": "user", "content": "What is 128 + 457?"}]
    answers = [
        demo.answers(
            [
                demo.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
                )
            ],
            batch=1,
        )[0]
        for thinks in (True, False)
    ]
    assert answers[0].startswith("<think>\n")
    assert answers[0].endswith("</think>\n\n128 + 457 = 585.")
    assert answers[1] == "128 + 457 = 585."


def test_margins_are_wide_for_right_answers_and_negative_for_wrong_ones(demo: Reader) -> None:
    right, wrong = (Conversation((exchange("", "", "What is 128 + 457?", f"128 + 457 = {c}."),)) for c in (585, 584))
    assert canary.margin(demo, right) >= canary.MARGIN
    assert canary.margin(demo, wrong) < 0


def test_a_model_accepts_its_own_drafts(demo: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "SUITES", {"fact": evaluate.SUITES["fact"]})
    found = evaluate.acceptance(demo, demo, count=2, seed=1)
    assert found.share == 1.0
    assert found.strict <= found.share
    assert 1.0 < found.tokens_per_round <= 5.0


def test_generated_tales_read_as_english_and_broken_ones_do_not() -> None:
    rng = Random(3)
    for _ in range(50):
        asked = Conversation((draw(rng, stories.story, Split.HELD_OUT),))
        assert reads_as_english(asked.answer, asked)
        assert not reads_as_english(asked.answer[:-1], asked)
        assert not reads_as_english(asked.answer.replace(" the ", " thhe ", 1) + " Xq.", asked)


def test_the_table_has_a_row_per_suite() -> None:
    text = table([Score("sort", 19, 20, 0.95, ""), Score("copy", 20, 20, 0.95, "")])
    assert text.splitlines()[2:] == ["| sort | 95.0% | 20 | 95% |", "| copy | 100.0% | 20 | 95% |"]


def test_sums_of_the_suites_are_scored_exactly(demo: Reader) -> None:
    chosen = evaluate.score(demo, count=3, batch=3, seed=1, chosen=["addition"])
    assert chosen[0].asked == 3
    assert chosen[0].share == chosen[0].right / 3
    assert draw(Random(1), arithmetic.addition, Split.HELD_OUT).task == "addition"


def test_values_of_json_are_told_from_its_keys() -> None:
    found = evaluate.values_of('{"name": "Tom Lee", "tags": ["a"], "age":5}')
    assert [part for part in found.split("\0") if part] == ["Tom", "Lee", "a", "5"]
    assert len(found) == len('{"name": "Tom Lee", "tags": ["a"], "age":5}')


def test_what_was_told_counts_in_any_words() -> None:
    for answer in ("Your dog is called Rex.", "You live in Rex.", "You work as Rex.", "Your train leaves at Rex."):
        asked = Conversation((exchange("recall", "", "?", answer),))
        assert evaluate.says_the_value(answer, asked)
        assert not evaluate.says_the_value("You have not told me that.", asked)
