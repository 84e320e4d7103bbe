"""Masks are filled beside the loop for the executors of the epoch."""

from __future__ import annotations

import time

import pytest

from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.services.scheduler import bitmask_filler as maskers
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from tests.engine_core.grammar.vocabulary import guide, ids, tokens
from tests.services.scheduler.fakes import Inline


def test_masks_come_back_as_the_message_for_the_executors() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), 1)
    bitmasks.renew(16)
    assert bitmasks.most == 8
    bitmasks.start(MaskWork(5, 3, (MaskRow(guide("regex", "a"), [], 2),)), 4)
    (masks,) = bitmasks.finished()
    assert (masks.step, masks.epoch, len(masks.bits)) == (5, 3, tokens().words * 4)
    assert masks.entries == (2).to_bytes(4, "little")
    assert bitmasks.finished() == []
    statistics = bitmasks.statistics()
    assert (statistics.rows, statistics.store.rows) == (1, 1)
    assert 0 < statistics.seconds == statistics.slowest


def test_new_executors_begin_with_an_empty_store() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), 1)
    for epoch in (1, 2):
        bitmasks.renew(16)
        bitmasks.start(MaskWork(1, epoch, (MaskRow(guide("regex", "a"), [], 0),)), 0)
        assert [len(masks.new_slots) for masks in bitmasks.finished()] == [4]


def test_without_places_or_tokens_there_are_no_masks() -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), 1)
    assert (bitmasks.most, bitmasks.statistics().store.fills, bitmasks.statistics().seconds) == (0, 0, 0.0)
    bitmasks.renew(0)
    assert bitmasks.most == 0
    none = BitmaskFiller(None, Inline(), 1)
    none.renew(64)
    assert none.most == 0


def test_after_a_slow_step_each_row_pays_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bitmasks = BitmaskFiller(tokens(), Inline(), 1)
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
    bitmasks = BitmaskFiller(tokens(), Inline(), 1)
    bitmasks.renew(16)
    origin = guide("regex", "[ab]*c")
    for step in (1, 2, 3):
        one = origin.copy()
        one.advance(ids("a"))
        bitmasks.start(MaskWork(step, 1, (MaskRow(one, [], 0),)), step - 1)
        assert bitmasks.jobs.running == (step == 1)
        assert [len(masks.new_slots) // 4 for masks in bitmasks.finished()] == [int(step == 1)]
