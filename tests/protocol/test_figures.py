"""Figures as messages: small, and the same behind a link."""

from __future__ import annotations

import msgspec

from penstock.protocol.figures import Census, HistogramStatistics, ProcessFigures, Sample, Spread

FIGURES = ProcessFigures(
    role="scheduler",
    index=3,
    incarnation=7,
    pid=4711,
    time=1.5e9,
    samples=(Sample("loop_turns", 2.0**40), Sample("waiting_requests", 3, ("slot",))),
    spreads=(Spread("step_part_seconds", HistogramStatistics((0.001, 0.1), (1, 2, 3), 0.75), ("plan",)),),
)


def test_a_census_is_what_it_was() -> None:
    census = Census((FIGURES, msgspec.structs.replace(FIGURES, role="executor", samples=())))
    data = msgspec.msgpack.encode(census)
    assert msgspec.msgpack.decode(data, type=Census) == census


def test_it_costs_little_more_than_its_names() -> None:
    names = sum(len(each.name) for each in (*FIGURES.samples, *FIGURES.spreads))
    assert len(msgspec.msgpack.encode(Census((FIGURES,)))) < names + 160


def test_labels_are_text_and_values_are_numbers() -> None:
    data = msgspec.msgpack.encode(Sample("a", 1, ("b",)))
    assert msgspec.msgpack.decode(data) == ["a", 1, ["b"]]
    assert msgspec.msgpack.decode(data, type=Sample).value == 1.0
