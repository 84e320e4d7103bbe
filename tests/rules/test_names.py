"""Design 9, rule 1: names are nouns of the field. Rule 10: no sync/async twins."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from penstock.services.supervisor.logs import HEAD
from tests.rules.source import Source, none, parse, product

EMPTY_WORDS = frozenset((
    *("manager", "managers", "handler", "handlers", "helper", "helpers", "base", "mixin", "mixins", "impl"),
    *("util", "utils", "utility", "utilities"),
))  # fmt: skip


def words(name: str) -> list[str]:
    """`HTTPBaseError2` and `http_base_error` are http, base, error."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def empty_names(source: Source) -> Iterator[str]:
    for part in source.module.split("."):
        if EMPTY_WORDS.intersection(words(part)):
            yield f"{source.path}: module {part}"
    for node in source.classes():
        if EMPTY_WORDS.intersection(words(node.name)):
            yield f"{source.at(node)} class {node.name}"


def async_twins(source: Source) -> Iterator[str]:
    names = {node.name for node in source.functions()}
    for node in source.functions():
        plain = re.sub(r"^a(?:sync_)?|_async$", "", node.name)
        if plain != node.name and plain in names:
            yield f"{source.at(node)} {node.name} beside {plain}"


def hidden_fields(source: Source) -> Iterator[str]:
    """Fields of log lines that JSON would have to rename, because each line has one of that name."""
    for call in source.nodes:
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logs."):
            yield from (f"{source.at(call)} {each.arg}=" for each in call.keywords if each.arg in HEAD)


def test_no_field_of_a_log_line_has_the_name_of_another() -> None:
    none(found for source in product() for found in hidden_fields(source))


def test_a_hidden_field_is_found() -> None:
    assert len(list(hidden_fields(parse('logs.info(log, "died", pid=1, process="x")')))) == 1


def test_names_say_what_a_thing_is() -> None:
    none(found for source in product() for found in empty_names(source))


def test_there_are_no_async_twins() -> None:
    none(found for source in product() for found in async_twins(source))


@pytest.mark.parametrize("name", ["BlockManager", "HTTPHandler", "BaseModel", "SchedulerMixin", "CacheImpl", "Utils"])
def test_an_empty_class_name_is_found(name: str) -> None:
    assert len(list(empty_names(parse(f"class {name}: pass")))) == 1


@pytest.mark.parametrize("path", ["kernels/utils.py", "engine_core/kv/block_manager.py", "services/utils/x.py"])
def test_an_empty_module_name_is_found(path: str) -> None:
    assert len(list(empty_names(parse("", path)))) == 1


@pytest.mark.parametrize("name", ["Database", "Basement", "Pool", "Implementation"])
def test_words_are_whole_words(name: str) -> None:
    assert list(empty_names(parse(f"class {name}: pass"))) == []


def test_a_twin_is_found() -> None:
    assert len(list(async_twins(parse("def send(): ...\nasync def send_async(): ...\nasync def asend(): ...")))) == 2
