"""The generator repeats itself, keeps its splits apart, and asks only what has the answer it says."""

import json
import re
from random import Random

import pytest

from benchmarks.demo_model import generator, suites
from benchmarks.demo_model.generator import PLAIN, Split, draw, held_out, sample, text_of
from benchmarks.demo_model.tasks import arithmetic, bare, extraction, families, lists, recall, skills, told, tools


def _texts(seed: int, split: Split, count: int = 60) -> list[str]:
    rng = Random(seed)
    return [text_of(sample(rng, split)) for _ in range(count)]


def test_the_same_seed_gives_the_same_text() -> None:
    assert _texts(3, Split.TRAINING) == _texts(3, Split.TRAINING)
    assert _texts(3, Split.TRAINING) != _texts(4, Split.TRAINING)


def _keys(split: Split, seed: int, count: int) -> set[str]:
    rng = Random(seed)
    found = set()
    for _ in range(count):
        conversation = sample(rng, split).conversation
        if conversation is not None:
            found |= {exercise.key for exercise in conversation.exercises if exercise.key}
    return found


def test_splits_share_no_content() -> None:
    training, unseen = _keys(Split.TRAINING, 1, 400), _keys(Split.HELD_OUT, 1, 40)
    assert training
    assert unseen
    assert not any(held_out(key) for key in training)
    assert all(held_out(key) for key in unseen)


def test_the_held_out_share_is_about_a_thirty_second() -> None:
    rng = Random(5)
    keys = [arithmetic.addition(rng).key for _ in range(8000)]
    keys = [key for key in keys if key]
    assert 0.02 < sum(map(held_out, keys)) / len(keys) < 0.045


@pytest.mark.parametrize("suite", list(suites.SUITES))
def test_suites_give_held_out_questions_with_answers(suite: str) -> None:
    for conversation in suites.conversations(suite, Random(2), 3):
        last = conversation.exercises[-1]
        assert conversation.messages[-1].role == "assistant"
        assert conversation.answer
        assert not last.key or held_out(last.key)


def test_recall_keeps_its_distance() -> None:
    rng = Random(6)
    for conversation in suites.conversations("recall", rng, 4):
        noted = max(i for i, exercise in enumerate(conversation.exercises) if exercise.task == "note")
        later = conversation.exercises[noted + 1 :]
        between = [exercise for exercise in later if exercise.task not in ("recall", "unknown")]
        assert generator.estimated_tokens(between) >= suites.RECALL_DISTANCE


@pytest.mark.parametrize("task", [task for task, _ in PLAIN])
def test_every_task_can_be_drawn_from_the_training_split(task: generator.Task) -> None:
    exercise = draw(Random(1), task, Split.TRAINING)
    question, answer = exercise.messages
    assert (question.role, answer.role) == ("user", "assistant")
    assert question.content.strip() == question.content
    assert answer.content.strip() == answer.content
    assert answer.thought


def test_sums_and_differences_are_right() -> None:
    rng = Random(9)
    signs = {"+": int.__add__, "-": int.__sub__}
    for task in (arithmetic.addition, arithmetic.subtraction, arithmetic.chain):
        for _ in range(200):
            exercise = task(rng)
            for a, op, b, c in re.findall(r"(?<![\d+-] )(-?\d+) ([+-]) (\d+) = (-?\d+)", exercise.messages[1].thought):
                assert signs[op](int(a), int(b)) == int(c)
            if found := re.fullmatch(r"(\d+) ([+-]) (\d+) = (-?\d+)\.?", exercise.messages[1].content):
                assert signs[found[2]](int(found[1]), int(found[3])) == int(found[4])


def test_sorted_lists_are_sorted() -> None:
    rng = Random(10)
    for _ in range(200):
        exercise = lists.sort(rng)
        items = re.findall(r"[a-zA-Z]+|\d+(?!\.)", exercise.messages[1].content)
        if items and all(item.isdigit() for item in items):
            numbers = [int(item) for item in items]
            assert numbers in (sorted(numbers), sorted(numbers, reverse=True))
        elif all(item.isalpha() for item in items):
            assert items == sorted(items)


def test_extracted_objects_match_their_schema() -> None:
    rng = Random(11)
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool}
    for _ in range(200):
        question, answer = extraction.extract(rng).messages
        found = json.loads(answer.content)
        for name, kind in re.findall(r'"(\w+)":\s*\{\s*"type":\s*"(\w+)"', question.content):
            assert type(found[name]) is kinds[kind]


def test_calls_name_a_tool_at_hand_and_its_required_arguments() -> None:
    rng = Random(12)
    for _ in range(200):
        kit = tools.draw_tools(rng)
        signatures = {tool.name: tool.signature["function"]["parameters"] for tool in kit}
        for message in tools.tool_use(rng, kit).messages:
            for call in message.calls:
                parameters = signatures[call.name]
                assert set(call.arguments) == set(parameters.get("required", parameters["properties"]))


def test_recall_asks_for_what_was_said() -> None:
    rng = Random(13)
    for _ in range(200):
        notes, asked = recall.recall(rng)
        said = " ".join(note.messages[0].content.lower() for note in notes)
        for exercise in asked:
            if exercise.task == "recall":
                value = exercise.messages[1].content.rstrip(".").split()[-1].lower()
                assert value in said
            else:
                assert exercise.messages[1].content == recall.UNKNOWN


def test_calls_to_families_fit_their_signatures() -> None:
    rng = Random(14)
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    for _ in range(400):
        kit = tools.draw_families(rng)
        signatures = {tool.name: tool.signature["function"]["parameters"] for tool in kit}
        assert len(signatures) == len(kit)
        for message in tools.tool_use(rng, kit).messages:
            for call in message.calls:
                parameters = signatures[call.name]
                assert set(parameters.get("required", [])) <= set(call.arguments) <= set(parameters["properties"])
                for name, value in call.arguments.items():
                    schema = parameters["properties"][name]
                    assert isinstance(value, kinds[schema["type"]]), (schema, value)
                    assert value in schema.get("enum", [value])


def test_scored_tools_and_wordings_stand_in_no_training_list() -> None:
    listed, scored = (families.families(file) for file in (families.TRAINING, families.HELD_OUT))
    assert len(listed) >= 100
    for part in ("names", "descriptions", "questions"):
        known = {text for family in listed for text in getattr(family, part)}
        assert not [text for family in scored for text in getattr(family, part) if text in known]
    facts = [one for file in (told.FACTS, told.PEOPLE) for one in told.wordings(file)]
    known = {text for one in facts for text in (*one.said, *one.asked)}
    assert not [text for one in told.wordings(told.HELD_OUT) for text in (*one.said, *one.asked) if text in known]


def test_facts_in_own_words_hold_the_value_that_is_asked_for() -> None:
    rng = Random(15)
    for _ in range(600):
        one = told.fact(rng)
        assert one.value.lower() in one.said.lower()
        assert one.value.lower() in one.answer.lower()
        assert one.value.lower() not in one.question.lower().rstrip("?.").split()
    asked = {exercise.task for _ in range(200) for exercise in told.recall(rng)[1]}
    assert asked == {"recall", "unknown"}


def test_json_without_a_schema_begins_with_what_is_given() -> None:
    rng = Random(16)
    tasks = set()
    for _ in range(200):
        exercise = bare.bare(rng)
        question, answer = exercise.messages
        tasks.add(exercise.task)
        if exercise.task == "note":
            assert answer.content == f"Noted: {question.content}"
        else:
            assert answer.content[: answer.given] == bare.GIVEN
            assert json.loads(answer.content)
    assert tasks == {"note", "bare"}


def test_a_parameter_that_may_be_a_fraction_is_a_number_whatever_was_drawn() -> None:
    parameter = skills.Parameter(("weight",), "Weight in kilograms", lambda rng: 5, fractions=True)
    skill = skills.Skill(("weigh",), "Weighs", {"s0": parameter}, ("Weigh {s0}.",), {}, "")
    rng = Random(15)
    for _ in range(30):
        tool = tools.signed(rng, skill, "weigh")
        schema = tool.signature["function"]["parameters"]["properties"][tool.slots["s0"]]
        assert schema["type"] == "number"
