"""A process that ends tells those that end after it of a collector that hangs, and nobody else, and not for long."""

from __future__ import annotations

import os
import time
from pathlib import Path

from penstock.protocol.config import RunConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import process, run_directory
from penstock.services.tracing.silence import NAME, RECENT, Silence, silence_of


def test_the_next_one_knows(tmp_path: Path) -> None:
    assert not Silence(tmp_path).known()
    Silence(tmp_path).note()
    assert Silence(tmp_path).known()
    assert not Silence(tmp_path / "of another server").known()


def test_it_is_forgotten(tmp_path: Path) -> None:
    """A collector may be back; a run directory may outlive its server."""
    Silence(tmp_path).note()
    for away in (RECENT + 1, -RECENT - 1):  # clocks are set, too
        os.utime(tmp_path / NAME, (time.time() - away,) * 2)
        assert not Silence(tmp_path).known()
    Silence(tmp_path).note()
    assert Silence(tmp_path).known()


def test_a_run_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    Silence(tmp_path / "gone").note()
    Silence(None).note()
    assert not Silence(None).known()


def test_a_process_of_a_role_finds_that_of_its_server(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv(run_directory.SHARED, raising=False)
    silence_of().note()
    monkeypatch.setenv(run_directory.SHARED, "to be restored")
    monkeypatch.delenv(process.PARENT, raising=False)
    monkeypatch.setattr("penstock.services.supervisor.logs.setup", lambda *_: None)
    process.enter(Role.TOKENIZER, 0, RunConfig(run_dir=str(tmp_path)))
    silence_of().note()
    assert Silence(tmp_path).known()


def test_no_server_leaves_its_word_to_the_next_one(tmp_path: Path) -> None:
    Silence(tmp_path).note()
    run_directory.clear(tmp_path, temporary=False)
    assert not Silence(tmp_path).known()
