"""What the scheduler process does between steps, or once it has had nothing to do for a while."""

from __future__ import annotations

import gc
import logging

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

CHECK_STEPS = 256  # between checks of the block accounts' sums; every block is checked whenever it is idle
IDLE_SECONDS = 1.0  # seconds without work after which there is time for what takes milliseconds
GC_SECONDS = 30.0  # between garbage collections while it is never idle


class Housekeeping:
    """Work between steps: the block accounts are checked, and garbage is collected.

    What takes milliseconds waits for a second without work. The next request often comes right after the last one
    ended, and must not wait for a look at every block.
    """

    def __init__(self, now: float) -> None:
        self.idle = True  # nothing was running when the last iteration ended
        self.faults = 0  # checks that found the block accounts wrong
        self._busy_at = now
        self._idle_done = True  # this idle time has had its work
        self._checked_plan = 0
        self._collected_at = now

    def run(self, scheduler: Scheduler, plans: int, now: float) -> None:
        """Called at the end of each iteration; `plans`: how many have been made."""
        self.idle = not (scheduler.unfinished or scheduler.in_flight)
        if not self.idle:
            self._busy_at, self._idle_done = now, False
        has_time = not self._idle_done and now - self._busy_at >= IDLE_SECONDS
        self._idle_done |= has_time
        if has_time or plans - self._checked_plan >= CHECK_STEPS:
            self._checked_plan = plans
            self._check(scheduler, thorough=has_time)
        if has_time or now - self._collected_at >= GC_SECONDS:
            self._collected_at = now
            gc.collect(0)

    def _check(self, scheduler: Scheduler, *, thorough: bool) -> None:
        """Compare the block accounts with one another, block by block when there is time for it."""
        report = scheduler.check(thorough=thorough)
        if not report.ok:
            self.faults += 1
            logs.error(log, "block_accounts_wrong", faults="; ".join(report.faults), quarantined=len(report.blocks))
