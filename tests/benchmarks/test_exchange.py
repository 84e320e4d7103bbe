"""The table of exchanges, and who is turned away. Measuring needs GPUs."""

from __future__ import annotations

import msgspec
import pytest
import torch

from benchmarks import exchange
from benchmarks.exchange import (
    CONTEXT,
    PAGE,
    SHAPES,
    Figure,
    Pass,
    decode_batch,
    figure,
    main,
    passes,
    table,
    table_of_passes,
)
from benchmarks.shapes import SMOKE
from penstock.engine_core.distributed.group import ALONE
from penstock.engine_core.execution.all_reduce_tuning import Trial

ONE = figure(
    "H200", 4, 8192, [Trial(64, 6.0, 18.0), Trial(64, 6.5, 17.0)], [Trial(64, 6.1, 30.0), Trial(64, 6.2, 31.0)]
)
THROUGH = Pass(shape="8B", ranks=4, layers=8, tokens=64, reduced=500.0, exchanged=400.0)


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
    asked: list[tuple[int, tuple[int, ...], bool]] = []

    def figures(ranks: int, hidden: tuple[int, ...], whole: bool) -> tuple[list[Figure], list[Pass]]:
        asked.append((ranks, tuple(hidden), whole))
        return [ONE], [THROUGH]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(exchange, "figures", figures)
    assert main(["--passes", "--output", str(tmp_path / "figures.json")]) == 0
    assert asked == [(2, (4096, 8192), True), (4, (4096, 8192), True)]
    out = capsys.readouterr().out
    assert out.count("2.77") == out.count("| 1.25 |") == 2
    assert (tmp_path / "figures.json").read_bytes().count(b"exchanged") == 4


def test_the_table_of_passes() -> None:
    heads, _, line = table_of_passes([THROUGH]).splitlines()
    assert heads.count("|") == line.count("|")
    assert line == "| 4 | 8B | 8 | 64 | 500 | 400 | 1.25 |"


def test_rows_of_a_pass_write_to_pages_of_their_own() -> None:
    batch = decode_batch(3, torch.device("cpu"))
    assert len(set(batch.block_tables.flatten().tolist())) == 3 * CONTEXT // PAGE
    assert batch.slot_mapping.tolist() == [int(line[-1]) * PAGE + PAGE - 1 for line in batch.block_tables]
    assert batch.block_tables.min() == 1, "the first page is nobody's"


def test_a_pass_of_each_size_is_timed(tmp_path) -> None:
    made: list[torch.Size] = []

    def timed(run, device: torch.device) -> float:
        made.append(run().shape)
        return 3.0

    small = msgspec.structs.replace(SMOKE, config={**SMOKE.config, "vocab_size": 512})
    assert passes(ALONE, small, tmp_path, (1, 3), torch.float32, torch.device("cpu"), timed) == [3.0, 3.0]
    hidden = SMOKE.config["hidden_size"]
    assert made == [(1, hidden), (3, hidden)]
    assert {shape.config["hidden_size"] for shape in SHAPES} == {4096, 8192}
