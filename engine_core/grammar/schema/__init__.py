"""JSON Schema as people write it, rewritten into the part of it that the automaton library takes and holds exactly."""

from __future__ import annotations

import dataclasses

from protocol.errors import UnsupportedSchema

MAX_DEPTH = 64  # JSON levels of a schema


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """`schema` accepts what the given one accepts; `approximations` says where it accepts more (lenient only)."""

    schema: dict[str, object] | bool
    approximations: tuple[str, ...] = ()


def rewrite(schema: object, *, lenient: bool = False) -> Rewritten:
    """The schema that the automaton library is to compile. Raises UnsupportedSchema where no exact form exists."""
    if isinstance(schema, bool):
        return Rewritten({} if schema else False)
    if not isinstance(schema, dict):
        raise UnsupportedSchema("schema", "", "a schema is an object or a boolean")
    level: list[object] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise UnsupportedSchema("schema", "", f"nested deeper than {MAX_DEPTH} levels")
        level = [child for node in level for child in _children(node)]
    return Rewritten(schema)


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list) else []
