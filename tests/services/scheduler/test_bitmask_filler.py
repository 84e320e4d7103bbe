"""Masks are filled beside the loop for the executors of the epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.services.scheduler import bitmask_filler as maskers
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from tests.engine_core.grammar.vocabulary import guide, ids, tokens
from tests.services.scheduler.fakes import Inline


def test_masks_come_back_as_the_message_for_the_executors() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), Inline(), 1)
    bitmasks.renew(16)
    assert bitmasks.most == 8
    bitmasks.start(MaskWork(5, 3, (MaskRow(guide("regex", "a"), [], 2),)), 4)
    (masks,) = bitmasks.finished()
    assert (masks.step, masks.epoch, len(masks.bits)) == (5, 3, tokens().words * 4)
    assert masks.entries == (2).to_bytes(4, "little")
    assert bitmasks.finished() == []
    statistics = bitmasks.statistics()
    assert statistics.rows == 1
    assert 0 < statistics.seconds == statistics.steps.total


def test_new_executors_begin_with_an_empty_store() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), Inline(), 1)
    for epoch in (1, 2):
        bitmasks.renew(16)
        bitmasks.start(MaskWork(1, epoch, (MaskRow(guide("regex", "a"), [], 0),)), 0)
        assert [len(masks.new_slots) for masks in bitmasks.finished()] == [4]


def test_without_places_or_tokens_there_are_no_masks() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), Inline(), 1)
    assert (bitmasks.most, bitmasks.statistics().rows, bitmasks.statistics().seconds) == (0, 0, 0.0)
    bitmasks.renew(0)
    assert bitmasks.most == 0
    none = BitmaskFiller(None, Inline(), Inline(), 1)
    none.renew(64)
    assert none.most == 0


def test_after_a_slow_step_each_row_pays_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), Inline(), 1)
    bitmasks.renew(16)
    found = guide("regex", "a*")
    readings = iter(range(0, 1000, 5))
    monkeypatch.setattr(time, "process_time", lambda: next(readings))
    for step, slow in enumerate((1.0, -1.0, 1.0), 1):
        assert not found.failed
        monkeypatch.setattr(maskers, "SLOW", slow)
        bitmasks.start(MaskWork(step, 1, (MaskRow(found, [], 0),)), step - 1)
        assert len(bitmasks.finished()) == 1
        if step < 3:
            found.advance(ids("a"))  # a mask that is known takes no time
    assert found.failed


def test_masks_that_are_known_are_there_at_once() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), Inline(), 1)
    bitmasks.renew(16)
    origin = guide("regex", "[ab]*c")
    for step in (1, 2, 3):
        one = origin.copy()
        one.advance(ids("a"))
        bitmasks.start(MaskWork(step, 1, (MaskRow(one, [], 0),)), step - 1)
        assert bitmasks.jobs.running == (step == 1)
        assert [len(masks.new_slots) // 4 for masks in bitmasks.finished()] == [int(step == 1)]


class Later(Inline):
    """Runs nothing until it is asked to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def submit(self, work, *args, **kwargs):
        job: Future = Future()
        self.waiting.append(lambda: job.set_result(work(*args, **kwargs)))
        return job

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def test_a_mask_beside_the_steps_is_ready_when_it_was_collected() -> None:
    threads = Later()
    bitmasks = BitmaskFiller(tokens(), Inline(), threads, 1)
    bitmasks.renew(16)
    origin = guide("regex", "[ab]*c")
    one, same = origin.copy(), origin.copy()
    bitmasks.prepare([one, one, same])
    assert (one.lent, same.lent, len(threads.waiting)) == (True, False, 1), "they are in one state"
    threads.run()
    assert (bitmasks.finished(), one.lent) == ([], False)
    assert one.ready
    assert same.ready
    assert one.seconds > 0
    assert bitmasks.statistics().seconds == one.seconds
    bitmasks.start(MaskWork(1, 3, (MaskRow(same, [], 0), MaskRow(one, [], 1))), 0)
    assert not bitmasks.jobs.running
    (masks,) = bitmasks.finished()
    assert len(masks.new_slots) == 4


def test_a_step_waits_for_the_guides_that_are_lent() -> None:
    """A thread that calls a guide while another one does would find it borrowed."""
    threads, steps = Later(), Later()
    bitmasks = BitmaskFiller(tokens(), steps, threads, 1)
    bitmasks.renew(16)
    found = guide("regex", "[ab]*c")
    bitmasks.prepare([found])
    bitmasks.start(MaskWork(1, 3, (MaskRow(found, [], 0),)), 0)
    assert bitmasks.jobs.running == 1
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(steps.run)
        assert not job.done()
        threads.run()
        job.result(60)
    (masks,) = bitmasks.finished()
    assert (masks.step, len(masks.new_slots)) == (1, 4)
    assert found.ready


def test_what_was_made_for_executors_that_are_gone_is_not_kept() -> None:
    threads = Later()
    bitmasks = BitmaskFiller(tokens(), Inline(), threads, 1)
    bitmasks.renew(16)
    found = guide("regex", "[ab]*c")
    bitmasks.prepare([found])
    bitmasks.renew(16)
    threads.run()
    assert bitmasks.finished() == []
    assert (found.lent, found.ready) == (False, False)
    bitmasks.prepare([found])
    threads.run()
    bitmasks.finished()
    assert found.ready


def test_a_guide_that_is_lent_is_not_passed_on_even_where_its_mask_is_known() -> None:
    threads, steps = Later(), Later()
    bitmasks = BitmaskFiller(tokens(), steps, threads, 1)
    bitmasks.renew(16)
    origin = guide("regex", "[ab]*c")
    one, same = origin.copy(), origin.copy()
    bitmasks.prepare([one])
    bitmasks.start(MaskWork(1, 3, (MaskRow(same, [], 0),)), 0)
    steps.run()
    bitmasks.finished()
    assert one.ready
    bitmasks.start(MaskWork(2, 3, (MaskRow(one, [], 0),)), 1)
    assert (bitmasks.jobs.running, bitmasks.finished()) == (1, [])
    threads.run()
    steps.run()
    assert [masks.step for masks in bitmasks.finished()] == [2]


def test_masks_of_a_quick_automaton_need_no_thread() -> None:
    steps = Later()
    bitmasks = BitmaskFiller(tokens(), steps, Inline(), 1)
    bitmasks.renew(16)
    origin = guide("regex", "[ab]*c")
    bitmasks.start(MaskWork(1, 3, (MaskRow(origin, [], 0),)), 0)
    assert (bitmasks.jobs.running, bitmasks.finished()) == (1, [])
    steps.run()
    assert len(bitmasks.finished()) == 1
    pace = origin.pace
    for _ in range(99):
        origin.took(0.00001, 1)
    origin.advance(ids("c"))
    bitmasks.start(MaskWork(2, 3, (MaskRow(origin, [], 0),)), 1)
    assert not bitmasks.jobs.running
    assert [(masks.step, len(masks.new_slots)) for masks in bitmasks.finished()] == [(2, 4)]
    assert 0 < origin.pace < pace
    assert origin.seconds != 0.00001, "it was told what the last one took"
