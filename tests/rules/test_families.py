"""A family of models is known to its own module alone: nothing else asks which one it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.rules.source import Source, none, parse, product

HOME = "engine_core/models/families/"


def family_names(source: Source) -> Iterator[str]:
    """Comparisons of something called family, or of a config.json's kind of model, with strings."""
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            parts = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        named = any(getattr(part, "attr", getattr(part, "id", "")) in ("family", "model_type") for part in parts)
        literal = any(isinstance(each, ast.Constant) and isinstance(each.value, str)
                      for part in parts for each in ast.walk(part))  # fmt: skip
        if named and literal:
            yield f"{source.path}:{node.lineno} asks for a family by its name"


def test_nobody_asks_which_family_it_is() -> None:
    none(found for source in product() if not source.path.startswith(HOME) for found in family_names(source))


def test_the_rule_finds_what_it_forbids() -> None:
    for text in ('a = spec.family == "llama"', 'a = family in ("qwen2", "qwen3")', 'a = model_type != "x"',
                 'match spec.family:\n    case "llama":\n        pass'):  # fmt: skip
        assert list(family_names(parse(text)))
    assert not list(family_names(parse("a = family in known")))
