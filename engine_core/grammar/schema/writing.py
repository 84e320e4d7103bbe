"""A schema rewritten: read, written in llguidance's keywords, and what it repeats put into `$defs`."""

from __future__ import annotations

import dataclasses
from collections import Counter

from penstock.engine_core.grammar.schema import writing_arrays, writing_objects
from penstock.engine_core.grammar.schema.algebra import MAX_TOGETHER, Algebra, CircularTerm, check_size
from penstock.engine_core.grammar.schema.cells import Place
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.reading import Reader
from penstock.engine_core.grammar.schema.writer import Json, Writer
from penstock.protocol.errors import UnsupportedSchema

LEAST = 120  # characters or so of a schema that is worth a reference
NAMED = ("properties", "patternProperties")
LISTED = ("anyOf", "allOf", "prefixItems")
ONE = ("items", "additionalProperties", "contains")


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """`schema` accepts what the given one accepts; `approximations` says where it accepts more (lenient only).

    It also accepts repeated items of an array marked by `unique_items.MARK`, the number of what they are in `texts`.
    """

    schema: Json
    approximations: tuple[str, ...] = ()
    texts: tuple[Json, ...] = ()


def rewrite(schema: object, *, lenient: bool = False, plain: bool = False, follows: bool = False) -> Rewritten:
    """The schema that is to be compiled, for one given as JSON values.

    Its `uniqueItems`, `contains`, bounds beyond 64 bits and numbers that are no integers have a form in Lark alone,
    which `lark.grammar` gives. If `plain`, there are none, and llguidance compiles it as it is. `follows`: whoever
    follows the output tells unique items apart that no grammar counts.

    Raises UnsupportedSchema.
    """
    check_size(schema)
    if schema is True:
        return Rewritten({})
    if schema is False or not isinstance(schema, dict):
        raise UnsupportedSchema("schema", "", "no value can match it" if schema is False else "it must be an object")
    try:
        return _rewritten(schema, lenient, plain, follows, loose=False)
    except UnsupportedSchema:
        if not lenient:
            raise
    return _rewritten(schema, lenient, plain, follows, loose=True)


def _rewritten(schema: Json, lenient: bool, plain: bool, follows: bool, *, loose: bool) -> Rewritten:
    document = Document(schema, loose=loose, lenient=lenient)
    algebra = Algebra(Reader(document), document.path, loose=loose)
    arrays, objects = writing_arrays.write, writing_objects.write
    writer = Writer(document, algebra, lenient, arrays, objects, plain=plain, follows=follows)
    try:
        written = share(writer.document_schema(Place(document.root)))
    except CircularTerm as circle:
        raise UnsupportedSchema("$ref", str(circle), "it refers to itself and to nothing else") from None
    if algebra.widened:
        document.notes[f"schema at /: alternatives beyond {MAX_TOGETHER} are taken together"] = None
    return Rewritten(written, (*document.notes, *writer.approximations), tuple(writer.texts))


class _Copies:
    """Numbers of the subschemas of one schema: equal ones have the same."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[object, ...], int] = {}
        self.of: dict[int, int] = {}  # id() of a subschema, which its root keeps alive → its number
        self.sizes: list[int] = []
        self.uses: Counter[int] = Counter()

    def count(self, schema: object) -> object:
        """The number of a subschema, which is used once more; a boolean stands for itself."""
        if not isinstance(schema, dict):
            return schema
        number = self.of.get(id(schema))
        if number is None:
            number = self.of[id(schema)] = self._number(schema)
        self.uses[number] += 1
        return number

    def _number(self, schema: Json) -> int:
        size = 0
        key: list[object] = []
        for keyword, value in schema.items():
            if keyword in NAMED and isinstance(value, dict):
                parts = [self.count(child) for child in value.values()]
                key.append((keyword, *value, *parts))
                size += sum(map(len, value)) + sum(map(self._size, parts))
            elif keyword in LISTED and isinstance(value, list):
                parts = [self.count(child) for child in value]
                key.append((keyword, *parts))
                size += sum(map(self._size, parts))
            elif keyword in ONE:
                part = self.count(value)
                key.append((keyword, part, type(part)))
                size += self._size(part)
            else:
                text = repr(value)
                key.append((keyword, text))
                size += len(text)
            size += len(keyword)
        number = self.numbers.setdefault(tuple(key), len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(size)
        return number

    def _size(self, part: object) -> int:
        return self.sizes[part] if isinstance(part, int) and not isinstance(part, bool) else 4

    def shared(self, schema: Json) -> bool:
        number = self.of[id(schema)]
        return self.uses[number] > 1 and self.sizes[number] >= LEAST


def share(schema: Json) -> Json:
    """The same schema with what it repeats in `$defs`: llguidance compiles every copy anew, and the conjunctions and
    alternatives of a rewrite copy a lot. It holds no keywords but those written here."""
    definitions = schema.get("$defs", {})
    assert isinstance(definitions, dict), "$defs are written as an object"
    body = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
    copies = _Copies()
    for part in (body, *definitions.values()):
        copies.count(part)
    made: Json = {}
    names: dict[int, str] = {}

    def written(part: object, whole: bool = False) -> object:
        if not isinstance(part, dict):
            return part
        if not whole and copies.shared(part):
            number = copies.of[id(part)]
            if number not in names:
                names[number] = f"same-{len(names)}"  # no name that a schema gives has a dash
                made[names[number]] = written(part, whole=True)
            return {"$ref": f"#/$defs/{names[number]}"}
        out: Json = {}
        for keyword, value in part.items():
            if keyword in NAMED and isinstance(value, dict):
                out[keyword] = {name: written(child) for name, child in value.items()}
            elif keyword in LISTED and isinstance(value, list):
                out[keyword] = [written(child) for child in value]
            else:
                out[keyword] = written(value) if keyword in ONE else value
        return out

    root = written(body, whole=True)
    assert isinstance(root, dict), "the body is an object"
    kept = {name: written(part, whole=True) for name, part in definitions.items()}
    return {**root, "$defs": {**kept, **made}} if kept or made else root
