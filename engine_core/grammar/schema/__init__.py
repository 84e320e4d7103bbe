"""The JSON Schema compiler: a schema as people write it becomes a grammar that llguidance holds exactly, or is refused.

`document` numbers the subschemas and resolves references, `reading` turns keywords into cells, and `algebra` finds the
conjunctions, negations and emptiness that oneOf, not, if, $ref and their like need. `writer` puts cells into the few
keywords that llguidance takes, and `lark` turns the rest into a Lark grammar around them. A schema without an exact
form is refused with keyword and path; leniently the constraint is left out and reported. The compiler imports nothing
of the engine but itself and regular expressions (`patterns`, `automata`, `runs`), and others import nothing of it but
`compile_schema`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from penstock.engine_core.grammar.schema import lark
from penstock.engine_core.grammar.schema.unique_items import Place, places
from penstock.engine_core.grammar.schema.writer import Json
from penstock.engine_core.grammar.schema.writing import rewrite
from penstock.protocol.errors import UnsupportedSchema


@dataclasses.dataclass(frozen=True)
class CompiledSchema:
    """`lark`, a Lark grammar, where the schema has no other form; else `json`, a schema with llguidance's options.

    `approximations` says where it accepts more than the schema given (lenient only). The items of the arrays at
    `unique` places may repeat in the grammar, and whoever follows the output is to refuse that.
    """

    json: Json
    lark: str | None
    approximations: tuple[str, ...]
    unique: tuple[Place, ...] = ()


def compile_schema(
    schema: object,
    options: Mapping[str, object],
    *,
    lenient: bool = False,
    follows: bool = False,
    check: Callable[[Json], None] | None = None,
) -> CompiledSchema:
    """Compile a schema of draft 7, 2019-09 or 2020-12, given as JSON values. `options` are llguidance's for JSON.

    `follows`: the whole output is one value of the schema, and whoever follows it heeds `unique`. `check` sees the
    schema that is about to be compiled and may refuse it.

    Raises UnsupportedSchema, naming keyword and JSON pointer: malformed, a remote reference, too deep or too large,
    nothing can match it, or (unless `lenient`) a constraint that has no exact form.
    """
    try:
        return _compiled(schema, options, lenient, False, follows, check)
    except UnsupportedSchema:
        if not lenient:
            raise
    return _compiled(schema, options, True, True, False, check)


def _compiled(
    schema: object,
    options: Mapping[str, object],
    lenient: bool,
    plain: bool,
    follows: bool,
    check: Callable[[Json], None] | None,
) -> CompiledSchema:
    found = rewrite(schema, lenient=lenient, plain=plain, follows=follows)
    if check is not None:
        check(found.schema)
    text = lark.grammar(found.schema, {**options})
    unique = places(found.schema, found.texts) if found.texts else ()
    return CompiledSchema({**found.schema, lark.OPTIONS: {**options}}, text, found.approximations, unique)
