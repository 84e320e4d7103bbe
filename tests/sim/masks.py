"""Mask work as a thread pool would do it: at some later moment, with the guides lent out meanwhile."""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.plan_builder import MaskWork
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.steps import StepMasks
from tests.sim.model import VOCAB

PLACES = 512


class MaskDesk:
    """Owner of the mask work that was taken and is not done."""

    def __init__(self) -> None:
        self._work: deque[MaskWork] = deque()
        self._beside: list[Guide] = []
        self.beside = 0  # masks made so
        self._next = 0
        self.made = 0

    def __bool__(self) -> bool:
        return bool(self._work)

    def collect(self, scheduler: Scheduler) -> None:
        """Take what there is; the guides belong to the desk from now on."""
        late, steps = scheduler.late_masks(), scheduler._state.steps.in_flight
        planned = {row.sequence.guide for inflight in steps for row in inflight.guided}
        assert planned.isdisjoint(late), "one thread would take a guide that another one has"
        for guide in late:
            if not guide.lent:
                guide.lent = True
                self._beside.append(guide)
        while (work := scheduler.mask_work()) is not None:
            assert work.epoch == scheduler.epoch
            self.take(work)

    def take(self, work: MaskWork) -> None:
        self._work.append(work)
        for row in work.rows:
            if row.guide in self._beside:
                self.make_beside(row.guide)
            row.guide.lent = True

    def make_beside(self, guide: Guide | None = None) -> None:
        """Make a mask that no step waits for: this guide's, or the oldest."""
        if self._beside:
            found = self._beside.pop(0 if guide is None else self._beside.index(guide))
            found.make()  # type: ignore[attr-defined]
            self.beside += 1

    def make(self) -> StepMasks:
        """Do the oldest work."""
        work = self._work.popleft()
        entries, bits = [], []
        for row in work.rows:
            row.guide.lent = False
            for entry, allowed in enumerate(row.guide.walk(row.drafts), row.entry):  # type: ignore[attr-defined]
                flags = np.zeros(VOCAB, np.uint8)
                flags[list(allowed)] = 1
                entries.append(entry)
                bits.append(np.packbits(flags, bitorder="little").tobytes())
        places = [(self._next + number) % PLACES for number in range(len(entries))]
        self._next += len(entries)
        self.made += len(entries)
        return StepMasks(
            step=work.step,
            epoch=work.epoch,
            entries=np.array(entries, np.int32).tobytes(),
            slots=np.array(places, np.int32).tobytes(),
            new_slots=np.array(places, np.int32).tobytes(),
            bits=b"".join(bits),
        )

    def clear(self) -> None:
        """The epoch is over: what was taken is of no use, its guides are free."""
        for work in self._work:
            for row in work.rows:
                row.guide.lent = False
        self._work.clear()
        while self._beside:
            self.make_beside()
