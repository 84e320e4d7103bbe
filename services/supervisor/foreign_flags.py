"""Flags of vLLM, SGLang and llama.cpp's server on Penstock's command line: taken under another name, accepted without
effect, or refused with the reason. The flags stand in foreign_flags.toml."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.protocol.errors import ConfigError
from penstock.protocol.option import Field

TABLE = Path(__file__).parent / "foreign_flags.toml"
COMMAND_LINE = "command line"
FLAG = re.compile(r"-(?![\d.])\S+")  # a negative number is a value
ATTACHED = re.compile(r"(-[A-Za-z])(\d.*)")  # -O3
NOISE = frozenset(("max", "min", "num", "no", "enable", "disable", "set", "use", "with"))  # parts of many flags


class ForeignFlag(msgspec.Struct, frozen=True):
    """One flag of another server."""

    follows: str = ""  # "=" one value, "=?" perhaps one, "=+" all up to the next flag
    option: str = ""  # Penstock's, which it is taken as
    value: str = ""  # of that option, which the flag means by itself
    why: str = ""  # it is refused, or has no effect
    refused: bool = False
    unless: str = ""  # pattern of values that are not refused

    def why_not(self, values: Sequence[str]) -> str:
        """The reason why it is refused with these values; empty if it is not."""
        if not self.refused or (self.unless and values and all(re.fullmatch(self.unless, one) for one in values)):
            return ""
        return self.why


class Translation(msgspec.Struct, frozen=True):
    """A command line without foreign flags, and those that were left out."""

    words: list[str]
    without_effect: list[str]


@functools.lru_cache(maxsize=1)  # a program's keywords are looked up one by one
def read_file() -> dict[str, Any]:
    """foreign_flags.toml as it stands."""
    return tomllib.loads(TABLE.read_text())


@functools.lru_cache(maxsize=1)
def read_table() -> Mapping[str, ForeignFlag]:
    """The flags of foreign_flags.toml by name."""
    file = read_file()
    found = {}
    for meant, flags in file["taken"].items():
        option, _, fixed = meant.partition("=")
        found.update({flag: ForeignFlag(option=option, value=fixed) for flag in flags.split()})
    for kind in ("ignored", "refused"):
        for group in file[kind]:
            for text in group["flags"].split():
                flag, equals, rest = text.partition("=")
                found[flag] = ForeignFlag(
                    equals + rest, why=group["why"], refused=kind == "refused", unless=group.get("unless", "")
                )
    return found


def translate(
    arguments: Sequence[str], own: Mapping[str, Field | None], elsewhere: Mapping[str, str], *, foreign: bool
) -> Translation:
    """The command line in Penstock's own options.

    `own` are the command's flags with their fields, `elsewhere` other commands' flags with the reason why this one has
    none of them; flags of other servers are taken where `foreign` says so. As in vLLM, `_` and `-` are the same in
    names. Raises one ConfigError for all flags that are refused or unknown.
    """
    words: list[str] = []
    without_effect: list[str] = []
    problems: dict[str, str] = {}
    table: Mapping[str, ForeignFlag] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            words += [word, *rest]
            break
        if not FLAG.fullmatch(word.partition("=")[0]):
            words.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        if name in own:
            words.append(name + equals + value)
            continue
        table = table or (read_table() if foreign else {})
        if not name.startswith("--") and name not in table and name[:2] in own:
            words.append(word)  # its value is attached
            continue
        if not equals and name not in table and (attached := ATTACHED.fullmatch(name)):
            name, equals, value = attached[1], "=", attached[2]
        found, negated = look_up(name, table)
        if found is None and " " in word:
            words.append(word)  # a text, not a flag
            continue
        if found is None:
            problems[typed] = elsewhere.get(name) or "there is no such option" + did_you_mean(name, list(own))
            continue
        field = own.get(found.option) if found.option else None
        if found.option and found.option not in own:
            problems[typed] = elsewhere[found.option]
            continue
        valued = field is not None and field.type is not bool and not found.value
        follows = found.follows if not found.option else "=" if valued else ""
        values = [value] if equals else [] if negated else list(taken_values(rest, follows))
        if found.value and negated:
            without_effect.append(typed)
        elif found.value:
            words += [found.option, found.value]
        elif found.option:
            words += [opposite(found.option) if negated else found.option, *values]
        elif not negated and (why := found.why_not(values)):
            problems[typed] = why
        else:
            without_effect.append(typed)
    if problems:
        raise refusal(problems)
    return Translation(words, without_effect)


def look_up(name: str, table: Mapping[str, ForeignFlag]) -> tuple[ForeignFlag | None, bool]:
    """The flag's entry, and whether it is the `--no-` form of it. A key of a JSON value may follow a dot."""
    if name in table:
        return table[name], False
    if name.startswith("--no-") and (found := table.get("--" + name[5:])) is not None and found.follows == "":
        return found, True
    head, dot, _ = name.partition(".")
    found = table.get(head) if dot else None
    return (None, False) if found is None else (msgspec.structs.replace(found, follows="="), False)


def taken_values(rest: list[str], follows: str) -> Iterator[str]:
    """Take the values that follow a flag from the front of `rest`."""
    while rest and follows and not FLAG.fullmatch(rest[0]):
        yield rest.pop(0)
        if follows != "=+":
            return


def opposite(option: str) -> str:
    """`--no-x` of `--x`, and the other way round."""
    return "--" + option[5:] if option.startswith("--no-") else "--no-" + option[2:]


def refusal(problems: Mapping[str, str]) -> ConfigError:
    """One error for every flag that is not taken, a line each."""
    if len(problems) == 1:
        flag, why = next(iter(problems.items()))
        return ConfigError(COMMAND_LINE, flag, why)
    lines = [f"\n  {flag}: {why}" for flag, why in problems.items()]
    return ConfigError(COMMAND_LINE, None, f"{len(problems)} flags are not allowed{''.join(lines)}")


def meant_value(option: str, text: str) -> str:
    """The value of `option` that `text` is another server's spelling of; empty if it is none."""
    spellings = read_file()["spellings"].get(option, {})
    return next((value for value, others in spellings.items() if text in others.split()), "")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`; did you mean …?` with those of the known flags, option names or commands that mean the same, and then those
    that are spelt nearly so; empty without any."""
    meanings = read_file()["meanings"]
    parts = (set(bare(word).split("-")) | {bare(word)}) - NOISE
    score = {}
    for one in known:
        meant = (meanings.get(one) or meanings.get(f"--{bare(one)}", "")).split()
        score[one] = 2 * len(parts & set(meant)) + len(parts & set(bare(one).split("-")))
    best = max(score.values(), default=0)
    same = [one for one in known if score[one] == best > 0]
    same.sort(key=lambda one: -difflib.SequenceMatcher(None, word, one).ratio())
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.85) + same[:2]
    chosen = dict.fromkeys(close or difflib.get_close_matches(word, known, n=3, cutoff=0.7))
    return f"; did you mean {' or '.join(chosen)}?" if chosen else ""


def bare(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
