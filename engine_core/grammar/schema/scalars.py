"""Cells of scalars: null, booleans, numbers and strings; their conjunctions, their complements, and whether any value
is left.

Numbers are exact fractions. Three of the string formats are patterns of ours, since llguidance takes 29 February of any
year and a leap second at any time; it holds the others itself. Sources: RFC 3339, section 5.6 and appendix C (years
divisible by 4, of the centuries those divisible by 400). Two things are left out that RFC 3339 allows and readers of
JSON refuse: the year 0000, and a leap second in an offset other than zero."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

from penstock.engine_core.grammar import automata
from penstock.engine_core.grammar.patterns import Node, PatternError

T = TypeVar("T")

DAY = r"(0[1-9]|1\d|2[0-8])"  # of every month
MONTHS = rf"((0[1-9]|1[0-2])-{DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
DATE = rf"({YEAR}-{MONTHS}|{LEAP_YEAR}-02-29)"
HOUR = r"([01]\d|2[0-3])"
TIME = rf"({HOUR}:[0-5]\d:[0-5]\d(\.\d+)?([zZ]|[+-]{HOUR}:[0-5]\d)|23:59:60(\.\d+)?([zZ]|[+-]00:00))"
FORMAT_PATTERNS: Mapping[str, str] = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[tT]{TIME}$"}
NATIVE_FORMATS = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))  # held by llguidance
FORMATS = frozenset((*NATIVE_FORMATS, *FORMAT_PATTERNS))  # any other is an annotation
# of these no two have a string in common
DISJOINT_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "ipv4", "ipv6", "uuid"))


def merged(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    """Both in order, without repetition."""
    return a if a == b or not b else tuple(dict.fromkeys(a + b))


def lower(a: int | None, b: int | None) -> int | None:
    """The stricter of two upper limits, None for none."""
    return b if a is None else a if b is None else min(a, b)


@dataclasses.dataclass(frozen=True, slots=True)
class Null:
    """null"""

    def complement(self) -> list[Null]:
        return []


@dataclasses.dataclass(frozen=True, slots=True)
class Boolean:
    """One of the two booleans, or both."""

    values: tuple[bool, ...] = (True, False)

    def meet(self, other: Boolean) -> Boolean | None:
        values = tuple(v for v in self.values if v in other.values)
        return Boolean(values) if values else None

    def complement(self) -> list[Boolean]:
        return [Boolean((not self.values[0],))] if len(self.values) == 1 else []


def fraction(value: int | float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Numbers between two bounds. `whole` is None where integers and fractions are both allowed."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    whole: bool | None = None
    multiples: tuple[Fraction, ...] = ()
    not_multiples: tuple[Fraction, ...] = ()

    def meet(self, other: Number) -> Number | None:
        """Numbers of both; None where there are none."""
        low, low_open = self.low, self.low_open
        if other.low is not None and (low is None or (other.low, other.low_open) > (low, low_open)):
            low, low_open = other.low, other.low_open
        high, high_open = self.high, self.high_open
        if other.high is not None and (high is None or (other.high, not other.high_open) < (high, not high_open)):
            high, high_open = other.high, other.high_open
        if self.whole is not None and other.whole is not None and self.whole != other.whole:
            return None
        whole = other.whole if self.whole is None else self.whole
        multiples = merged(self.multiples, other.multiples)
        excluded = merged(self.not_multiples, other.not_multiples)
        cell = Number(low, low_open, high, high_open, whole, multiples, excluded)
        return None if cell.empty() else cell

    def step(self) -> Fraction | None:
        """The distance between neighbours where the cell is a grid through 0."""
        steps = [*self.multiples, *([Fraction(1)] if self.whole else [])]
        if not steps:
            return None
        numerator = math.lcm(*(s.numerator for s in steps))
        return Fraction(numerator, math.gcd(*(s.denominator for s in steps)))

    def snapped(self) -> Number:
        """With bounds moved inward to the grid, where there is one."""
        grid = self.step()
        if grid is None:
            return self
        low, high = self.low, self.high
        if low is not None:
            k = math.ceil(low / grid)
            low = grid * (k + 1 if self.low_open and grid * k == low else k)
        if high is not None:
            k = math.floor(high / grid)
            high = grid * (k - 1 if self.high_open and grid * k == high else k)
        return dataclasses.replace(self, low=low, low_open=False, high=high, high_open=False)

    def empty(self) -> bool:
        """Whether no number is left. False where that is not certain."""
        grid = self.step()
        if grid is not None:
            if self.whole is False and grid.denominator == 1:
                return True
            if any((grid / m).denominator == 1 for m in self.not_multiples):
                return True
        tight = self.snapped()
        if tight.low is None or tight.high is None:
            return False
        if tight.low > tight.high or (tight.low == tight.high and (tight.low_open or tight.high_open)):
            return True
        barred = self.not_multiples + ((Fraction(1),) if self.whole is False else ())
        return tight.low == tight.high and any((tight.low / m).denominator == 1 for m in barred)

    def complement(self) -> list[Number]:
        """Cells of all other numbers."""
        out = []
        if self.low is not None:
            out.append(Number(high=self.low, high_open=not self.low_open))
        if self.high is not None:
            out.append(Number(low=self.high, low_open=not self.high_open))
        if self.whole is not None:
            out.append(Number(whole=not self.whole))
        out.extend(Number(not_multiples=(m,)) for m in self.multiples)
        out.extend(Number(multiples=(m,)) for m in self.not_multiples)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class String:
    """Strings. `among` lists the only values allowed, `excluded` those that are not; lengths are in characters."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[Node, ...] = ()
    not_patterns: tuple[Node, ...] = ()
    formats: tuple[str, ...] = ()
    not_formats: tuple[str, ...] = ()
    among: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()

    def meet(self, other: String) -> String | None:
        """Strings of both; None where there are certainly none."""
        among = other.among if self.among is None else self.among
        if self.among is not None and other.among is not None:
            allowed = set(other.among)
            among = tuple(text for text in self.among if text in allowed)
        cell = String(
            max(self.min_length, other.min_length),
            lower(self.max_length, other.max_length),
            merged(self.patterns, other.patterns),
            merged(self.not_patterns, other.not_patterns),
            merged(self.formats, other.formats),
            merged(self.not_formats, other.not_formats),
            among,
            merged(self.excluded, other.excluded),
        ).narrowed()
        return None if cell.empty() else cell

    def narrowed(self) -> String:
        """A cell with a list of values keeps those that obey everything else; what cannot be decided stays."""
        if self.among is None:
            return self
        banned = set(self.excluded)
        kept = [text for text in self.among if self.allows_length(len(text)) and text not in banned]
        patterns: list[Node] = []
        not_patterns: list[Node] = []
        for nodes, wanted, unknown in ((self.patterns, True, patterns), (self.not_patterns, False, not_patterns)):
            for node in nodes:
                try:
                    kept = [text for text in kept if automata.matches(node, text) is wanted]
                except PatternError:
                    unknown.append(node)
        return String(
            patterns=tuple(patterns),
            not_patterns=tuple(not_patterns),
            formats=self.formats,
            not_formats=self.not_formats,
            among=tuple(kept),
        )

    def allows_length(self, length: int) -> bool:
        return length >= self.min_length and (self.max_length is None or length <= self.max_length)

    def empty(self) -> bool:
        """Whether no string is left. False where that is not certain."""
        if self.among is not None and not self.among:
            return True
        if self.max_length is not None and self.min_length > self.max_length:
            return True
        if len(DISJOINT_FORMATS.intersection(self.formats)) > 1 or set(self.formats) & set(self.not_formats):
            return True
        if set(self.patterns) & set(self.not_patterns):
            return True
        if len(self.patterns) + len(self.not_patterns) > 1 or (self.patterns and self.max_length == 0):
            try:
                return automata.empty(automata.combined(self.patterns, self.not_patterns))
            except PatternError:
                return False
        return self.max_length == 0 and "" in self.excluded

    def complement(self) -> list[String]:
        """Cells of all other strings."""
        out = []
        if self.min_length > 0:
            out.append(String(max_length=self.min_length - 1))
        if self.max_length is not None:
            out.append(String(min_length=self.max_length + 1))
        if self.among is not None:
            out.append(String(excluded=self.among))
        if self.excluded:
            out.append(String(among=self.excluded))
        out.extend(String(not_patterns=(node,)) for node in self.patterns)
        out.extend(String(patterns=(node,)) for node in self.not_patterns)
        out.extend(String(not_formats=(name,)) for name in self.formats)
        out.extend(String(formats=(name,)) for name in self.not_formats)
        return out
