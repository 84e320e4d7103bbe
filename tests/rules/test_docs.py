"""Pages of the repository: links lead somewhere, sentences are short, drawings are current, the site builds."""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readme_figures import pages
from penstock.engine_core.models.families import families
from penstock.engine_core.models.foreign import FORMATS
from penstock.protocol.config import fields
from penstock.services.metrics.definitions import METRICS
from penstock.services.openai.routes import ROUTES
from tests.rules.source import ROOT, files

PAGES = [path for path in files() if path.suffix == ".md" and "embedded" not in path.parts]
PROSE = [*pages(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
DRAWINGS = sorted((ROOT / "docs" / "drawings").glob("*.dot"))
MEAN, MOST = 20, 40  # words of a sentence
NO_PROSE = re.compile(r"^(#|\||<|!\[|\[[^\]]+\]:)")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\[\"'(*_`A-Z0-9<])")
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:[^\" >]+)|<link\b[^>]*rel=\"?(?:stylesheet|"
                    r"preconnect|icon)\"?[^>]*href=\"?(https?:[^\" >]+)")  # fmt: skip


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence: code and a link's text count, code as one word; tables and headings do not."""
    paragraphs: list[str] = [""]
    for line in FENCED.sub("", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)).split("\n"):
        if not line.strip() or NO_PROSE.match(line.strip()):
            paragraphs.append("")
        elif ITEM.match(line):
            paragraphs.append(ITEM.sub("", line))
        else:
            paragraphs[-1] += " " + line
    found = []
    for paragraph in paragraphs:
        plain = re.sub(r"\]\([^)\s]+\)", "]", re.sub(r"`[^`]+`", "`code`", paragraph))
        found += [[word for word in part.split() if re.search(r"\w", word)] for part in END.split(plain)]
    return [words for words in found if words]


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


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page.read_text())
    assert [" ".join(words) for words in found if len(words) > MOST] == []
    mean = sum(map(len, found)) / len(found)
    assert mean <= MEAN, f"{mean:.1f} words a sentence, the limit is {MEAN}"


def test_sentences_are_told_apart() -> None:
    text = (
        "# A heading\n\nOne `two words` three.\nIt goes [on and](on.md). Yes? `code` ends it\n\n- an item\n"
        "  of five words\n| a | table |\n\n```\nno prose\n```\n1. last <!-- a comment\n\nof two lines -->"
    )
    assert list(map(len, sentences(text))) == [3, 4, 1, 3, 5, 1]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split("\n")) <= 150


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; in strict mode a lost link, anchor or page ends the build."""
    place = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return place


def shown(site: Path, name: str) -> str:
    """The text of a page of the site."""
    return html.unescape(re.sub(r"<[^>]+>", "", (site / name).read_text()))


def test_references_name_everything(site: Path) -> None:
    options, http, metrics, models = (
        shown(site, f"{name}.html") for name in ("reference/options", "reference/http", "reference/metrics", "models")
    )
    assert [field.flag for field in fields() if field.flag not in options] == []
    assert [route.name for route in ROUTES if route.summary and f"{route.method} {route.name}" not in http] == []
    assert [name for name in METRICS if f"penstock_{name}" not in metrics] == []
    classes = [family.architecture for family in families().values()]
    assert [name for name in (*classes, *(pattern for pattern, _ in FORMATS)) if name not in models] == []


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_whoever_comes_from_another_server_finds_each_of_its_flags(site: Path, server: str) -> None:
    lists = ROOT / "tests" / "services" / "supervisor" / "flags"
    flags = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", re.sub(r"^#.*", "", (lists / f"{server}.txt").read_text()))
    page = shown(site, f"coming-from-{server}.html")
    assert len(flags) > 300
    assert [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", page)] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    found = [(page.name, loaded) for page in site.rglob("*.html") for loaded in LOADED.findall(page.read_text())]
    assert found == []


def test_no_source_is_in_the_site(site: Path) -> None:
    assert [path.name for path in site.rglob("*") if path.suffix in (".py", ".dot", ".sh", ".md")] == []
