"""Numbers and strings as llguidance takes them, and decimal numerals between two integers as regular expressions.

Bounds reach llguidance as 64-bit floats and become digits of 64-bit integers. An integer bound that does not survive
that is written all the same, for `lark` to turn into digits; `holds` identifies it. Other such bounds are refused.
A bound beyond the largest double excludes no JSON number that readers can represent, and is dropped."""

from __future__ import annotations

from fractions import Fraction

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.patterns import PatternError, read, written
from penstock.engine_core.grammar.schema.scalars import FORMAT_PATTERNS, Number, String, fraction

LARGEST = 17976931348623157 * 10**292  # finite double, as people write it
MAX_BOUND = 10**40  # of a number that is written in digits: 128 bits have 39
NATIVE = 2**63  # first integer that an int64 cannot hold
MAX_COEFFICIENT = 20_000  # digits of a multipleOf, as an integer: llguidance makes a state of each remainder
MAX_EXCLUDED = 8192  # characters of all strings that one string may not be
FRACTION = r"\.[0-9]+"
NO_FRACTION = r"(\.0+)?"
SOME_FRACTION = r"\.[0-9]*[1-9][0-9]*"  # one that is not zero


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


def write_number(cell: Number, *, plain: bool = False) -> tuple[dict[str, object], str]:
    """The schema that is held exactly, and what had to be left out of it: a keyword and a reason, or ''.

    If `plain`, it is one that llguidance takes as it is.
    """
    cell = cell.snapped()
    grid = cell.step()
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
    return digits and cell.step() in (None, 1) and not cell.not_multiples


def _spellings(grid: Fraction) -> list[Fraction]:
    """Grids that together give each multiple in its shortest spelling.

    llguidance takes 0.50 for a multiple of 0.25, but 0.5 only for one of 0.5.
    """
    digits = 0
    while (grid * 10**digits).denominator != 1:
        digits += 1
    if grid * 10**digits == 1:
        return [grid]
    coarser = (Number(multiples=(grid, Fraction(1, 10**k))).step() for k in range(digits, -1, -1))
    return list(dict.fromkeys(each for each in coarser if each is not None and _same_decimal(each)))


def _exact(value: Fraction) -> bool:
    if value.denominator == 1:
        return _native(value)
    return abs(value) < NATIVE and fraction(float(value)) == value


def _shown(value: Fraction) -> str:
    if abs(value) >= LARGEST:
        return "a number beyond the largest double"
    return str(value) if value.denominator == 1 else repr(float(value))


def write_string(cell: String) -> tuple[dict[str, object], str]:
    """The schema that llguidance holds exactly, and what had to be left out of it: a keyword and a reason, or ''."""
    trouble = "not: a format has no complement" if cell.not_formats else ""
    out: dict[str, object] = {}
    if cell.among is not None:
        out["enum"] = list(cell.among)
    else:
        out["type"] = "string"
        if cell.min_length:
            out["minLength"] = cell.min_length
        if cell.max_length is not None:
            out["maxLength"] = cell.max_length
    patterns = []
    excluded = [text for text in cell.excluded if cell.allows_length(len(text))]
    if sum(map(len, excluded)) > MAX_EXCLUDED:
        return out, "not: too many strings are excluded"
    if excluded:
        patterns.append(automata.excluding(excluded))
    for node in cell.patterns:
        try:
            patterns.append(automata.spelled(node))
        except PatternError as error:
            trouble = f"pattern: {error}"
    for node in cell.not_patterns:
        try:
            patterns.append(written(automata.pattern(automata.combined((), (node,)))))
        except PatternError as error:
            trouble = f"not: the complement of a pattern: {error}"
    patterns.extend(written(read(FORMAT_PATTERNS[name])) for name in cell.formats if name in FORMAT_PATTERNS)
    conjuncts: list[dict[str, object]] = [{"type": "string", "pattern": text} for text in patterns]
    conjuncts.extend({"type": "string", "format": name} for name in cell.formats if name not in FORMAT_PATTERNS)
    if conjuncts:
        out.update({k: v for k, v in conjuncts[0].items() if k != "type"})
    if len(conjuncts) > 1:
        out["allOf"] = conjuncts[1:]
    return out, trouble


def naturals(low: int, high: int | None) -> list[str]:
    """Alternatives that match the numerals from `low` to `high` without leading zeros; none where there are none."""
    if high is not None and low > high:
        return []
    first = str(low)
    if high is None:
        longer = f"[1-9][0-9]{{{len(first)},}}"
        return [*_at_least(first), longer]
    last = str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    between = len(last) - len(first) - 1
    middle = [f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"] if between else []
    return [*_at_least(first), *middle, *_at_most(last, least="1")]


def _at_least(text: str) -> list[str]:
    """Numerals as long as this one, and no smaller."""
    greater = [_changed(text, at, chr(ord(digit) + 1), "9") for at, digit in enumerate(text) if digit < "9"]
    return [text, *greater]


def _at_most(text: str, least: str = "0") -> list[str]:
    """Numerals as long as this one, and no greater, whose first digit is `least` or more."""
    lows = [least, *"0" * (len(text) - 1)]
    smaller = [
        _changed(text, at, low, chr(ord(digit) - 1))
        for at, (low, digit) in enumerate(zip(lows, text, strict=True))
        if digit > low
    ]
    return [text, *smaller]


def _same_length(first: str, last: str) -> list[str]:
    at = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), None)
    if at is None:
        return [first]
    head = first[: at + 1]
    out = [head + rest for rest in _at_least(first[at + 1 :])] if first[at + 1 :] else [head]
    if ord(last[at]) - ord(first[at]) > 1:
        out.append(_changed(first, at, chr(ord(first[at]) + 1), chr(ord(last[at]) - 1)))
    head = last[: at + 1]
    return [*out, *([head + rest for rest in _at_most(last[at + 1 :])] if last[at + 1 :] else [head])]


def _changed(text: str, at: int, low: str, high: str) -> str:
    """The numeral as far as a place, a digit between two there, any digits behind."""
    rest = len(text) - at - 1
    return text[:at] + (low if low == high else f"[{low}-{high}]") + (f"[0-9]{{{rest}}}" if rest else "")


def numerals(
    kind: str, low: int | None, high: int | None, *, low_open: bool = False, high_open: bool = False
) -> str | None:
    """The pattern of numerals between two bounds, None for no bound: of a `kind` that is integer, number, or fraction
    (numbers that are no integers). None where there are none. Fractions have no exponent."""
    out: list[str] = []
    if high is None or high >= 0:
        out += _magnitudes(kind, max(low or 0, 0), high, low is not None and low >= 0 and low_open, high_open)
    if low is None or low < 0:
        most = None if low is None else -low
        sign_open = high is not None and high <= 0 and high_open
        least = max(-high, 0) if high is not None else 0
        if kind == "integer":
            least = max(least, 1)
        out += [f"-{one}" for one in _magnitudes(kind, least, most, sign_open, low_open)]
    return "|".join(out) or None


def _magnitudes(kind: str, low: int, high: int | None, low_open: bool, high_open: bool) -> list[str]:
    """Alternatives of unsigned numerals. Bounds are open for numbers alone."""
    if kind == "integer":
        return naturals(low, high)
    below = None if high is None else high - 1
    if kind == "fraction":
        return _with(naturals(low, below), SOME_FRACTION)
    out: list[str] = []
    if low_open:
        out += _with(naturals(low, low if below is None or below >= low else below), SOME_FRACTION)
        low += 1
    out += _with(naturals(low, below), f"({FRACTION})?")
    if high is not None and not high_open and high >= low:
        out.append(f"{high}{NO_FRACTION}")
    return out


def _with(alternatives: list[str], rest: str) -> list[str]:
    return [f"({'|'.join(alternatives)}){rest}"] if alternatives else []
