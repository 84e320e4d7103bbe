from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from fnmatch import fnmatch
from pathlib import Path

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.links import LINKS, address
from penstock.services.metrics.snapshot import SUFFIX
from penstock.services.supervisor import run_directory
from penstock.services.supervisor.restart_policy import FILE
from penstock.services.supervisor.run_directory import (
    LEFTOVERS,
    LOCK,
    RunDirectory,
    SocketFile,
    clear,
    clear_orphan,
    of_one_process,
    prepared,
    sweep,
)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's temporary directory for one test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", [FILE, f"api-0{SUFFIX}", *(f"{link.name}-0.sock" for link in LINKS)])
def test_what_others_read_is_a_leftover(name):
    assert sum(fnmatch(name, pattern) for pattern in LEFTOVERS) == 1
    assert not any(fnmatch(LOCK, pattern) or fnmatch("crashes/report.json", pattern) for pattern in LEFTOVERS)


def test_a_temporary_directory_is_private_and_goes_at_the_end(temporary):
    directory = RunDirectory.open("")
    assert directory.path.parent == temporary
    assert mode(directory.path) == 0o700
    (directory.path / "tokens-0.sock").touch()
    assert directory.environment() == {run_directory.TEMPORARY: str(directory.path)}
    directory.close()
    assert list(temporary.iterdir()) == []


def test_a_named_directory_is_made_and_stays(tmp_path):
    directory = RunDirectory.open(str(tmp_path / "a" / "b"))
    assert mode(directory.path) == 0o700
    for name in ("tokens-0.sock", "api-0.metrics", "executor-0.starts", "failures.json", "failures.new", "mine.txt"):
        (directory.path / name).touch()
    assert directory.environment() == {}
    directory.close()
    assert {path.name for path in directory.path.iterdir()} == {"mine.txt", "lock"}


def test_a_directory_has_one_launcher_at_a_time(tmp_path):
    first = RunDirectory.open(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="another `penstock serve` runs there"):
        RunDirectory.open(str(tmp_path / "run"))
    first.close()
    RunDirectory.open(str(tmp_path / "run")).close()


def test_a_directory_that_others_may_enter_is_refused(tmp_path):
    tmp_path.chmod(0o750)
    with pytest.raises(ConfigError, match="its mode must be 0700, not 0750"):
        prepared(tmp_path)


def test_a_link_and_a_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no symbolic link"):
        prepared(tmp_path / "link")
    with pytest.raises(ConfigError, match="it cannot be made: File exists"):
        prepared(tmp_path / "file")


def test_somebody_elses_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="must belong to the user"):
        prepared(tmp_path)


def test_the_longest_path_still_holds_every_socket(tmp_path):
    room = run_directory.SOCKET_PATH_BYTES - run_directory.LONGEST_NAME - 1
    fits = tmp_path / ("x" * (room - len(os.fsencode(tmp_path)) - 1))
    assert prepared(fits) == fits
    for link in LINKS:
        assert len(os.fsencode(address(link, fits, 63).removeprefix("ipc://"))) <= run_directory.SOCKET_PATH_BYTES
    with pytest.raises(ConfigError, match="its path must be 2 bytes shorter"):
        prepared(fits.with_name(fits.name + "xx"))


def test_a_long_temporary_directory_is_passed_over(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + "y" * 100)
    assert str(run_directory.temporary_parent()) == "/tmp"


def test_a_process_alone_takes_the_option_or_what_systemd_made(tmp_path):
    given, made = tmp_path / "given", tmp_path / "made"
    assert of_one_process(str(given), {run_directory.SYSTEMD: str(made)}) == given
    assert of_one_process("", {run_directory.SYSTEMD: f"{made}:/run/other"}) == made
    with pytest.raises(ConfigError, match="--run-dir"):
        of_one_process("", {})


def test_what_killed_launchers_left_is_swept_but_nothing_else(temporary):
    running = RunDirectory.open("")
    killed, fresh, foreign = (temporary / f"penstock-{name}" for name in ("killed", "fresh", "foreign"))
    for path in (killed, fresh, foreign):
        path.mkdir()
    for path in (killed, fresh):
        (path / run_directory.LOCK).touch()
    for path in (killed, foreign, running.path):
        os.utime(path, (1, 1))
    sweep(temporary)
    assert set(temporary.iterdir()) == {running.path, fresh, foreign}
    running.close()


def test_an_orphan_cleans_what_its_launcher_would_have(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text-0.sock").touch()
    clear_orphan(tmp_path / "one", {run_directory.TEMPORARY: str(tmp_path / "one")})
    clear_orphan(tmp_path / "two", {})
    clear(tmp_path / "one", temporary=True)
    assert not (tmp_path / "one").exists()
    assert [path.name for path in (tmp_path / "two").iterdir()] == [run_directory.LOCK]
    clear_orphan(tmp_path / "one", {})
    assert not (tmp_path / "one").exists()


def test_an_orphan_waits_for_the_last_thread_of_its_launcher(tmp_path):
    path = prepared(tmp_path / "run")
    code = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(path / run_directory.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdout.readline()
        letting_go = threading.Timer(0.05, launcher.stdin.close)
        letting_go.start()
        clear_orphan(path, {run_directory.TEMPORARY: str(path), run_directory.PARENT: str(launcher.pid)})
        letting_go.join()
    assert not path.exists()


def test_an_orphan_leaves_what_the_next_launcher_has_made(tmp_path):
    next_one = RunDirectory.open(str(tmp_path / "run"))
    (next_one.path / "steps-0.sock").touch()
    for environ in ({}, {run_directory.TEMPORARY: str(next_one.path)}):
        clear_orphan(next_one.path, environ)
        assert (next_one.path / "steps-0.sock").exists()
    next_one.close()
    clear_orphan(next_one.path, {})


def test_a_directory_made_for_one_run_alone_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "run"
    given.mkdir(mode=0o700)
    monkeypatch.setenv(run_directory.TEMPORARY, str(given))
    directory = RunDirectory.open(str(given))
    assert directory.environment() == {run_directory.TEMPORARY: str(given)}
    directory.close()
    assert not given.exists()


def test_a_socket_file_is_removed_by_who_made_it_alone(tmp_path):
    path = tmp_path / "tokens-0.sock"
    path.touch()
    first = SocketFile(path)
    path.rename(tmp_path / "kept")  # as a socket keeps its file's number while it is open
    path.touch()
    first.remove()
    assert path.exists()
    SocketFile(path).remove()
    assert not path.exists()
    SocketFile(path).remove()
    SocketFile(tmp_path / "kept").remove()
    assert list(tmp_path.iterdir()) == []
