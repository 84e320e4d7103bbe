"""JSON Schema as people write it, rewritten into the part of it that llguidance holds exactly: right or refused.

`reading` turns keywords into cells, `algebra` finds the conjunctions, negations and emptiness that oneOf, not, if, $ref
and their like need, `writing` puts cells into the few keywords that llguidance takes, and `writing_lark` turns what
it does not take into a Lark grammar around the rest. A schema without an exact form is refused with keyword and path; a
lenient rewrite leaves the constraint out and says so."""

from __future__ import annotations

import dataclasses

from penstock.engine_core.grammar.schema.algebra import Algebra, CircularTerm
from penstock.engine_core.grammar.schema.bounds import MAX_TOGETHER, check_size
from penstock.engine_core.grammar.schema.cells import Place
from penstock.engine_core.grammar.schema.document import Document
from penstock.engine_core.grammar.schema.reading import Reader
from penstock.engine_core.grammar.schema.writing import Writer
from penstock.protocol.errors import UnsupportedSchema


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """`schema` accepts what the given one accepts; `approximations` says where it accepts more (lenient only)."""

    schema: dict[str, object] | bool
    approximations: tuple[str, ...] = ()


def rewrite(schema: object, *, lenient: bool = False, plain: bool = False) -> Rewritten:
    """The schema that is to be compiled, for a schema of draft 7, 2019-09 or 2020-12 given as JSON values.

    Its `uniqueItems`, `contains`, bounds beyond 64 bits and numbers that are no integers have a form in Lark alone,
    which `writing_lark.grammar` gives. If `plain`, there are none, and llguidance compiles it as it is.

    Raises UnsupportedSchema, naming keyword and JSON pointer: malformed, a remote reference, too deep or too large,
    nothing can match it, or (unless `lenient`) a constraint that no automaton of llguidance holds exactly.
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


def _rewritten(schema: dict[str, object], lenient: bool, plain: bool, *, loose: bool) -> Rewritten:
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
