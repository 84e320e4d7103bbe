"""The benchmark of products with weights in groups: what it tries, and what it takes for a layer."""

from __future__ import annotations

from benchmarks.grouped_kernels import CUBLAS, ROWS, SHAPES, layers_of, ways_of
from penstock.kernels.chip import CHIPS
from penstock.kernels.grouped_tilings import WideTiling
from penstock.kernels.linear_tilings import fits

H200 = CHIPS["sm_90"]


def test_every_way_has_one_name_and_fits() -> None:
    for shape, product in SHAPES.items():
        for rows in ROWS:
            ways = ways_of(shape, rows, H200)
            assert [one.name for one in ways[:2]] == ["plan", "cublas"]
            assert len({one.name for one in ways}) == len(ways)
            assert all(fits(one.way, product, H200) for one in ways)
            assert not isinstance(ways[0].way, WideTiling), "what there is without Gluon"
    assert "wide 128x64x4x2x4x1" in [one.name for one in ways_of("gate_up", 256, H200)]


def test_a_layer_has_the_fastest_ways_that_were_measured() -> None:
    figures = [
        {"rows": 256, "shape": shape, "way": one.name, "us": 9.0 - at} | ({"problem": "off"} if at > 3 else {})
        for shape in SHAPES
        for at, one in enumerate(ways_of(shape, 256, H200))
    ]
    figures = [{key: value for key, value in one.items() if key != "us" or "problem" not in one} for one in figures]
    found = layers_of(figures, 256, H200)
    for shape in SHAPES:
        ways = ways_of(shape, 256, H200)
        assert found["best"][shape] == ways[3]
        assert found["plan"][shape] == ways[0]
        assert found["bfloat16"][shape] == CUBLAS
        assert isinstance(found["served"][shape].way, WideTiling)
