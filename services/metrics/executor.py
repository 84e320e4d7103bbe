"""What an executor tells of itself to its scheduler."""

from __future__ import annotations

from penstock.protocol.figures import Census
from penstock.protocol.steps import ExecutorReady
from penstock.services.executor.steps import Steps
from penstock.services.links.link import Port
from penstock.services.metrics.snapshot import INTERVAL, Vitals, add_link


class Figures:
    """Owner of the time at which they are told next."""

    def __init__(self, vitals: Vitals, steps: Steps, port: Port, ready: ExecutorReady) -> None:
        self.vitals = vitals
        self._steps = steps
        self._port = port
        self._ready = ready
        self._next = 0.0

    def tick(self, now: float, wall: float) -> None:
        """Tell them if it is time; monotonic and unix seconds."""
        if now < self._next:
            return
        self._next = now + INTERVAL
        peers = [peer for peer in self._port.peers if peer.credit > 0]
        if not peers:
            return
        sheet, found, ready = self.vitals.sheet(), self._steps.statistics(), self._ready
        add_link(sheet, "steps", [self._port.statistics()], found.waiting)
        sheet.put("executor_weight_bytes", ready.weight_bytes)
        sheet.put("executor_cache_bytes", ready.cache_bytes)
        sheet.put("executor_load_seconds", ready.load_seconds)
        sheet.put("executor_plans", found.plans)
        sheet.put("executor_results", found.results)
        sheet.put("executor_dropped_results", found.dropped)
        sheet.put("executor_stray_masks", found.stray_masks)
        sheet.spread("step_part_seconds", found.launch, "launch")
        self._port.send_each(peers, Census((sheet.figures(self.vitals.me, wall),)))
