"""What a run says of itself while it runs."""

from __future__ import annotations

import pytest

from penstock.services.commands import progress
from penstock.services.commands.progress import ProgressBar


def test_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressBar("load", 2000) as shown:
        shown.show(1, "early")
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        shown.show(1200, "5 tok/s")
        shown.conclude("6 tok/s")
    assert capsys.readouterr().err == "load: 1,200/2,000 requests, 5 tok/s\nload: 1,200/2,000 requests, 6 tok/s\n"


def test_nothing_when_it_is_not_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with ProgressBar("load", 2, shown=False) as shown:
        shown.show(1, "x")
        shown.conclude("y")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ProgressBar("load", 2) as shown:
        shown.show(2, "7 tok/s")
        shown.conclude("8 tok/s")
    assert "load: 2/2 requests, 8 tok/s" in capsys.readouterr().err
