"""The words that a field of a request may hold, for errors about another one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import inspect

STEP = re.compile(r"\.(\w+)|\[\]")
INDEX = re.compile(r"\[(?:\d+|\.\.\.)\]")


def words_at(kind: Any, place: str) -> tuple[str, ...]:
    """Of a field of `kind`, a type that msgspec decodes. `place` is its path in msgspec's errors: `.tools[3].type`."""
    return words_of(kind, INDEX.sub("[]", place))


@functools.lru_cache(maxsize=256)  # looking at a type takes as long as forty tokens, and anybody can ask for it
def words_of(kind: Any, place: str) -> tuple[str, ...]:
    """Of a field, whichever item of a list it is in."""
    types = list(plain([inspect.type_info(kind)]))
    for step in STEP.finditer(place):
        types = list(plain(found for each in types for found in below(each, step[1])))
    return tuple(
        dict.fromkeys(
            str(word) for each in types if isinstance(each, inspect.LiteralType) for word in each.values
        )
    )  # fmt: skip


def below(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """The types of a struct's field `name`; without a name those of a list's items or a dict's values."""
    match kind:
        case inspect.StructType(fields=fields) if name:
            yield from (field.type for field in fields if field.encode_name == name)
        case inspect.ListType(item_type=item) if not name:
            yield item
        case inspect.DictType(value_type=value) if not name:
            yield value


def plain(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The types without what stands around them: unions and descriptions."""
    for kind in kinds:
        match kind:
            case inspect.UnionType(types=types):
                yield from plain(types)
            case inspect.Metadata(type=inner):
                yield from plain([inner])
            case _:
                yield kind
