"""README and docs/ say what the result files say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import readme_figures
from benchmarks.readme_figures import main, pages

TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MADE = re.compile(r"<!-- figures: .*?<!-- /figures -->", re.DOTALL)
UNITS = re.compile(r"tok/s|tokens/s|ms per token|µs|\bratio\b")
BY_HAND = ("| Row | Where the time goes |",)  # profiles in words


def test_every_figure_is_that_of_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, "run `python -m benchmarks.readme_figures --write`\n" + capsys.readouterr().out


def test_a_figure_that_was_changed_by_hand_is_told_and_mended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = {tmp_path / f"{number}.md": path.read_text() for number, path in enumerate(pages())}
    for path, text in copies.items():
        path.write_text(text)
    monkeypatch.setattr(readme_figures, "pages", lambda: list(copies))
    assert main(["--check"]) == 0
    (table,) = (path for path, text in copies.items() if "| lat_bs1 | ms per token | " in text)
    table.write_text(copies[table].replace("| lat_bs1 | ms per token | ", "| lat_bs1 | ms per token | 1"))
    assert main(["--check"]) == 1
    assert "+| lat_bs1" in capsys.readouterr().out
    assert main(["--write"]) == 0
    assert {path: path.read_text() for path in copies} == copies
    (sentence,) = (path for path, text in copies.items() if "Start to ready" in text)
    sentence.write_text(copies[sentence].replace("Start to ready", "Ready"))
    assert main(["--check"]) == 1
    assert "places read" in capsys.readouterr().err


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_of_figures_are_rendered(page: Path) -> None:
    """A table with a unit of speed in its head stands between markers, and on the page of figures every table."""
    text = MADE.sub("", page.read_text())
    heads = [found[0].partition("\n")[0] for found in TABLE.finditer(text)]
    figures = [head for head in heads if page.name == "performance.md" or UNITS.search(head)]
    assert [head for head in figures if not head.startswith(BY_HAND)] == []
