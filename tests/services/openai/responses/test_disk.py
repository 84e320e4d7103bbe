"""The directory of stored responses: whose it is, who removes it, and that no file of it is open to others."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from penstock.protocol.errors import ConfigError
from penstock.services.openai.responses.store import CACHE, STALE, Disk, found, interrupted, sweep, written


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv(CACHE, raising=False)
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


async def test_files_and_their_directory_are_private(tmp_path: Path, temporary: Path) -> None:
    kept = Disk.open("", tmp_path / "run")
    assert await kept.write("a", b"x") == ""
    assert kept.folder.parent == temporary
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert (kept.folder / "a").stat().st_mode & 0o777 == 0o600
    assert await kept.read("a") == b"x"
    kept.close(["a"])
    assert not kept.folder.exists()


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_link_to_a_directory_of_others_is_refused(tmp_path: Path, temporary: Path, mode: int) -> None:
    """Its name can be guessed, and anybody may put a link into a temporary directory of everybody's."""
    kept = Disk.open("", tmp_path / "run")
    place = kept.folder
    kept.close([])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    elsewhere.chmod(mode)
    place.symlink_to(elsewhere)
    for given in ("", str(place)):
        with pytest.raises(ConfigError, match="must belong to this user alone"):
            Disk.open(given, tmp_path / "run")
    elsewhere.chmod(0o700)
    Disk.open(str(place), tmp_path / "run").close([])


async def test_the_last_process_removes_a_temporary_directory(tmp_path: Path) -> None:
    one, other = (Disk.open("", tmp_path / "run") for _ in range(2))
    assert one.folder == other.folder
    assert Disk.open("", tmp_path / "run2").folder != one.folder
    await asyncio.gather(one.write("a", b"x"), other.write("b", b"y"))
    one.close(["a"])
    assert await other.read("b") == b"y"
    other.close(["b"])
    assert not other.folder.exists()


def test_systemd_says_where_units_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv(CACHE, f"{tmp_path / 'cache'}:/elsewhere")
    kept = Disk.open("", tmp_path / "run")
    assert kept.folder.parent == tmp_path / "cache"
    kept.close([])


def test_directories_of_servers_that_are_gone_are_swept(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "run").mkdir()
    alive, gone, young = (Disk.open("", tmp_path / name) for name in ("run", "gone", "young"))
    old = time.time() - 10 * STALE
    for each in (alive, gone):
        os.utime(each.folder, (old, old))
    (temporary / "other").mkdir()
    sweep(temporary, time.time())
    assert {path.name for path in temporary.iterdir()} == {alive.folder.name, young.folder.name, "other"}


def test_what_is_not_written_leaves_nothing(tmp_path: Path) -> None:
    assert written(tmp_path / "a", b"x") == ""
    (tmp_path / "a.new").mkdir()
    assert written(tmp_path / "a", b"y") != ""
    assert found(tmp_path / "a") is None


@pytest.mark.parametrize(
    ("data", "running"), [(b"\x94\xabin_progress", True), (b"\x94\xa9completed", False), (b"", False)]
)
def test_what_was_running_shows_in_its_first_bytes(data: bytes, running: bool) -> None:
    assert interrupted(data, ("in_progress", "queued")) is running
