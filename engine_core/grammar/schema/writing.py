"""From cells to the schema that llguidance compiles: unions of single types, references for what is shared.

What is written uses no keyword whose meaning depends on another beyond its own type, so nothing is left to llguidance's
own merging of schemas. Two of its traps are written around: it enforces no order of keys but the one given here, which
is the order in which the schema names them; and for `additionalProperties` beside `properties` it accepts a known key
again in another spelling (`"\\u0061"` for `"a"`), which it does not for `patternProperties`: the other keys of an open
object are a pattern."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, deque

from penstock.engine_core.grammar.schema import writing_arrays, writing_objects
from penstock.engine_core.grammar.schema.algebra import MAX_TOGETHER, Algebra, Cells, CircularTerm, check_size
from penstock.engine_core.grammar.schema.cells import ANY, FULL, Array, Cell, Object, Obstacle, Place, Term
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.reading import Reader
from penstock.engine_core.grammar.schema.scalars import Boolean, Null, Number, String
from penstock.engine_core.grammar.schema.writing_scalars import write_number, write_string
from penstock.protocol.errors import UnsupportedSchema

LEAST = 120  # characters or so of a schema that is worth a reference
NAMED = ("properties", "patternProperties")
LISTED = ("anyOf", "allOf", "prefixItems")
ONE = ("items", "additionalProperties", "contains")
MAX_INLINE = 16  # levels written inside one another before the rest moves to $defs
Json = dict[str, object]
NOTHING: Json = {"enum": []}
SCALARS: tuple[tuple[Cell, str], ...] = (
    *((String(), "string"), (Number(whole=True), "integer"), (Number(), "number"), (Boolean(), "boolean")),
    (Null(), "null"),
)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """`schema` accepts what the given one accepts; `approximations` says where it accepts more (lenient only)."""

    schema: Json
    approximations: tuple[str, ...] = ()


def rewrite(schema: object, *, lenient: bool = False, plain: bool = False) -> Rewritten:
    """The schema that is to be compiled, for one given as JSON values.

    Its `uniqueItems`, `contains`, bounds beyond 64 bits and numbers that are no integers have a form in Lark alone,
    which `lark.grammar` gives. If `plain`, there are none, and llguidance compiles it as it is.

    Raises UnsupportedSchema.
    """
    check_size(schema)
    if schema is True:
        return Rewritten({})
    if schema is False or not isinstance(schema, dict):
        raise UnsupportedSchema("schema", "", "no value can match it" if schema is False else "it must be an object")
    try:
        return _rewritten(schema, lenient, plain, loose=False)
    except UnsupportedSchema:
        if not lenient:
            raise
    return _rewritten(schema, lenient, plain, loose=True)


def _rewritten(schema: Json, lenient: bool, plain: bool, *, loose: bool) -> Rewritten:
    document = Document(schema, loose=loose)
    reader = Reader(document, lenient=lenient)
    algebra = Algebra(reader, reader.path, loose=loose)
    writer = Writer(document, algebra, lenient, plain=plain)
    try:
        written = writer.document_schema(Place(document.root))
    except CircularTerm as circle:
        raise UnsupportedSchema("$ref", str(circle), "it refers to itself and to nothing else") from None
    if algebra.widened:
        document.notes[f"schema at /: alternatives beyond {MAX_TOGETHER} are taken together"] = None
    return Rewritten(written, (*document.notes, *writer.approximations))


class Writer:
    """Writes the terms of one document, each at most once beside the place where it is first met.

    If `plain`, nothing is written that only `lark` can turn into a grammar.
    """

    def __init__(self, document: Document, algebra: Algebra, lenient: bool, *, plain: bool = False) -> None:
        self.document = document
        self.algebra = algebra
        self.lenient = lenient
        self.plain = plain
        self.approximations: dict[str, None] = {}
        self.names: dict[Term, str] = {}  # terms that are written in $defs
        self.taken: set[str] = set()
        self.waiting: deque[Term] = deque()  # of those, the ones still to be written
        self.definitions: dict[str, object] = {}
        self.done: dict[Term, Json] = {}
        self.open: list[Term] = []  # terms being written, outermost first
        self.path = ""  # of the innermost schema of the document that is being written

    def document_schema(self, root: Term) -> Json:
        """The whole schema. Raises UnsupportedSchema: no exact form, or nothing matches."""
        written = self.child(root)
        while self.waiting:
            term = self.waiting.popleft()
            name = self.names[term]
            if name not in self.definitions:
                self.definitions[name] = self._body(term)
        if written is False:
            raise UnsupportedSchema("schema", "", "no value can match it")
        assert isinstance(written, dict), "a schema is an object or False"
        return share({**written, "$defs": self.definitions} if self.definitions else written)

    def child(self, term: Term) -> Json | bool:
        """The schema of a term, or a reference to it; False where nothing matches."""
        if term == ANY:
            return {}
        if term in self.names:
            return self._reference(term)
        if self.algebra.empty(term):
            return False
        written = self.done.get(term)
        if written is not None:
            if _light(written):
                return written
            self.definitions[self._name(term)] = written
            return self._reference(term)
        if term in self.open or len(self.open) >= MAX_INLINE or self._referenced(term):
            self._name(term)
            if term not in self.open:
                self.waiting.append(term)
            return self._reference(term)
        written = self._body(term)
        if term in self.names:
            self.definitions[self.names[term]] = written
            return self._reference(term)
        if written == NOTHING:
            self.algebra.known[term] = True  # only the written form showed it
            return False
        self.done[term] = written
        return written

    def left_out(self, keyword: str, reason: str, path: str = "") -> None:
        """A constraint that cannot be written: an approximation if that is allowed, else UnsupportedSchema."""
        if not self.lenient:
            raise UnsupportedSchema(keyword, path or self.path, reason)
        self.approximations[f"{keyword} at {path or self.path or '/'}: {reason}"] = None

    def obstacles(self, found: tuple[Obstacle, ...]) -> None:
        for obstacle in found:
            self.left_out(obstacle.keyword, obstacle.reason, obstacle.path)

    def _referenced(self, term: Term) -> bool:
        return isinstance(term, Place) and term.number in self.document.targets

    def _reference(self, term: Term) -> Json:
        return {"$ref": f"#/$defs/{self.names[term]}"}

    def _name(self, term: Term) -> str:
        if term in self.names:
            return self.names[term]
        last = self.document.paths[term.number].rpartition("/")[2] if isinstance(term, Place) else ""
        name = last if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", last) else "schema"
        if name in self.taken:
            name = f"{name}.{len(self.taken)}"
        self.taken.add(name)
        self.names[term] = name
        return name

    def _body(self, term: Term) -> Json:
        outer = self.path
        if isinstance(term, Place):
            self.path = self.document.paths[term.number]
        self.open.append(term)
        try:
            return self.union(tuple(c for c in self.algebra.cells(term) if not self.algebra.hollow(c)))
        finally:
            self.open.pop()
            self.path = outer

    def union(self, cells: Cells) -> Json:
        """The schema of a union of cells. `enum` holds its scalars, `type` the types without constraints."""
        if len(cells) >= len(FULL) and set(cells) == set(FULL):
            return {}
        names = [name for cell, name in SCALARS if cell in cells]
        if "number" in names and "integer" in names:
            names.remove("integer")
        listed: list[object] = []
        options: list[Json] = []
        for cell in cells:
            self.algebra.allowance.spend()
            match cell:
                case Null() | Boolean() | Number() | String() if any(cell == plain for plain, _ in SCALARS):
                    continue
                case Boolean(values):
                    listed.extend(values)
                case Number() | String():
                    written = self.scalar(cell)
                    plain_list = written.get("enum") if len(written) == 1 else None
                    if isinstance(plain_list, list):
                        listed.extend(plain_list)
                    elif "const" in written:
                        listed.append(written["const"])
                    else:
                        options.append(written)
                case Array():
                    options.extend(writing_arrays.write(self, cell))
                case Object():
                    options.extend(writing_objects.write(self, cell))
        if names:
            options.insert(0, {"type": names[0] if len(names) == 1 else names})
        if listed:
            options.append({"enum": listed})
        if len(options) == 1:
            return options[0]
        return {"anyOf": options} if options else {**NOTHING}

    def scalar(self, cell: Number | String) -> Json:
        written, trouble = write_number(cell, plain=self.plain) if isinstance(cell, Number) else write_string(cell)
        if trouble:
            keyword, _, reason = trouble.partition(": ")
            self.left_out(keyword, reason)
        return written


def _light(written: Json) -> bool:
    """Whether a copy costs no more than a reference."""
    return all(
        isinstance(v, str | int | float) or (isinstance(v, list) and len(v) <= 4) for v in written.values()
    ) and not ({"anyOf", "prefixItems", "allOf"} & written.keys())


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
