"""Snapshots for tests: every metric that a process of a role has, and such processes as messages and files."""

from __future__ import annotations

from penstock.engine_core.histogram import Histogram
from penstock.protocol.links import LINKS, Role
from penstock.protocol.snapshots import MetricsSnapshots
from penstock.services.metrics.definitions import BY_ROLE, PART, Kind
from penstock.services.metrics.snapshot import Snapshot, encode

VALUES = {
    "link": tuple(link.name for link in LINKS),
    "direction": ("in", "out"),
    "reason": ("slot", "blocks"),
    "part": ("plan", "launch"),
    "finish": ("stop", "length", "abort", "error"),
    "position": ("0", "1"),
    "group": ("0", "1"),
    "state": ("running", "waiting"),
    "adapter": ("sql",),
    "outcome": ("done", "refused"),
    "to": ("0",),
    "source": ("data", "url"),
    "pid": ("4711",),
    "incarnation": ("0000002a",),
    "endpoint": ("/v1/completions",),
    "status": ("200",),
}


def every(role: Role, index: int = 0, time: float = 0.0, **given: float) -> Snapshot:
    """One process's metrics, each 0 unless `given` says otherwise, under each value of its labels."""
    found = Snapshot(role, index, 42, 4711, time)
    for metric in BY_ROLE[role]:
        for labels in combinations(metric.labels):
            value = given.get(metric.name, 0.0)
            if metric.kind is Kind.HISTOGRAM:
                histogram = Histogram(PART)
                histogram.observe(value)
                found.histograms.setdefault(metric.name, {})[labels] = histogram.statistics()
            else:
                found.values.setdefault(metric.name, {})[labels] = value
    return found


def combinations(labels: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for label in labels:
        found = [(*before, value) for before in found for value in VALUES[label]]
    return found


def message(*snapshots: Snapshot) -> MetricsSnapshots:
    """These processes as a tokenizer of another host tells of them."""
    return MetricsSnapshots(encode(snapshots))


def server(**given: float) -> list[Snapshot]:
    """One process of each role but api."""
    return [every(role, **given) for role in (Role.TOKENIZER, Role.SCHEDULER, Role.EXECUTOR)]
