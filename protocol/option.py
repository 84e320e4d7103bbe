"""What is said about one option of protocol/config.py, and the validation of one value."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from penstock.protocol.errors import ConfigError

TYPE_WORDS: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Option(msgspec.Struct, frozen=True):
    """What the command line says about a field, and what values it may take."""

    help: str
    low: int | float | None = None
    high: int | float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    several: bool = False  # given repeatedly, with commas, or as a list in a file; `words` takes the text apart
    greedy: bool = False  # of those: one flag takes every word up to the next option
    blank: str = ""  # what leaving it empty means, where a value without content is refused: a variable was not set
    secret: bool = False  # may come from the environment, is never printed and never stands in a child's argv


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


def check_value(field: Field, value: object) -> None:
    """Raise ConfigError unless `value` has the field's type and stands within its bounds or choices."""
    option = field.option
    if field.type is float and type(value) is int:
        value = float(value)
    if type(value) is not field.type:
        raise ConfigError(field.flag, value, f"it must be {TYPE_WORDS[field.type]}")
    if value:
        check_content(field, value)
    if option.choices and value not in option.choices:
        raise ConfigError(field.flag, value, f"it must be {field.allowed}")
    if isinstance(value, int | float) and option.low is not None:
        assert option.high is not None
        if not (math.isfinite(value) and option.low <= value <= option.high):
            raise ConfigError(field.flag, value, f"it must be {field.allowed}")


def check_content(field: Field, value: object) -> None:
    """Raise ConfigError for a value without content where that would mean more than its absence seems to."""
    empty = isinstance(value, str) and not (words(value) if field.option.several else value.strip())
    if field.option.blank and empty:
        raise ConfigError(field.flag, value, f"{field.option.blank}; leave the option out if that is meant")


def number(value: int | float) -> str:
    """A bound in full digits: 9223372036854775807 and 0.05, never 9.2e+18."""
    return str(int(value)) if value == int(value) else f"{value:g}"
