"""One option as data: its help text, its allowed values, and how the command line spells it."""

from __future__ import annotations

import msgspec


class Option(msgspec.Struct, frozen=True):
    """A field's help text and its allowed values."""

    help: str
    low: int | float | None = None
    high: int | float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    several: bool = False  # given repeatedly, with commas, or as a list in a file; `words` splits the text
    greedy: bool = False  # of those: one flag takes every word up to the next option
    blank: str = ""  # what an empty value would mean, where it is refused because a variable was probably not set
    secret: bool = False  # may come from the environment; is never printed and never in a child's argv


class Field(msgspec.Struct, frozen=True):
    """One option as the command line sees it."""

    section: str
    name: str
    type: type
    default: object
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the environment variable that may hold a secret option."""
        return "PENSTOCK_" + self.name.upper()

    @property
    def allowed(self) -> str:
        """Bounds or choices in words; empty where any value will do."""
        if self.option.choices:
            return "one of " + ", ".join(self.option.choices)
        if self.option.low is None or self.option.high is None:
            return ""
        return f"between {number(self.option.low)} and {number(self.option.high)}"


def words(text: str) -> tuple[str, ...]:
    """The values of an option that takes several."""
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def number(value: int | float) -> str:
    """A bound in full digits: 9223372036854775807 and 0.05, never 9.2e+18."""
    return str(int(value)) if value == int(value) else f"{value:g}"
