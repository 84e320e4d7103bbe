"""`penstock quantize`: what is refused, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.models.quantization.writing import Rounded
from penstock.services import cli
from penstock.services.commands.quantize import share, text
from penstock.services.supervisor.process import ExitCode


def quantize(folder: Path, out: Path, form: str) -> int:
    return cli.main(["quantize", str(folder), str(out), "--format", form, "--device", "cpu"])


def test_what_cannot_be_done_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert quantize(demo_folder(), tmp_path / "full", "fp8") == ExitCode.CONFIG
    assert "it has files in it; name a folder that is empty or not there" in capsys.readouterr().err
    assert quantize(demo_folder(), tmp_path / "full" / "file", "fp8") == ExitCode.CONFIG
    assert "it cannot be written" in capsys.readouterr().err
    assert quantize(demo_folder(), tmp_path / "once", "fp8") == ExitCode.ORDERLY
    capsys.readouterr()
    assert quantize(tmp_path / "once", tmp_path / "twice", "int4") != ExitCode.ORDERLY
    assert "quantiz" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_a_model_and_a_folder_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model alone is not the folder that a copy of the embedded one is written to."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["quantize", "Qwen/Qwen3-8B", "--device", "cpu"]) == ExitCode.CONFIG
    assert "OUT: it is missing: `penstock quantize Qwen/Qwen3-8B OUT` writes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["quantize", "penstock-demo", "out", "--device", "cpu"]) == ExitCode.ORDERLY
    assert cli.main(["quantize", "--model", "penstock-demo", "again", "--device", "cpu"]) == ExitCode.ORDERLY


def test_help_lists_what_it_uses() -> None:
    flags = cli.parser_of("quantize").flags()
    assert {"--model", "--revision", "--device", "--base-gpu-id", "--format"} <= set(flags)
    assert {"--tensor-parallel-size", "--max-num-seqs", "--dtype"}.isdisjoint(flags)


def test_the_table_has_a_line_a_layer() -> None:
    found = [Rounded("model.layers.0.mlp.up_proj", 1.0, 100.0), Rounded("model.layers.0.mlp.down_proj", 3.0, 300.0),
             Rounded("model.layers.11.mlp.up_proj", 16.0, 100.0)]  # fmt: skip
    lines = text(found).splitlines()
    assert lines[1].split() == ["0", "2", "10.00%", "mlp.up_proj", "(10.00%)"]
    assert lines[2].split() == ["11", "1", "40.00%", "mlp.up_proj", "(40.00%)"]
    assert lines[3].split() == ["all", "3", "20.00%"]
    assert share([]) == 0.0
