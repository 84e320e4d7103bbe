"""The messages that docs/troubleshooting.md explains are messages of the product."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.rules.source import ROOT, sources

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PARTS = ("services", "engine_core", "protocol")
MESSAGES = re.findall(r"^\| (`.*?) \|", PAGE[: PAGE.index("## Messages of clients")], re.MULTILINE)


@functools.cache
def strings() -> str:
    """Every string of the product, a formatted value as a line break."""
    found = []
    for node in (node for source in sources(*PARTS) for node in source.nodes):
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "\n" for one in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("cell", MESSAGES)
def test_it_is_a_message_of_the_product(cell: str) -> None:
    """What stands between the ellipses is written somewhere."""
    for message in re.findall(r"`([^`]+)`", cell):
        for part in filter(None, (one.strip() for one in message.split("…"))):
            assert part in strings(), part
