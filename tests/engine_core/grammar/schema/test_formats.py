"""Dates and times as RFC 3339 has them, day by day against the calendar of the standard library."""

from __future__ import annotations

import datetime
import re
from itertools import product

import pytest

from benchmarks.schema_instances import judge
from benchmarks.schema_judge import accepts_value
from penstock.engine_core.grammar.schema.scalars import FORMAT_PATTERNS
from tests.engine_core.grammar.schema.judging import made, same

YEARS = (0, 1, 4, 99, 100, 400, 1600, 1700, 1899, 1900, 1904, 1999, 2000, 2023, 2024, 2025, 2100, 2400, 9996, 9999)


def exists(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_the_pattern_of_a_date_is_the_calendar() -> None:
    found = re.compile(FORMAT_PATTERNS["date"], re.ASCII)
    for year in range(10_000):
        text = f"{year:04}-02-29"
        assert (found.fullmatch(text) is not None) is exists(text), text
    for year, month, day in product(YEARS, range(15), range(34)):
        text = f"{year:04}-{month:02}-{day:02}"
        assert (found.fullmatch(text) is not None) is exists(text), text


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "2100-02-29", "2023-04-31", "0000-01-01", "2023-1-1"])
def test_a_day_that_is_not_in_the_calendar_is_no_date(day: str) -> None:
    assert not accepts_value(made({"type": "string", "format": "date"}), day)
    assert not accepts_value(made({"type": "string", "format": "date-time"}), f"{day}T12:00:00Z")


@pytest.mark.parametrize("day", ["2024-02-29", "2000-02-29", "2400-02-29", "2023-02-28", "2023-12-31", "0001-01-01"])
def test_a_day_of_the_calendar_is_a_date(day: str) -> None:
    assert same({"type": "string", "format": "date"}, day)
    assert same({"type": "string", "format": "date-time"}, f"{day}T12:00:00Z", f"{day}t23:59:59.5+23:59")


@pytest.mark.parametrize(
    "time",
    ["00:00:00Z", "23:59:59.123456789z", "12:30:00+05:45", "12:30:00-00:00", "23:59:60Z", "23:59:60.5+00:00",
     "24:00:00Z", "12:60:00Z", "12:30:61Z", "12:30:60Z", "22:59:60Z", "23:58:60Z", "23:59:60+01:00", "12:30:00",
     "12:30:00+24:00", "12:30:00+05:60", "12:30:00.Z", "12:30Z", "1:30:00Z", "12:30:00 Z"],
)  # fmt: skip
def test_times_and_their_leap_seconds(time: str) -> None:
    assert same({"type": "string", "format": "time"}, time)
    assert same({"type": "string", "format": "date-time"}, f"1998-12-31T{time}", f"1998-12-31 {time}")


def test_a_leap_second_is_the_last_of_a_day_in_utc() -> None:
    judged = judge({"type": "string", "format": "time"})
    assert judged.is_valid("00:59:60+01:00")
    assert judged.is_valid("15:59:60-08:00")
    assert not judged.is_valid("23:59:60-08:00")


def test_a_format_beside_a_pattern_holds_with_it() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2024-", "minLength": 3}
    assert same(schema, "2024-02-29", "2023-02-28", "2024-02-30", "2024-")
