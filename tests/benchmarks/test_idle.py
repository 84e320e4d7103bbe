"""What the benchmark of sleeps reads from a log, and the table that is made of it."""

from __future__ import annotations

from benchmarks.idle import phases_of
from benchmarks.readme_tables import idle_table

LINE = (
    "2026-11-28T16:49:02.811Z info executor-0 ready seconds=0.42 stages=\"importing 0.00 s, reading the model's "
    'configuration 0.04 s, compiling kernels 1.25 s, measuring 3 products with weights 12.00 s"'
)


def test_phases_of_a_start() -> None:
    assert phases_of(LINE) == {
        "importing": 0.0, "reading the model's configuration": 0.04, "compiling kernels": 1.25,
        "measuring 3 products with weights": 12.0,
    }  # fmt: skip
    assert phases_of("executor-0 ready seconds=0.42") == {}


def test_a_row_of_the_table() -> None:
    wakes = [{"first_token": 3.1, "load": 2.9, "sleep": 4.04}, {"first_token": 2.8, "load": 2.91, "sleep": 1.0}]
    case = {"weights": "files", "keep": True, "memory_asleep": 4, "memory_loaded": 129461, "kept_bytes": 16_400_000_000,
            "wakes": wakes}  # fmt: skip
    row = idle_table(list("abcdefg"), [case]).splitlines()[-1]
    assert row == "| files, `--keep-weights` | 2.8 to 3.1 | 2.9 | 4.0 | 1.0 | 4 of 129,461 | 16.4 GB |"
