"""`penstock keys`: what it writes, what it says, and what it never does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.services import cli
from penstock.services.links.curve import read_keys
from penstock.services.supervisor.process import ExitCode


def test_it_makes_keys_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "link.keys"
    assert cli.main(["keys", str(path)]) == ExitCode.ORDERLY
    told = capsys.readouterr()
    keys = read_keys(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"--link-keys {path}" in told.out
    assert keys.secret.decode() not in told.out + told.err
    assert keys.public.decode() not in told.out + told.err


def test_a_name_without_a_folder_is_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["keys", "link.keys"]) == ExitCode.ORDERLY
    assert f"--link-keys {tmp_path / 'link.keys'}" in capsys.readouterr().out


def test_keys_are_not_replaced_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "link.keys"
    cli.main(["keys", str(path)])
    first = path.read_bytes()
    assert cli.main(["keys", str(path)]) == ExitCode.CONFIG
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == first
    assert cli.main(["keys", "--force", str(path)]) == ExitCode.ORDERLY
    assert path.read_bytes() != first
    assert os.listdir(tmp_path) == ["link.keys"]


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", str(tmp_path / "none" / "link.keys")]) == ExitCode.CONFIG
    assert "No such file or directory" in capsys.readouterr().err


def test_the_file_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys"]) == ExitCode.CONFIG
    assert "FILE" in capsys.readouterr().err
