"""How large a schema and what is made of it may grow. Passing a bound is a refusal, never a slow answer."""

from __future__ import annotations

from penstock.protocol.errors import UnsupportedSchema

MAX_DEPTH = 256  # JSON levels of a schema
MAX_NODES = 200_000  # JSON values of a schema
MAX_STEPS = 20_000  # cells made while a schema is rewritten
MAX_TOGETHER = 64  # alternatives of one product in a loose reading
MAX_INPLACE = 48  # $ref, allOf, anyOf, oneOf, not, if inside one another, all for the same value
MAX_PRESENCE = 256  # alternatives for which optional keys of one object are present
MAX_ARRANGEMENTS = 400  # arrays listed in place of uniqueItems, or of contains
MAX_EXCLUDED = 8192  # characters of all strings that one string may not be
MAX_OVERLAPPING = 4  # patterns of keys of one object that can match the same key
MAX_BRANCHES = 6  # alternatives of an anyOf whose annotations matter to unevaluatedProperties or unevaluatedItems


class Allowance:
    """What is left of MAX_STEPS for one schema."""

    def __init__(self, *, hard: bool = True) -> None:
        self.hard = hard
        self.left = MAX_STEPS

    def spend(self, steps: int = 1) -> bool:
        """Whether the schema is within its bound. If that is hard, raise UnsupportedSchema where it is not."""
        self.left -= steps
        if self.left < 0 and self.hard:
            raise UnsupportedSchema("schema", "", f"it expands to more than {MAX_STEPS} alternatives")
        return self.left >= 0


def children(node: object) -> list[object]:
    """JSON values right inside a value."""
    if isinstance(node, dict):
        return list(node.values())
    return list(node) if isinstance(node, list) else []


def check_size(schema: object) -> None:
    """Raise UnsupportedSchema for a schema that is too deep or too large. No recursion, whatever the depth."""
    level: list[object] = [schema]
    depth = nodes = 0
    while level:
        depth += 1
        nodes += len(level)
        if depth > MAX_DEPTH:
            raise UnsupportedSchema("schema", "", f"it is nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise UnsupportedSchema("schema", "", f"it has more than {MAX_NODES} values")
        level = [child for node in level for child in children(node)]
