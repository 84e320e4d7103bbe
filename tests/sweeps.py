"""Tests marked `sweep`: so many of their cases run each time that each row of each `parametrize` is in one of them, and
the others are `long`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest


def shorten(items: Iterable[pytest.Item]) -> None:
    """Mark as `long` what `beyond` names of each test that is a sweep."""
    sweeps: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("sweep"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sweeps.values():
        for case in beyond(cases):
            case.add_marker(pytest.mark.long)


def beyond(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """All but as many cases as have every row; the earliest of those that bring most new rows is taken first."""
    rows = {case: set(rows_of(case)) for case in cases}
    missing = set().union(*rows.values())
    while missing:
        case = max(rows, key=lambda case: len(rows[case] & missing))
        missing -= rows.pop(case)
    return list(rows)


def rows_of(case: pytest.Function) -> Iterator[tuple[object, ...]]:
    """What a case takes from each `parametrize`: its first name, and which objects the values are."""
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield names[0], *(id(case.callspec.params[name.strip()]) for name in names)
