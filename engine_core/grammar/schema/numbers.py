"""Cells of numbers: exact arithmetic on bounds and multiples, and what of it llguidance holds exactly.

Bounds reach llguidance as 64-bit floats and become digits of 64-bit integers. An integer bound that does not survive
that is written all the same, for `writing_lark` to turn into digits, and `holds` tells it; others are refused. Beyond
the largest double a bound says nothing about a JSON number that anybody can read, and is dropped."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from fractions import Fraction

from penstock.engine_core.grammar.schema.cells import Number

LARGEST = 17976931348623157 * 10**292  # finite double, as people write it
MAX_BOUND = 10**40  # of a number that is written in digits: 128 bits have 39
NATIVE = 2**63  # first integer that an int64 cannot hold
MAX_COEFFICIENT = 20_000  # digits of a multipleOf, as an integer: llguidance makes a state of each remainder


def fraction(value: int | float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def intersect(a: Number, b: Number) -> Number | None:
    """Numbers of both; None where there are none."""
    low, low_open = a.low, a.low_open
    if b.low is not None and (low is None or (b.low, b.low_open) > (low, low_open)):
        low, low_open = b.low, b.low_open
    high, high_open = a.high, a.high_open
    if b.high is not None and (high is None or (b.high, not b.high_open) < (high, not high_open)):
        high, high_open = b.high, b.high_open
    if a.whole is not None and b.whole is not None and a.whole != b.whole:
        return None
    multiples = tuple(dict.fromkeys(a.multiples + b.multiples))
    excluded = tuple(dict.fromkeys(a.not_multiples + b.not_multiples))
    cell = Number(low, low_open, high, high_open, b.whole if a.whole is None else a.whole, multiples, excluded)
    return None if empty(cell) else cell


def step(cell: Number) -> Fraction | None:
    """The distance between neighbours where the cell is a grid through 0."""
    steps = [*cell.multiples, *([Fraction(1)] if cell.whole else [])]
    if not steps:
        return None
    numerator = math.lcm(*(s.numerator for s in steps))
    return Fraction(numerator, math.gcd(*(s.denominator for s in steps)))


def snapped(cell: Number) -> Number:
    """With bounds moved inward to the grid, where there is one."""
    grid = step(cell)
    if grid is None:
        return cell
    low, high = cell.low, cell.high
    if low is not None:
        k = math.ceil(low / grid)
        low = grid * (k + 1 if cell.low_open and grid * k == low else k)
    if high is not None:
        k = math.floor(high / grid)
        high = grid * (k - 1 if cell.high_open and grid * k == high else k)
    return dataclasses.replace(cell, low=low, low_open=False, high=high, high_open=False)


def empty(cell: Number) -> bool:
    """Whether no number is left. False where that is not seen."""
    grid = step(cell)
    if grid is not None:
        if cell.whole is False and grid.denominator == 1:
            return True
        if any((grid / m).denominator == 1 for m in cell.not_multiples):
            return True
    if cell.low is None or cell.high is None:
        return False
    tight = snapped(cell)
    assert tight.low is not None, "the grid moves bounds and drops none"
    assert tight.high is not None, "the grid moves bounds and drops none"
    if tight.low > tight.high or (tight.low == tight.high and (tight.low_open or tight.high_open)):
        return True
    if tight.low == tight.high:
        value = tight.low
        barred = (Fraction(1),) if cell.whole is False else ()
        return any((value / m).denominator == 1 for m in cell.not_multiples + barred)
    return False


def complement(cell: Number) -> list[Number]:
    """Cells of all other numbers."""
    out = []
    if cell.low is not None:
        out.append(Number(high=cell.low, high_open=not cell.low_open))
    if cell.high is not None:
        out.append(Number(low=cell.high, low_open=not cell.high_open))
    if cell.whole is not None:
        out.append(Number(whole=not cell.whole))
    out.extend(Number(not_multiples=(m,)) for m in cell.multiples)
    out.extend(Number(multiples=(m,)) for m in cell.not_multiples)
    return out


def holds(kind: object, bound: object) -> bool:
    """Whether llguidance holds a bound of integers or numbers exactly."""
    if not isinstance(bound, int):
        return True
    return _native(Fraction(bound)) and (kind == "integer" or bound != NATIVE - 1)


def _native(value: Fraction) -> bool:
    return (abs(value) < NATIVE and Fraction(float(value)) == value) or value == NATIVE - 1


def _literal(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _same_decimal(value: Fraction) -> bool:
    """Whether llguidance's way of reading a multiple, tenfold until no fraction is left, finds the decimal written."""
    scaled, digits = float(value), 0
    while not scaled.is_integer():
        scaled *= 10.0
        digits += 1
        if digits > 30:
            return False
    return scaled <= MAX_COEFFICIENT and Fraction(int(scaled), 10**digits) == value


def write(cell: Number, *, plain: bool = False) -> tuple[dict[str, object], str]:
    """The schema that is held exactly, and what had to be left out of it: a keyword and a reason, or ''.

    If `plain`, it is one that llguidance takes as it is.
    """
    cell = snapped(cell)
    grid = step(cell)
    out: dict[str, object] = {"type": "integer" if grid is not None and grid.denominator == 1 else "number"}
    digits = not plain and _in_digits(cell)
    if cell.whole is False and digits:
        out["not"] = {"type": "integer"}
    elif cell.whole is False:
        return out, "not: fractions without the integers among them have no exact form"
    if cell.not_multiples:
        return out, "not: numbers that are no multiple have no exact form"
    trouble = ""
    if cell.low is not None and cell.low == cell.high and (grid is None or cell.low == 0) and _exact(cell.low):
        return {"const": _literal(cell.low)}, ""
    for bound, is_open, name in ((cell.low, cell.low_open, "inimum"), (cell.high, cell.high_open, "aximum")):
        if bound is None or (bound <= -LARGEST if name == "inimum" else bound >= LARGEST):
            continue
        side = "m" + name
        if not digits and (not _exact(bound) or (bound == NATIVE - 1 and out["type"] == "number")):
            trouble = f"{side}: {_shown(bound)} is more than 64-bit arithmetic holds exactly"
            continue
        out["exclusiveM" + name if is_open else side] = _literal(bound)
    if grid is None or grid == 1:
        return out, trouble
    if not _same_decimal(grid):
        return out, f"multipleOf: {_shown(grid)} has too many digits to be counted in states"
    options: list[object] = [{**out, "multipleOf": _literal(each)} for each in _spellings(grid)]
    return ({"anyOf": options} if len(options) > 1 else {**out, "multipleOf": _literal(grid)}), trouble


def _in_digits(cell: Number) -> bool:
    """Whether digits alone decide: the bounds are integers, and nothing is asked of multiples."""
    low = cell.low if cell.low is not None and cell.low > -LARGEST else Fraction(0)
    high = cell.high if cell.high is not None and cell.high < LARGEST else Fraction(0)
    digits = all(bound.denominator == 1 and abs(bound) < MAX_BOUND for bound in (low, high))
    return digits and step(cell) in (None, 1) and not cell.not_multiples


def _spellings(grid: Fraction) -> list[Fraction]:
    """Grids that together give each multiple in its shortest spelling.

    llguidance takes 0.50 for a multiple of 0.25, but 0.5 only for one of 0.5.
    """
    digits = 0
    while (grid * 10**digits).denominator != 1:
        digits += 1
    if grid * 10**digits == 1:
        return [grid]
    coarser = (step(Number(multiples=(grid, Fraction(1, 10**k)))) for k in range(digits, -1, -1))
    return list(dict.fromkeys(each for each in coarser if each is not None and _same_decimal(each)))


def _exact(value: Fraction) -> bool:
    if value.denominator == 1:
        return _native(value)
    return abs(value) < NATIVE and fraction(float(value)) == value


def _shown(value: Fraction) -> str:
    if abs(value) >= LARGEST:
        return "a number beyond the largest double"
    return str(value) if value.denominator == 1 else repr(float(value))
