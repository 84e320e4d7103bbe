"""What each process says of itself now and then, on its way to the api processes, which answer for all of them.

Figures travel as snapshots: a census replaces the sender's last one, so that one which found no credit is no loss, and
the figures of a process that has left its link are gone with the next. What the names mean stands in
services/metrics/definitions.py.
"""

from __future__ import annotations

from penstock.protocol.messages import Message, Part


class HistogramStatistics(Part, frozen=True):
    """Observations per bucket (the last one is unbounded) and their sum, in the unit of the bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Sample(Part, frozen=True):
    """One number: a total since the process began, or what stands now."""

    name: str
    value: float
    labels: tuple[str, ...] = ()  # values, in the order of the catalogue's labels


class Spread(Part, frozen=True):
    """One histogram."""

    name: str
    statistics: HistogramStatistics
    labels: tuple[str, ...] = ()


class ProcessFigures(Part, frozen=True, kw_only=True):
    """One life of one process."""

    role: str
    index: int
    incarnation: int
    pid: int
    time: float  # unix seconds when they were taken
    samples: tuple[Sample, ...] = ()
    spreads: tuple[Spread, ...] = ()


class Census(Message, frozen=True):
    """executor → scheduler → tokenizer → api, about every second: the sender, and all that it has such figures of."""

    processes: tuple[ProcessFigures, ...]
