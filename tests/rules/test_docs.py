"""Pages of the repository: what they link to is there, and drawings are of their sources."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tests.rules.source import ROOT, files

PAGES = [path for path in files() if path.suffix == ".md" and "embedded" not in path.parts]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
DRAWINGS = sorted((ROOT / "docs" / "drawings").glob("*.dot"))


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("source", DRAWINGS, ids=lambda source: source.name)
def test_drawings_are_made_of_their_sources(source: Path) -> None:
    """docs/drawings/draw.sh makes them and writes the checksum of what they are made of."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert source.with_suffix(".svg").read_text().startswith(f"<!-- {source.name} sha256 {digest} -->\n<svg")
