"""tests/units.py: one worker takes together what shares a costly thing, and the order loses nothing."""

from __future__ import annotations

import itertools

import pytest

from tests.rules.source import ROOT
from tests.units import FIRST, TOGETHER, WAITING, ordered, unit_of


@pytest.mark.parametrize("path", [*FIRST, *WAITING, *(path for paths in TOGETHER.values() for path in paths)])
def test_what_is_named_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_a_unit_is_a_file_or_what_shares_something() -> None:
    assert unit_of("tests/kernels/test_norm.py::test_it[a::b]") == "tests/kernels/test_norm.py"
    one, other = unit_of("tests/e2e/test_tools.py::test_a"), unit_of("tests/e2e/test_vectors.py::test_b[1]")
    assert one == other == "the server of tests/e2e"
    assert unit_of("tests/e2e/test_limits.py::test_a") != one


def test_what_waits_comes_between_what_computes() -> None:
    computing = [f"tests/kernels/test_{number}.py" for number in range(10)]
    waiting = [f"tests/e2e/test_{number}.py" for number in range(5)]
    first = ["tests/sim/test_a.py", "the parsed tree"]
    asked = [*computing, "tests/rules/test_a.py", *waiting, "tests/sim/test_a.py", "tests/security/test_advisories.py"]
    found = ordered(f"{file}::test_{number}" for file in asked for number in range(2))
    assert sorted(found) == sorted([*computing, *waiting, *first])
    assert sorted(found[:2]) == sorted(first)
    places = [found.index(file) for file in waiting]
    assert all(1 < later - before < 5 for before, later in itertools.pairwise(places)), places
    assert found[-1] in computing
