"""A server on a virtual clock: steps take their time one behind the other, and masks take theirs beside them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as changed

from penstock.protocol.steps import StepMasks, StepResult
from tests.sim.lives import World
from tests.sim.server import ROOMY, Server

FORWARD = 0.01  # seconds of a step, whatever it runs
WORLD = replace(ROOMY, pace=1e-6)


class TimedServer(Server):
    """`mask`: seconds that a new mask takes, and `link` those of every message of masks. One thread fills those of
    steps, another those that are made beside them."""

    def __init__(self, mask: float, link: float = 0.0, world: World = WORLD) -> None:
        super().__init__(world)
        self.mask_seconds, self.link = mask, link
        self.stamps: dict[int, list[float]] = {}  # by request, of each token
        self.steps: list[float] = []  # ends
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._device = self._filler = self._aside = 0.0  # busy until then
        self._planned: dict[int, float] = {}
        self._masked: dict[int, float] = {}

    def run_timed(self, depth: int = 2) -> None:
        """To the end of every life."""
        self._turn(depth)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._turn(depth)
        assert not self.scheduler.unfinished

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _turn(self, depth: int) -> None:
        self._collect()
        while self.scheduler.in_flight < depth and (plan := self.scheduler.plan(self.now)) is not None:
            self._planned[plan.step] = self.now
            self._execute(self.executor.run(plan))
            self._collect()

    def _collect(self) -> None:
        """Begin what masks there are to make."""
        for guide in self.scheduler.late_masks():
            guide.lent = True
            self._aside = max(self._aside, self.now) + self.mask_seconds
            guide.seconds = self.mask_seconds
            self._at(self._aside, guide.make)  # type: ignore[attr-defined]
        while (work := self.scheduler.mask_work()) is not None:
            known = all(row.guide.ready and row.guide.covered(row.drafts) == len(row.drafts) for row in work.rows)
            self.desk.take(work)
            self._filler = max(self._filler, self.now) + (0.0 if known else self.mask_seconds)
            self._at(self._filler + self.link, self._send)

    def _send(self) -> None:
        masks: StepMasks = self.desk.make()
        self._masked[masks.step] = self.now
        self._execute(self.executor.mask(masks))

    def _execute(self, results: list[StepResult]) -> None:
        for result in results:
            began = max(self._device, self._planned[result.step])
            computed = began + FORWARD
            self._device = max(computed, self._masked.get(result.step, 0.0))
            waited = self._device - computed
            self._at(self._device, self._apply(changed(result, busy=FORWARD, waited=waited)))

    def _apply(self, result: StepResult) -> Callable[[], None]:
        def apply() -> None:
            self.steps.append(self.now)
            self.scheduler.apply(result, self.now)
            self.executor.applied(result.step)
            for number in self.lives:
                stamps = self.stamps.setdefault(number, [])
                stamps += [round(self.now, 6)] * (len(self.seen(number).tokens) - len(stamps))

        return apply
