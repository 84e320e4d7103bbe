"""tests/sweeps.py: which cases of a sweep run each time."""

from __future__ import annotations

import itertools
import os

import pytest


@pytest.fixture
def taken(request: pytest.FixtureRequest) -> set[str]:
    """Names of the cases of `test_cases` that are not long."""
    items = [item for item in request.session.items if item.name.startswith("test_cases[")]
    return {item.name for item in items if not item.get_closest_marker("long")}


@pytest.mark.sweep
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU takes every case")
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(("size", "form"), [(1, "a"), (1, "b"), (2, "a")])
@pytest.mark.parametrize("kind", ["x", "y"])
def test_cases(kind: str, size: int, form: str, flag: bool, taken: set[str]) -> None:
    assert len(taken) <= 3
    every = ["x", "y"], [(1, "a"), (1, "b"), (2, "a")], [True, False]
    names = {f"test_cases[{kind}-{size}-{form}-{flag}]": (kind, (size, form), flag)
             for kind, (size, form), flag in itertools.product(*every)}  # fmt: skip
    if len(taken) == 3:  # the whole file is run
        for at, rows in enumerate(every):
            assert {names[name][at] for name in taken} == set(rows)
