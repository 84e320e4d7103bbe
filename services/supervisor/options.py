"""The effective configuration: defaults, then the config file, then the environment, then the command line.

Made from the fields of `protocol/config.py` and `engine_config.py`; an option is written there and nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.protocol.config import Config, adjusted, fields
from penstock.protocol.errors import ConfigError
from penstock.protocol.option import Field
from penstock.protocol.served_models import PAIR, engines, read_models, several
from penstock.protocol.validation import check, check_content, check_value
from penstock.services.supervisor.foreign_flags import COMMAND_LINE, did_you_mean, meant_value, opposite, translate

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
ALL_OPTIONS = "all"  # --help=all
EMPTY = "empty"  # a default that is no text
MOST_CHOICES = 12  # that the page of often used options lists
OFTEN = "common options"
ARGUMENT_ERROR = re.compile(r"argument (-[^\s:/]+).*?: (.*)")  # argparse's messages: about one option,
NEEDED = re.compile(r"the following arguments are required: (.*)")  # one that is missing,
WRONG_VALUE = re.compile(r"invalid (\w+) value: '(.*)'")  # a value's type,
WRONG_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")  # a word,
UNWANTED = re.compile(r"ignored explicit argument '(.*)'")  # a value of a flag that has none
MAGNITUDE = re.compile(r"(\d+(?:\.\d+)?)([kmgt])", re.IGNORECASE)  # 8k is 8000, 8K is 8192, as in vLLM
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
    """argparse that raises ConfigError where it would print its usage and exit, and that knows which options of
    protocol/config.py it has.

    `foreign`: it takes flags of other servers, too.
    """

    def __init__(self, *, foreign: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.foreign = foreign

    def flags(self) -> dict[str, Field | None]:
        """Every flag, with its option where that is one of protocol/config.py."""
        by_flag = {flag: field for field in fields() for flag in (field.flag, *field.option.aliases)}
        return {flag: by_flag.get(flag) for flag in self._option_string_actions}

    def error(self, message: str) -> NoReturn:
        if needed := NEEDED.fullmatch(message):
            raise ConfigError(COMMAND_LINE, None, f"{needed[1]} {'are' if ', ' in needed[1] else 'is'} missing")
        found = ARGUMENT_ERROR.fullmatch(message)
        if not found:
            raise ConfigError(COMMAND_LINE, None, message)
        if wrong := WRONG_VALUE.fullmatch(found[2]):
            kind = {"int": "a whole number", "float": "a number", "loads": "JSON"}.get(wrong[1], f"a {wrong[1]}")
            raise ConfigError(found[1], wrong[2], f"it must be {kind}")
        if wrong := WRONG_CHOICE.fullmatch(found[2]):
            raise ConfigError(found[1], wrong[1], "it must be one of " + wrong[2].replace("'", ""))
        if found[2].startswith("expected"):
            raise ConfigError(found[1], None, "a value must follow it")
        if wrong := UNWANTED.fullmatch(found[2]):
            raise ConfigError(found[1], wrong[1], f"it takes no value; its opposite is --no-{found[1][2:]}")
        raise ConfigError(found[1], None, found[2])


def add_options(
    parser: argparse.ArgumentParser,
    chosen: Sequence[Field] | None = None,
    wanted: str = ALL_OPTIONS,
    common: Container[str] = (),
) -> None:
    """Add the chosen options, or all, grouped by section. Options that were not typed are absent from the parsed
    namespace.

    `wanted` is what help shows: ALL_OPTIONS, those whose names are `common` where it is empty, else those about that
    word.
    """
    whole = wanted == ALL_OPTIONS
    chosen = fields() if chosen is None else chosen
    parser.set_defaults(config="")
    groups: dict[str, argparse._ArgumentGroup] = {}
    if chosen:
        title = "options" if whole else OFTEN if not wanted else f"options about {wanted}"
        groups[title] = parser.add_argument_group(title)
        text = shown("file with options, in sections or flat", whole or wanted in ("", "config"))
        groups[title].add_argument("--config", metavar="FILE.toml", help=text)
    for field in chosen:
        option = field.option
        if wanted in ("", ALL_OPTIONS):
            visible = whole or field.name in common
        else:
            visible = wanted.lower() in f"{field.flag} {option.help}".lower()
        title = TITLES[field.section] if whole else title
        group = groups[title] if title in groups else groups.setdefault(title, parser.add_argument_group(title))
        flags = (field.flag, *option.aliases)
        text = shown(help_text(field, brief=not wanted), visible)
        if field.type is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            metavar = option.metavar or ("WORD" if option.choices else METAVARS[field.type])
            action = "append" if option.several or field.name == "model" else "store"
            count = "+" if option.greedy else None
            group.add_argument(
                *flags, action=action, nargs=count, metavar=metavar, default=argparse.SUPPRESS, help=text
            )


def shown(text: str, visible: bool) -> str:
    return text if visible else argparse.SUPPRESS


def default_text(field: Field) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return EMPTY if field.default == "" else str(field.default)


def help_text(field: Field, *, brief: bool = False) -> str:
    """An option's help: its meaning, default, allowed values; `brief`: the first of these with a few choices alone."""
    value = default_text(field)
    if not brief:
        text, notes = field.option.help, [f"default {value}", field.allowed]
    else:
        text, *clauses = field.option.help.split("; ")
        told = [one.partition(": ")[2] for one in clauses if one.startswith(f"{value}: ")]
        default = told[0] if told else "" if value == EMPTY else value
        listed = field.allowed if field.option.choices else ""
        if len(field.option.choices) > MOST_CHOICES:
            listed = f"--help={field.name.replace('_', '-')} lists {len(field.option.choices)}"
        notes = [default and f"default: {default}", listed]
    if field.option.secret:
        notes.append(f"or ${field.variable}")
    notes = [note for note in notes if note]
    return (text + (f" [{'; '.join(notes)}]" if notes else "")).replace("%", "%%")


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse all of `arguments`. `without_effect` of the result has the flags of other servers that were left out.

    Raises ConfigError: one for all flags that the command does not have, with what they may have meant.
    """
    own = parser.flags()
    elsewhere = {
        flag: f"`{parser.prog}` does not use it; it is an option of `penstock serve`"
        for field in fields()
        for flag in (field.flag, *field.option.aliases, *([opposite(field.flag)] if field.type is bool else []))
        if flag not in own
    }
    line = translate(arguments, own, elsewhere, foreign=parser.foreign)
    namespace, unknown = parser.parse_known_args(line.words)
    if unknown:
        raise ConfigError(COMMAND_LINE, unknown[0], f"`{parser.prog}` takes no such argument")
    namespace.without_effect = line.without_effect
    return namespace


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
    given += [
        Given(field, typed[field.name], COMMAND_LINE)
        for field in fields()
        if field.name in typed and field.name != "model"
    ]
    typed_models = models_of(typed)
    given += named_models(typed_models, given)
    if not typed_models and "positional_model" in typed and not any(one.field.name == "model" for one in given):
        check_swallowed(typed)
    return only_model(merge(given))


def models_of(typed: Mapping[str, object]) -> list[str]:
    """The models of the command line, each as it was typed."""
    positional, named = typed.get("positional_model") or [], typed.get("model") or []
    found = [positional] if isinstance(positional, str) else positional
    assert isinstance(found, list)
    assert isinstance(named, list)
    if found and named and found != named:
        raise ConfigError("--model", named[0], f"the command line also names the model {found[0]!r}")
    return found or named


def named_models(typed: Sequence[str], given: Sequence[Given]) -> list[Given]:
    """Models of the command line as options: one by its path alone, or several by names, which go before a file's."""
    by_name = {field.name: field for field in fields()}
    pairs = [None if Path(text).exists() else PAIR.fullmatch(text) for text in typed]
    if len(typed) <= 1 and not any(pairs):
        return [Given(by_name["model"], text, COMMAND_LINE) for text in typed]
    models: dict[str, dict[str, object]] = {}
    for one in given:
        if one.field.name == "models" and isinstance(one.value, str):
            models = {name: dict(options) for name, options in read_models(one.value).items()}
    seen = set()
    for text, pair in zip(typed, pairs, strict=True):
        folder = Path(text).exists() or text.startswith(("/", ".", "~"))
        name, path = (pair[1], pair[2]) if pair else (Path(text).name if folder else text, text)
        if name in seen:
            raise ConfigError("--model", text, f"two models are called {name!r}: give names, as --model NAME=PATH")
        seen.add(name)
        models.setdefault(name, {})["model"] = path
    return [Given(by_name["models"], msgspec.json.encode(models).decode(), COMMAND_LINE)]


def only_model(found: Effective) -> Effective:
    """One model that has a name is served as any other one, by that name."""
    if len(read_models(found.config.run.models)) != 1:
        return found
    (config,) = engines(found.config)
    config = msgspec.structs.replace(config, run=found.config.run)  # with its directory
    return msgspec.structs.replace(found, config=adjusted(config, models="", for_model=""))


def check_swallowed(typed: Mapping[str, object]) -> None:
    """Raise ConfigError where the last of several words may be the model, which nothing else names."""
    for field in fields():
        taken = typed.get(field.name) if field.option.greedy else None
        assert isinstance(taken, list | None)
        for each in taken or ():
            if len(each) > 1:
                hint = f"is {each[-1]!r} the model? Name the model in front: MODEL {field.flag} {shlex.join(each)}"
                raise ConfigError(field.flag, " ".join(each), hint)


def merge(given: Sequence[Given]) -> Effective:
    """Later values replace earlier ones of the same option; each is converted and checked by itself, then together."""
    values: dict[str, object] = {}
    for one in given:
        try:
            for part in one.value if isinstance(one.value, list) else [one.value]:
                check_content(one.field, part)
            value = converted(one.field, one.value, typed=not one.origin.startswith("file"))
            value = allowed_value(one.field, value)
        except ConfigError as error:
            shown = "***" if one.field.option.secret else error.value
            source = "" if one.origin == COMMAND_LINE else f" ({one.origin})"
            raise ConfigError(error.option, shown, error.allowed + source) from None
        values[one.field.name] = value
    return Effective(check(adjusted(Config(), **values)), {one.field.name: one.origin for one in given})


def allowed_value(field: Field, value: object) -> object:
    """The value, or the one that it is another server's spelling of. Raises ConfigError unless it is allowed."""
    try:
        check_value(field, value)
    except ConfigError:
        meant = meant_value(field.flag, str(value))
        if not meant:
            raise
        return converted(field, meant, typed=True)
    return value


def converted(field: Field, value: object, *, typed: bool) -> object:
    """`value` in the field's type: from text unless a file gave it, a whole number where a float is due, several
    texts as one."""
    if field.option.greedy and isinstance(value, list) and all(isinstance(each, list) for each in value):
        value = [word for each in value for word in each]
    if field.option.several and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(each for text in value for each in json_list(text))
    if field.type is float and type(value) is int:
        return float(value)
    if not typed or not isinstance(value, str):
        return value
    try:
        return value if field.type is str else whole_number(value) if field.type is int else float(value)
    except ValueError:
        return value


def json_list(text: str) -> list[str]:
    """The texts of a JSON list, which is how vLLM takes several; else the text itself."""
    if text.startswith("["):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=list[str])
    return [text]


def whole_number(text: str) -> int:
    """8192, 8k or 8K. Raises ValueError."""
    found = MAGNITUDE.fullmatch(text)
    if not found:
        return int(text)
    power = "kmgt".index(found[2].lower()) + 1
    return int(float(found[1]) * (1000 if found[2].islower() else 1024) ** power)


def read_file(path: Path) -> list[Given]:
    """The options of a TOML file, in sections named as in `Config`, or flat; `-` and `_` are the same in names."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError("--config", str(path), f"it cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        why = f"it must be TOML, as `penstock config` prints it: {error}"
        raise ConfigError("--config", str(path), why) from error
    known = {field.name: field for field in fields()}
    given = []
    for key, value in tables.items():
        if key == "models" and isinstance(value, dict):
            given.append(Given(known[key], msgspec.json.encode(value).decode(), f"file {path}"))
            continue
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
        if field.name == "models" and value:
            continue  # below, a table each
        if field.option.secret:
            lines.append(f"# {field.name} is {'set and not shown' if value else 'not set'}")
        elif field.option.blank and not value:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(f"{field.name} = {toml_value(value)}")
        if origin is not None:
            lines[-1] += f"  # {origin}"
    for name, overrides in read_models(effective.config.run.models).items():
        lines += ["", f"[models.{toml_value(name)}]"]
        lines += [f"{option} = {toml_value(value)}" for option, value in overrides.items()]
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
        elif field.option.greedy:  # which may be long, and Linux takes 128 KiB in one word
            words += [f"{field.flag}={part}" for part in value.split(",")]
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
    tokenizers = config.tokenizer.tokenizer_processes or (1 if cores < MANY_CORES or several(config) else 2)
    return adjusted(config, api_processes=apis, tokenizer_processes=tokenizers)


def usable_cores(quota: Path = CPU_MAX) -> int:
    """Cores that this process may use, by its affinity and the quota of its control group (cgroups v2, cpu.max)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux has it
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if most == "max" else max(1, min(cores, int(most) // int(period)))
