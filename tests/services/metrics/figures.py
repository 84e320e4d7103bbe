"""Figures of processes for tests: everything in the catalogue, as each role tells it."""

from __future__ import annotations

from penstock.engine_core.histogram import Histogram
from penstock.protocol.figures import Census, ProcessFigures
from penstock.protocol.links import LINKS, Role
from penstock.services.links.link import Self
from penstock.services.metrics.definitions import API, ENGINE, EVERY_PROCESS, EXECUTOR, STEPS, TOKENIZER, Kind, Metric
from penstock.services.metrics.snapshot import PART, Sheet

TOLD: dict[Role, tuple[Metric, ...]] = {
    Role.API: (*EVERY_PROCESS, *API),
    Role.TOKENIZER: (*EVERY_PROCESS, *TOKENIZER),
    Role.SCHEDULER: (*EVERY_PROCESS, *STEPS, *ENGINE),
    Role.EXECUTOR: (*EVERY_PROCESS, *STEPS, *EXECUTOR),
}
VALUES = {
    "link": tuple(link.name for link in LINKS),
    "direction": ("in", "out"),
    "reason": ("slot", "blocks"),
    "part": ("plan", "launch"),
    "finish": ("stop", "length", "abort", "error"),
    "position": ("0", "1"),
    "outcome": ("done", "refused"),
    "to": ("0",),
    "pid": ("4711",),
    "incarnation": ("0000002a",),
}


def every(role: Role, index: int = 0, time: float = 0.0, **given: float) -> ProcessFigures:
    """One process's figures, each 0 unless `given` says otherwise, under each value of its labels."""
    sheet = Sheet()
    for metric in TOLD[role]:
        for labels in combinations(metric.labels):
            if metric.kind is Kind.HISTOGRAM:
                histogram = Histogram(PART)
                histogram.observe(given.get(metric.name, 0.0))
                sheet.spread(metric.name, histogram.statistics(), *labels)
            else:
                sheet.put(metric.name, given.get(metric.name, 0.0), *labels)
    return sheet.figures(Self(role, index, 42, 7), time)


def combinations(labels: tuple[str, ...]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for label in labels:
        found = [(*before, value) for before in found for value in VALUES[label]]
    return found


def census(**given: float) -> Census:
    """What a tokenizer tells of a server with one of each role."""
    return Census(tuple(every(role, **given) for role in (Role.TOKENIZER, Role.SCHEDULER, Role.EXECUTOR)))
