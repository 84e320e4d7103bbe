"""Cells of numbers: bounds, grids, complements, and what the automaton library holds of them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine_core.grammar.schema.scalars import Number, fraction
from penstock.engine_core.grammar.schema.writing_scalars import write_number
from tests.engine_core.grammar.schema.judging import made, same

F = Fraction
POINTS = tuple(F(n, 4) for n in range(-24, 25))
BOUNDS = st.one_of(st.none(), st.integers(-4, 4).map(Fraction), st.sampled_from((F(1, 2), F(-3, 2))))
STEPS = st.lists(st.sampled_from((F(1, 2), F(1), F(3, 2), F(2))), max_size=1).map(tuple)
CELLS = st.builds(
    Number, BOUNDS, st.booleans(), BOUNDS, st.booleans(), st.sampled_from((None, True, False)), STEPS, STEPS
)


def holds(cell: Number, value: Fraction) -> bool:
    if cell.low is not None and (value < cell.low or (cell.low_open and value == cell.low)):
        return False
    if cell.high is not None and (value > cell.high or (cell.high_open and value == cell.high)):
        return False
    if cell.whole is not None and (value.denominator == 1) is not cell.whole:
        return False
    grid = all((value / m).denominator == 1 for m in cell.multiples)
    return grid and not any((value / m).denominator == 1 for m in cell.not_multiples)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(CELLS, CELLS)
def test_conjunction(a: Number, b: Number) -> None:
    both = a.meet(b)
    for value in POINTS:
        wanted = holds(a, value) and holds(b, value)
        assert wanted is (both is not None and holds(both, value)), value


@settings(max_examples=200, derandomize=True, deadline=None)
@given(CELLS)
def test_complement(cell: Number) -> None:
    rest = cell.complement()
    for value in POINTS:
        assert holds(cell, value) is not any(holds(one, value) for one in rest), value


@settings(max_examples=200, derandomize=True, deadline=None)
@given(CELLS)
def test_emptiness_is_certain(cell: Number) -> None:
    if cell.empty():
        assert not any(holds(cell, value) for value in POINTS)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(CELLS)
def test_bounds_on_the_grid_hold_the_same(cell: Number) -> None:
    tight = cell.snapped()
    assert all(holds(cell, value) is holds(tight, value) for value in POINTS)


def test_numbers_are_read_as_written() -> None:
    assert fraction(0.1) == F(1, 10)
    assert fraction(1e-7) == F(1, 10**7)
    assert fraction(3) == 3


@pytest.mark.parametrize(
    ("cell", "wanted"),
    [
        (Number(multiples=(F(2), F(3))), F(6)),
        (Number(whole=True, multiples=(F(1, 2),)), F(1)),
        (Number(multiples=(F(3, 2), F(1, 2))), F(3, 2)),
        (Number(whole=True, multiples=(F(3, 4),)), F(3)),
        (Number(), None),
    ],
)
def test_grids(cell: Number, wanted: Fraction | None) -> None:
    assert cell.step() == wanted


WRITTEN = [
    (Number(), {"type": "number"}),
    (Number(whole=True), {"type": "integer"}),
    (Number(F(1), True, whole=True), {"type": "integer", "minimum": 2}),
    (Number(F(1), True), {"type": "number", "exclusiveMinimum": 1}),
    (Number(F(1, 2), False, F(3, 2), True), {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1.5}),
    (Number(F(3), False, F(3), False), {"const": 3}),
    (Number(F(1, 2), False, F(1, 2), False), {"const": 0.5}),
    (Number(multiples=(F(1),)), {"type": "integer"}),
    (Number(multiples=(F(2),), whole=True), {"type": "integer", "multipleOf": 2}),
    (Number(multiples=(F(1, 100),)), {"type": "number", "multipleOf": 0.01}),
    (Number(high=F(2**63 - 1), whole=True), {"type": "integer", "maximum": 2**63 - 1}),
    (Number(high=F(2**1024)), {"type": "number"}),
    (Number(low=F(-(2**63)), whole=True), {"type": "integer", "minimum": -(2**63)}),
    (Number(high=F(2**64), whole=True), {"type": "integer", "maximum": 2**64}),
    (Number(F(2**53 + 1), False, F(2**53 + 1), False), {"type": "number", "minimum": 2**53 + 1, "maximum": 2**53 + 1}),
    (Number(F(2**53 + 1), True), {"type": "number", "exclusiveMinimum": 2**53 + 1}),
    (Number(whole=False), {"type": "number", "not": {"type": "integer"}}),
]


@pytest.mark.parametrize(("cell", "wanted"), WRITTEN)
def test_writing(cell: Number, wanted: dict[str, object]) -> None:
    assert write_number(cell) == (wanted, "")


PLAIN_TROUBLE = [
    (Number(low=F(-(2**63)), whole=True), "minimum"),
    (Number(high=F(2**64), whole=True), "maximum"),
    (Number(high=F(2**53 + 1), whole=True), "maximum"),
    (Number(F(2**53 + 1), False, F(2**53 + 1), False), "maximum"),
    (Number(high=F(2**63)), "maximum"),
    (Number(whole=False), "not"),
]
TROUBLE = [
    (Number(low=F(2**1024)), "minimum"),
    (Number(high=F(10**40), whole=True), "maximum"),
    (Number(F(1, 2), False, F(2**64), False), "maximum"),
    (Number(F(1, 2), False, whole=False), "not"),
    (Number(whole=False, not_multiples=(F(2),)), "not"),
    (Number(not_multiples=(F(2),)), "not"),
    (Number(multiples=(F(1_000_003),)), "multipleOf"),
    (Number(multiples=(F(1, 10**300),)), "multipleOf"),
]


@pytest.mark.parametrize(("cell", "keyword"), TROUBLE)
def test_what_cannot_be_written_is_said(cell: Number, keyword: str) -> None:
    assert write_number(cell)[1].startswith(f"{keyword}: ")
    assert write_number(cell, plain=True)[1].startswith(f"{keyword}: ")


@pytest.mark.parametrize(("cell", "keyword"), PLAIN_TROUBLE)
def test_what_is_not_written_plainly_is_said(cell: Number, keyword: str) -> None:
    assert write_number(cell, plain=True)[1].startswith(f"{keyword}: ")
    assert write_number(cell)[1] == ""


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(-300, 300), st.integers(0, 400), st.booleans(), st.booleans(), st.sampled_from((1, 4, 10)))
def test_ranges_in_the_automaton(low: int, width: int, left: bool, right: bool, scale: int) -> None:
    schema: dict[str, object] = {"type": "number"}
    schema["exclusiveMinimum" if left else "minimum"] = low / scale
    schema["exclusiveMaximum" if right else "maximum"] = (low + width) / scale
    near = [low - 1, low, low + 1, low + width - 1, low + width, low + width + 1, low + width // 2]
    same(schema, *(value / scale for value in near), *(value / scale + 0.01 for value in near))
    same({**schema, "type": "integer"}, *(value // scale for value in near))


@pytest.mark.parametrize("step", [0.25, 0.5, 1.5, 2.5, 0.2, 0.025, 0.01, 7, 0.3])
def test_multiples_in_the_automaton(step: float) -> None:
    exact = fraction(step)
    on = [float(exact * k) for k in (-7, -1, 0, 1, 2, 3, 4, 10, 33)]
    assert same({"type": "number", "multipleOf": step}, *on, *(value + step / 2 for value in on))


def test_a_refused_bound_can_be_left_out() -> None:
    out = made({"type": "integer", "maximum": 10**40, "minimum": 0}, lenient=True)
    assert out.schema == {"type": "integer", "minimum": 0}
    assert out.approximations[0].startswith("maximum at /: 1000")


EDGES = (0, 1, 9, 10, 2**53, 2**63 - 1, 2**63, 2**64, 10**19, 12345678901234567890, 10**30)
EDGE = st.builds(lambda edge, sign, off: sign * edge + off, st.sampled_from(EDGES), st.sampled_from((1, -1)),
                 st.integers(-2, 2))  # fmt: skip


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.one_of(st.none(), EDGE), st.one_of(st.none(), EDGE), st.lists(EDGE, min_size=4, max_size=8))
def test_bounds_of_any_size(low: int | None, high: int | None, values: list[int]) -> None:
    bounds = {"minimum": low, "maximum": high}
    schema = {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
    near = [bound + off for bound in (low, high) if bound is not None for off in (-1, 0, 1)]
    if low is None or high is None or low <= high:
        assert same(schema, *values, *near)


@pytest.mark.parametrize("schema", [
    {"type": "number", "minimum": -(2**63), "maximum": 18446744073709551615},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 2**64},
    {"type": "number", "not": {"type": "integer"}},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 3, "not": {"type": "integer"}},
    {"not": {"type": "integer"}},
    {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 3}]},
])  # fmt: skip
def test_numbers_in_digits(schema: dict[str, object]) -> None:
    values = (0, 1, -1, -2, 3, 0.5, -0.5, -1.5, -2.5, 2.75, 3.5, 12, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64)
    assert same(schema, *values, "x", None)


def test_cells_are_data() -> None:
    assert dataclasses.replace(Number(), low=F(1)) == Number(F(1))
