"""The messages that docs/troubleshooting.md explains are messages of the product."""

from __future__ import annotations

import ast
import re

import pytest

from tests.rules.source import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PARTS = ("services", "engine_core", "protocol")
MESSAGES = re.findall(r"^\| (`.*?) \|", PAGE[: PAGE.index("## Messages of clients")], re.MULTILINE)


def strings() -> str:
    """Every string of the product, a formatted value as a line break."""
    found = []
    for path in (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "\n" for one in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


STRINGS = strings()


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 40


@pytest.mark.parametrize("cell", MESSAGES)
def test_it_is_a_message_of_the_product(cell: str) -> None:
    """What stands between the ellipses is written somewhere."""
    for message in re.findall(r"`([^`]+)`", cell):
        for part in filter(None, (one.strip() for one in message.split("…"))):
            assert part in STRINGS, part
