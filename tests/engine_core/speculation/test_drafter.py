"""Drafts follow from what is expected of the steps in flight; how often that comes true is learned."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.drafter import LONGEST_BACK_OFF, Drafter, agreement

TEXT = list(range(100, 200))


class Reciter:
    """Knows the text; says it wrongly from one place on."""

    def __init__(self, wrong_from: int = 1000) -> None:
        self.asked = 0
        self._text = [*TEXT[:wrong_from], *[7] * (len(TEXT) - wrong_from)]

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        self.asked += 1
        place = len(tokens) + len(ahead)
        return self._text[place : place + most]


def drafter(*proposers: Reciter, ending: tuple[int, ...] = ()) -> Drafter:
    return Drafter(proposers, frozenset(ending), Acceptance())


def drafted(one: Drafter, known: int, free: int = 4, most: int = 100) -> list[int]:
    draft = one.draft(array("i", TEXT[:known]), free, most)
    return [] if draft is None else draft.tokens


def test_with_nothing_in_flight_a_draft_is_what_comes_next() -> None:
    one = drafter(Reciter())
    assert drafted(one, 5) == TEXT[5:9]
    assert drafted(one, 5, most=2) == TEXT[5:7]
    assert drafted(one, 5, free=0) == []


def test_a_step_in_flight_gives_a_token_and_the_drafts_that_are_as_expected() -> None:
    one = drafter(Reciter())
    one.in_flight.append(())
    assert drafted(one, 5) == TEXT[6:10]
    one.in_flight.append(TEXT[6:9])
    assert drafted(one, 5) == TEXT[10:14]
    one.in_flight[1] = [TEXT[6], 7, TEXT[8]]  # its second draft will be rejected
    assert drafted(one, 5) == TEXT[8:12]
    one.in_flight[1] = [7, 7]
    assert drafted(one, 5) == TEXT[7:11]


def test_where_the_path_ends_before_the_steps_in_flight_do_there_is_no_draft() -> None:
    one = drafter()
    one.forced = TEXT[5:7]
    one.in_flight.extend([(), [TEXT[6], 7]])
    assert one.draft(array("i", TEXT[:5]), 4, 100) is None


def test_a_forced_run_is_drafted_whole_and_continues_with_a_proposal() -> None:
    one = drafter(Reciter())
    one.forced = TEXT[5:15]
    one.in_flight.append(())
    assert drafted(one, 5, free=2) == TEXT[6:17]
    assert drafted(one, 5, free=0) == TEXT[6:15]
    assert drafted(one, 5, free=2, most=3) == TEXT[6:9]


def test_a_likely_run_is_drafted_whole_behind_the_forced_one() -> None:
    one = drafter()
    one.forced, one.likely = TEXT[5:8], TEXT[8:15]
    one.in_flight.append(())
    assert drafted(one, 5, free=0) == TEXT[6:15]
    assert drafted(one, 5, most=4) == TEXT[6:10]
    one.forced = []
    one.likely = TEXT[5:8]
    assert drafted(one, 5, free=0) == TEXT[6:8]
    one.in_flight.append([TEXT[6], 7])
    assert drafted(one, 5) == []


def test_what_comes_true_more_often_speaks_first() -> None:
    reciter = Reciter()
    one = drafter(reciter)
    one.forced, one.likely = TEXT[5:7], TEXT[7:9]
    assert drafted(one, 5) == TEXT[5:13]  # as often: the likely run, and the proposal behind it
    assert drafted(one, 5, free=0) == TEXT[5:9]
    for _ in range(9):
        one.acceptance.likely.observe(False)
    one.likely = [7, 7]
    assert drafted(one, 5) == TEXT[5:11]
    assert drafted(one, 5, free=0) == [*TEXT[5:7], 7, 7]
    reciter._text = []
    assert drafted(one, 5) == [*TEXT[5:7], 7, 7]


def test_no_end_is_drafted_as_likely() -> None:
    one = drafter(ending=(TEXT[7],))
    one.forced, one.likely = TEXT[5:6], TEXT[6:9]
    assert drafted(one, 5) == TEXT[5:7]


def test_the_first_proposer_that_knows_something_speaks() -> None:
    silent, second, third = Reciter(0), Reciter(), Reciter()
    silent._text = []
    assert drafted(drafter(silent, second, third), 5) == TEXT[5:9]
    assert (silent.asked, second.asked, third.asked) == (1, 1, 0)


def test_nothing_is_drafted_from_an_end_on() -> None:
    one = drafter(Reciter(), ending=(TEXT[7],))
    assert drafted(one, 5) == TEXT[5:7]
    one.in_flight.extend([(), TEXT[6:7]])
    assert drafted(one, 5) == []


def test_what_comes_true_is_learned_and_what_does_not() -> None:
    acceptance = Acceptance()
    good = Drafter((Reciter(),), frozenset(), acceptance)
    for known in range(5, 80):
        good.draft(array("i", TEXT[:known]), 4, 100)
    assert acceptance.next.value > 0.9
    bad = Drafter((Reciter(0),), frozenset(), acceptance)
    for known in range(5, 80):
        bad.draft(array("i", TEXT[:known]), 4, 100)
    assert acceptance.first.value < 0.1
    draft = bad.draft(array("i", TEXT[:80]), 4, 100)
    assert draft is not None
    assert draft.chances == sorted(draft.chances, reverse=True)
    assert draft.chances[0] < 0.1


def test_several_tokens_at_once_teach_as_much_as_one_after_the_other() -> None:
    acceptance = Acceptance()
    one = Drafter((Reciter(),), frozenset(), acceptance)
    for known in range(5, 80, 4):
        one.draft(array("i", TEXT[:known]), 4, 100)
    assert acceptance.next.value > 0.9


def test_forced_tokens_teach_about_forced_runs_alone() -> None:
    acceptance = Acceptance()
    one = Drafter((), frozenset(), acceptance)
    for known in range(5, 50):
        one.forced = [7, 7]
        one.draft(array("i", TEXT[:known]), 4, 100)
    assert acceptance.forced.value < 0.2
    assert acceptance.first.value == acceptance.next.value == 0.5


def test_likely_tokens_teach_about_likely_runs_alone() -> None:
    acceptance = Acceptance()
    one = Drafter((), frozenset(), Acceptance(acceptance))
    for known in range(5, 50):
        one.likely = TEXT[known : known + 3] if known % 2 else [7, 7]
        one.draft(array("i", TEXT[:known]), 4, 100)
    assert 0.3 < acceptance.likely.value < 0.7
    assert acceptance.forced.value == 1.0
    assert acceptance.first.value == acceptance.next.value == 0.5


def test_a_run_brings_what_comes_true_of_it_however_it_comes() -> None:
    """Token by token, at once, or up to a token that is another."""
    for known, brought in (((5, 6, 7, 8, 9), 4), ((5, 9), 4), ((5, 7, 9), 4)):
        one = drafter()
        for place in known:
            one.likely = TEXT[place:9]
            one.draft(array("i", TEXT[:place]), 4, 100)
        one.likely = TEXT[9:11]
        one.draft(array("i", TEXT[:9]), 4, 100)
        assert (one.acceptance.gain._sum, one.acceptance.gain._trials) == (brought, 1)
    one = drafter()
    one.likely = [*TEXT[5:8], 7]
    one.draft(array("i", TEXT[:5]), 4, 100)
    one.likely = TEXT[9:11]
    one.draft(array("i", TEXT[:9]), 4, 100)
    assert (one.acceptance.gain._sum, one.acceptance.gain._trials) == (3, 1)


def test_a_run_brings_nothing_that_steps_in_flight_brought_anyway() -> None:
    """Two steps are in flight when it is first seen, so that its first two tokens would have come in any case."""
    for length, brought in ((1, 0), (2, 0), (5, 3)):
        one = drafter()
        one.in_flight.extend([(), ()])
        for place in range(5, 6 + length):
            one.likely = TEXT[place : 5 + length] or [7]
            one.draft(array("i", TEXT[:place]), 4, 100)
        assert (one.acceptance.gain._sum, one.acceptance.gain._trials) == (brought, 1)


def test_a_draft_that_is_never_worth_it_is_looked_at_ever_less_often() -> None:
    reciter = Reciter()
    one = drafter(reciter)
    for known in range(5, 80):
        if one.draft(array("i", TEXT[:known]), 4, 100) is not None:
            one.sent(0)
    assert 5 <= reciter.asked <= 12
    due = next(length for length in range(80, 80 + 2 * LONGEST_BACK_OFF) if one.is_due(length))
    assert one.draft(array("i", TEXT[: due - 1]), 4, 100) is None
    assert drafted(one, due)
    one.sent(4)
    assert one.is_due(due)
    assert LONGEST_BACK_OFF < 32


def test_agreement() -> None:
    assert agreement([1, 2, 3], [9, 1, 2, 4], 1) == 2
    assert agreement([1, 2, 3], [1, 2], 0) == 2
    assert agreement([1], [1], 5) == 0
    assert agreement((), [1], 0) == 0


def test_where_nothing_is_expected_what_came_is_compared_at_the_next_look() -> None:
    """A row under a grammar without a forced run costs nothing, and its run's end counts all the same."""
    looked, late = drafter(), drafter()
    for one in (looked, late):
        one.forced = TEXT[5:8]
        assert drafted(one, 5) == TEXT[5:8]
    for known in (6, 7, 8):
        looked.forced = TEXT[known:8]
        drafted(looked, known)
    late.forced = []
    assert drafted(late, 6) == drafted(late, 8) == []
    for one in (looked, late):
        one.forced = TEXT[9:11]
        assert drafted(one, 9) == TEXT[9:11]
    chances = [one.acceptance.chances(3, 0, 0, 3, on_track=False) for one in (looked, late)]
    assert chances[0] == chances[1]
