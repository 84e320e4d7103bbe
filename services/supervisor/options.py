"""The effective configuration: defaults, then the config file, then the environment, then the command line.

Made from the fields of `protocol/config.py`; an option is written there and nowhere else.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from penstock.protocol.config import Config, Field, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.validation import check, check_content, check_value

TITLES: Mapping[str, str] = {
    "model": "model (the same for every process)",
    "api": "api processes",
    "tokenizer": "tokenizer processes",
    "scheduler": "scheduler process",
    "executor": "executor processes",
    "links": "links between processes of several hosts (the same for every process)",
    "run": "running",
    "trace": "tracing (the same for every process)",
}
METAVARS: Mapping[type, str] = {str: "TEXT", int: "N", float: "X"}
COMMAND_LINE = "command line"
ARGUMENT_ERROR = re.compile(r"argument (-[^\s:/]+).*?: (.*)")  # argparse's message about one option
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
FEW_CORES, MANY_CORES = 4, 8


class Effective(msgspec.Struct, frozen=True):
    """A checked configuration and where each value that was given came from, by option name."""

    config: Config
    origins: dict[str, str]


class Given(msgspec.Struct, frozen=True):
    """One value before it is checked."""

    field: Field
    value: object
    origin: str


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError where it would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        found = ARGUMENT_ERROR.fullmatch(message)
        raise ConfigError(found[1], "", found[2]) if found else ConfigError(COMMAND_LINE, self.prog, message)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option, grouped by section. Options that were not typed are absent from the parsed namespace."""
    parser.add_argument("--config", metavar="FILE.toml", default="", help="file with options, in sections or flat")
    groups = {name: parser.add_argument_group(title) for name, title in TITLES.items()}
    for field in fields():
        flags = (field.flag, *field.option.aliases)
        group = groups[field.section]
        if field.type is bool:
            group.add_argument(
                *flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text(field)
            )
        else:
            metavar = field.option.metavar or ("WORD" if field.option.choices else METAVARS[field.type])
            action = "append" if field.option.several else "store"
            count = "+" if field.option.greedy else None
            group.add_argument(
                *flags, action=action, nargs=count, metavar=metavar, default=argparse.SUPPRESS, help=help_text(field)
            )


def help_text(field: Field) -> str:
    """An option's help: its meaning, allowed values and default."""
    default = field.default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = str(default) if default != "" else "empty"
    notes = [note for note in (f"default {shown}", field.allowed) if note]
    if field.option.secret:
        notes.append(f"or ${field.variable}")
    return f"{field.option.help} [{'; '.join(notes)}]".replace("%", "%%")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse all of `arguments`. Raises ConfigError; an unknown option comes with the closest known ones."""
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(COMMAND_LINE, flag, f"`{parser.prog}` takes no such argument")
        raise ConfigError(COMMAND_LINE, flag, "there is no such option" + did_you_mean(flag, known_flags()))
    return namespace


def known_flags() -> list[str]:
    known = ["--config", "--index", "--local-index", "--help"]
    for field in fields():
        known += [field.flag, *field.option.aliases]
        if field.type is bool:
            known.append("--no-" + field.flag[2:])
    return known


def did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def effective(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Effective:
    """The configuration that `namespace`, its config file and the environment make together.

    Raises ConfigError naming the option, its value, what is allowed and, when it was not typed, where it came from.
    """
    given: list[Given] = []
    if namespace.config:
        given += read_file(Path(namespace.config))
    given += [
        Given(field, environ[field.variable], f"environment {field.variable}")
        for field in fields()
        if field.option.secret and field.variable in environ
    ]
    typed = vars(namespace)
    given += [Given(field, typed[field.name], COMMAND_LINE) for field in fields() if field.name in typed]
    if typed.get("positional_model"):
        given.append(Given(model_field(), positional_model(typed), COMMAND_LINE))
    elif "positional_model" in typed and not any(one.field.name == "model" for one in given):
        check_swallowed(typed)
    return merge(given)


def check_swallowed(typed: Mapping[str, object]) -> None:
    """Raise ConfigError where the last of several words may be the model, which nothing else names."""
    for field in fields():
        taken = typed.get(field.name) if field.option.greedy else None
        assert isinstance(taken, list | None)
        for each in taken or ():
            if len(each) > 1:
                hint = f"is {each[-1]!r} the model? Name the model in front: MODEL {field.flag} {shlex.join(each)}"
                raise ConfigError(field.flag, " ".join(each), hint)


def model_field() -> Field:
    return next(field for field in fields() if field.name == "model")


def positional_model(typed: Mapping[str, object]) -> object:
    model = typed["positional_model"]
    if typed.get("model", model) != model:
        raise ConfigError("--model", typed["model"], f"the command line also names the model {model!r}")
    return model


def merge(given: Sequence[Given]) -> Effective:
    """Later values replace earlier ones of the same option; each is converted and checked by itself, then together."""
    sections: dict[str, dict[str, object]] = {}
    origins = {}
    for one in given:
        try:
            for part in one.value if isinstance(one.value, list) else [one.value]:
                check_content(one.field, part)
            value = converted(one.field, one.value, typed=not one.origin.startswith("file"))
            check_value(one.field, value)
        except ConfigError as error:
            shown = "***" if one.field.option.secret else error.value
            source = "" if one.origin == COMMAND_LINE else f" ({one.origin})"
            raise ConfigError(error.option, shown, error.allowed + source) from None
        sections.setdefault(one.field.section, {})[one.field.name] = value
        origins[one.field.name] = one.origin
    default = Config()
    changed = {name: msgspec.structs.replace(getattr(default, name), **values) for name, values in sections.items()}
    return Effective(check(msgspec.structs.replace(default, **changed)), origins)


def converted(field: Field, value: object, *, typed: bool) -> object:
    """`value` in the field's type: from text unless a file gave it, a whole number where a float is due, several
    texts as one."""
    if field.option.greedy and isinstance(value, list) and all(isinstance(each, list) for each in value):
        value = [word for each in value for word in each]
    if field.option.several and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    if field.type is float and type(value) is int:
        return float(value)
    if not typed or not isinstance(value, str) or field.type is str:
        return value
    try:
        return int(value) if field.type is int else float(value)
    except ValueError:
        return value


def read_file(path: Path) -> list[Given]:
    """The options of a TOML file, in sections named as in `Config`, or flat; `-` and `_` are the same in names."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError("--config", str(path), f"it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), f"it must be TOML: {error}") from error
    known = {field.name: field for field in fields()}
    given = []
    for key, value in tables.items():
        if key in TITLES and isinstance(value, dict):
            entries = {f"{key}.{name}": (name, entry) for name, entry in value.items()}
        else:
            entries = {key: (key, value)}
        for shown, (name, entry) in entries.items():
            field = known.get(name.replace("-", "_"))
            if field is None or (shown != name and field.section != key):
                raise ConfigError("--config", shown, unknown_key(path, name, key, known))
            given.append(Given(field, entry, f"file {path}"))
    return given


def unknown_key(path: Path, name: str, section: str, known: Mapping[str, Field]) -> str:
    field = known.get(name.replace("-", "_"))
    if field is not None:
        return f"in {path} that option belongs into section {field.section!r}, not {section!r}"
    return f"{path} names an option that does not exist{did_you_mean(name, [*known, *TITLES])}"


def as_toml(effective: Effective) -> str:
    """The configuration as a file for --config, with the origin of each given value; secrets are only mentioned."""
    lines = []
    section = ""
    for field in fields():
        if field.section != section:
            section = field.section
            lines += ["", f"[{section}]"]
        value = getattr(getattr(effective.config, section), field.name)
        origin = effective.origins.get(field.name)
        if field.option.secret:
            lines.append(f"# {field.name} is {'set and not shown' if value else 'not set'}")
        elif field.option.blank and not value:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {toml_value(value)}")
        if origin is not None:
            lines[-1] += f"  # {origin}"
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: object) -> str:
    """A TOML literal: that of JSON with characters unescaped, except DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def arguments(config: Config) -> list[str]:
    """The command line that gives a process this configuration; secrets are left to `environment`."""
    words = []
    for field in fields():
        value = getattr(getattr(config, field.section), field.name)
        if value == field.default or field.option.secret:
            continue
        if field.type is bool:
            words.append(field.flag if value else "--no-" + field.flag[2:])
        else:
            words.append(f"{field.flag}={value}")
    return words


def environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """A child's environment: the inherited one, with the secret options of `config` alone."""
    secret = {
        field.variable: str(getattr(getattr(config, field.section), field.name))
        for field in fields()
        if field.option.secret
    }
    kept = {name: value for name, value in inherited.items() if name not in secret}
    return kept | {name: value for name, value in secret.items() if value}


def sized(config: Config, cores: int) -> Config:
    """`config` with every number of processes that is 0 replaced by one that suits `cores`.

    An api process writes about 60,000 tokens a second and a tokenizer makes about 130,000, so one of each would do for
    most models. Several share the work of a step, so that its tokens are out sooner. With few cores, the scheduler and
    the executors get theirs first.
    """
    sharing = 1 if config.api.uds else MANY_CORES  # processes that can listen at one address
    apis = config.api.api_processes or min(sharing, 1 if cores < FEW_CORES else 2 if cores < MANY_CORES else 4)
    tokenizers = config.tokenizer.tokenizer_processes or (1 if cores < MANY_CORES else 2)
    return msgspec.structs.replace(
        config,
        api=msgspec.structs.replace(config.api, api_processes=apis),
        tokenizer=msgspec.structs.replace(config.tokenizer, tokenizer_processes=tokenizers),
    )


def usable_cores(quota: Path = CPU_MAX) -> int:
    """Cores that this process may use, by its affinity and the quota of its control group (cgroups v2, cpu.max)."""
    cores = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if most == "max" else max(1, min(cores, int(most) // int(period)))
