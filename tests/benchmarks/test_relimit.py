"""Stored shares of a limit follow from what was measured and from the rates of the chip."""

from __future__ import annotations

import json

from benchmarks.limits import CHIPS
from benchmarks.relimit import KERNELS, RESULTS, bounded, derive, records


def test_every_stored_limit_is_that_of_the_present_rates() -> None:
    found = derive(RESULTS)
    assert set(found) == {*records(RESULTS), *(RESULTS / name for name in KERNELS)}
    assert len(found) > 90
    stale = [str(path) for path, content in found.items() if path.read_bytes() != content]
    assert not stale, "run `python -m benchmarks.relimit`"


def test_no_figure_passes_its_limit() -> None:
    """Else the limit is none. Kernels have 1 % for rounded times. Experts of few tokens have more: rounds share
    experts, whose weights the cache may partly hold."""
    for path in records(RESULTS):
        assert (json.loads(path.read_bytes())["share_of_limit"] or 0) <= 1, path
    for name in KERNELS:
        for figure in json.loads((RESULTS / name).read_bytes())["figures"]:
            few = "rows" in figure and figure["rows"] <= 8
            assert figure["share"] <= (1.07 if few else 1.01), (name, figure)


def test_a_kernel_is_held_against_the_nearer_limit() -> None:
    chip = CHIPS["H200"]
    read = bounded({"bytes": chip.bytes_per_second * 1e-5, "flops": 0, "microseconds": 20.0}, chip)
    assert (read["limit"], read["share"]) == ("read", 0.5)
    multiplied = bounded({"bytes": 0, "flops": chip.flops_per_second * 1e-5, "microseconds": 40.0}, chip)
    assert (multiplied["limit"], multiplied["share"]) == ("matrix", 0.25)
