"""The tools that scoring asks for share no name, description or wording with those that training draws from."""

import re

from benchmarks.demo_model.tasks import families
from benchmarks.demo_model.tasks.values import KINDS

LISTED, SCORED = (families.families(file) for file in (families.TRAINING, families.HELD_OUT))
RUN = 5  # so many words in a row are a wording


def _words(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, without its slots and marks."""
    return tuple(re.findall(r"[a-z0-9']+", re.sub(r"\{\w+\}", " ", text.lower().replace("_", " "))))


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _words(text)
    return {words[start : start + RUN] for start in range(len(words) - RUN + 1)}


def test_no_scored_name_description_or_question_stands_in_the_training_list() -> None:
    for part in ("names", "descriptions", "questions"):
        known = {_words(text) for family in LISTED for text in getattr(family, part)}
        assert not [text for family in SCORED for text in getattr(family, part) if _words(text) in known], part


def test_no_scored_question_shares_a_run_of_words_with_a_training_question() -> None:
    scored = {run: text for family in SCORED for text in family.questions for run in _runs(text)}
    listed = [text for family in LISTED for text in family.questions]
    assert not [(text, scored[run]) for text in listed for run in _runs(text) & scored.keys()]


def test_every_question_speaks_of_the_parameters_that_are_not_optional() -> None:
    for family in (*LISTED, *SCORED):
        slots = {slot: optional for slot, optional, _, _, _ in family.parameters}
        for question in family.questions:
            spoken = set(re.findall(r"\{(\w+)\}", question))
            assert spoken <= set(slots), question
            assert {slot for slot, optional in slots.items() if not optional} <= spoken, question


def test_kinds_exist_and_names_of_families_are_their_own() -> None:
    firsts = [family.names[0] for family in LISTED]
    assert len(firsts) == len(set(firsts))
    for family in LISTED:
        assert family.meanings <= set(firsts)
        assert all(kind in KINDS or kind.startswith("enum:") for _, _, kind, _, _ in family.parameters)


def test_nobody_declines_what_a_family_of_the_same_meaning_does() -> None:
    names = [family.names[0] for family in LISTED]
    for one, other in (("get news", "news radar"), ("run query", "database query"), ("get weather", "sky report")):
        assert families._same(names.index(one), names.index(other))
