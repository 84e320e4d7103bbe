"""From cells to the schema that llguidance compiles: unions of single types, references for what is shared.

What is written uses no keyword whose meaning depends on another beyond its own type, so nothing is left to llguidance's
own merging of schemas. Two of its traps are written around. It enforces no order of keys but the one given here, the
order in which the schema names them. For `additionalProperties` beside `properties` it accepts a known key again in
another spelling (`"\\u0061"` for `"a"`), for `patternProperties` it does not: so the other keys of an open object are
a pattern."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping

from penstock.engine_core.grammar.schema.algebra import Algebra, Cells
from penstock.engine_core.grammar.schema.cells import ANY, FULL, Array, Cell, Object, Obstacle, Place, Term
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.scalars import Boolean, Null, Number, String
from penstock.engine_core.grammar.schema.writing_scalars import write_number, write_string
from penstock.protocol.errors import UnsupportedSchema

MAX_INLINE = 16  # levels written inside one another before the rest moves to $defs
Json = dict[str, object]
NOTHING: Mapping[str, object] = {"enum": []}
SCALARS: tuple[tuple[Cell, str], ...] = (
    *((String(), "string"), (Number(whole=True), "integer"), (Number(), "number"), (Boolean(), "boolean")),
    (Null(), "null"),
)


class Writer:
    """Writes the terms of one document, each at most once beside the place where it is first met.

    `arrays` and `objects` write cells of those types. If `plain`, nothing is written that only `lark` can turn into a
    grammar. If `follows`, unique items that no grammar counts are marked, and `texts` says what they are.
    """

    def __init__(
        self,
        document: Document,
        algebra: Algebra,
        lenient: bool,
        arrays: Callable[[Writer, Array], list[Json]],
        objects: Callable[[Writer, Object], list[Json]],
        *,
        plain: bool = False,
        follows: bool = False,
    ) -> None:
        self.document = document
        self.algebra = algebra
        self.lenient = lenient
        self.arrays = arrays
        self.objects = objects
        self.plain = plain
        self.follows = follows and not plain
        self.texts: list[Json] = []
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
        return {**written, "$defs": self.definitions} if self.definitions else written

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

    def unique(self, texts: Json) -> int:
        """The number of these texts among all that unique items have."""
        if texts not in self.texts:
            self.texts.append(texts)
        return self.texts.index(texts)

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
                    options.extend(self.arrays(self, cell))
                case Object():
                    options.extend(self.objects(self, cell))
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
