"""The table of exchanges, and who is turned away. Measuring needs GPUs."""

from __future__ import annotations

import pytest
import torch

from benchmarks import exchange
from benchmarks.exchange import Figure, figure, main, table
from engine_core.execution.exchange_trial import Trial

ONE = figure(
    "H200", 4, 8192, [Trial(64, 6.0, 18.0), Trial(64, 6.5, 17.0)], [Trial(64, 6.1, 30.0), Trial(64, 6.2, 31.0)]
)


def test_the_slowest_rank_counts() -> None:
    assert (ONE.tokens, ONE.reduced, ONE.gathered, ONE.exchanged) == (64, 18.0, 31.0, 6.5)
    assert ONE.sent == pytest.approx(3 * 64 * 8192 * 2 / 450e9 * 1e6)


def test_the_table() -> None:
    heads, _, line = table([ONE]).splitlines()
    assert heads.count("|") == line.count("|")
    assert line == "| 4 | 8192 | 64 | 18.0 | 31.0 | 6.5 | 2.77 | 7.0 |"


@pytest.mark.parametrize(("count", "words"), [(1, []), (2, ["--ranks", "4"])])
def test_it_takes_two_gpus(
    count: int, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert main(words) == 2
    assert f"of which there are {count}" in capsys.readouterr().err


def test_as_many_gpus_as_there_are(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def figures(ranks: int, hidden: tuple[int, ...]) -> list[Figure]:
        asked.append((ranks, tuple(hidden)))
        return [ONE]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(exchange, "figures", figures)
    assert main(["--output", str(tmp_path / "figures.json")]) == 0
    assert asked == [(2, (4096, 8192)), (4, (4096, 8192))]
    assert capsys.readouterr().out.count("2.77") == 2
    assert (tmp_path / "figures.json").read_bytes().count(b"exchanged") == 2
