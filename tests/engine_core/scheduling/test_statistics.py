from __future__ import annotations

from penstock.engine_core.scheduling.statistics import WINDOW, Totals
from penstock.protocol.messages import Finish


def test_the_drain_rate_needs_two_moments() -> None:
    totals = Totals()
    assert totals.drain_rate == 0.0
    totals.tick(1.0)
    assert totals.drain_rate == 0.0
    totals.finishes.update({Finish.STOP: 4, Finish.LENGTH: 1, Finish.ABORT: 3, Finish.ERROR: 1, Finish.GRAMMAR: 1})
    assert (totals.finished, totals.aborted, totals.failed) == (5, 3, 2)
    totals.tick(3.0)
    assert totals.drain_rate == 5.0


def test_old_moments_are_dropped() -> None:
    totals = Totals()
    for second in range(100):
        totals.finishes[Finish.STOP] = second * 2
        totals.tick(float(second))
    assert totals.ends[-1][0] - totals.ends[0][0] <= WINDOW
    assert totals.drain_rate == 2.0
    totals.tick(1000.0)
    assert totals.drain_rate == 0.0


def test_drafts_are_counted_by_place() -> None:
    totals = Totals()
    for drafted, accepted in ((2, 0), (4, 3), (1, 1)):
        totals.count_drafts(drafted, accepted)
    assert (totals.drafts, totals.draft_tokens, totals.accepted_at) == (3, 7, [2, 1, 1, 0])
