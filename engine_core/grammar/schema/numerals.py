"""Regular expressions of decimal numerals between two integers of any size: llguidance counts in 64 bits."""

from __future__ import annotations

FRACTION = r"\.[0-9]+"
NO_FRACTION = r"(\.0+)?"
SOME_FRACTION = r"\.[0-9]*[1-9][0-9]*"  # one that is not zero


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
