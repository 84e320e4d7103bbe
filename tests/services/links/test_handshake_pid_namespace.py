"""Processes are watched where their pid names them, however many descriptors are open."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.links import handshake

BEYOND = 1100  # more descriptors than select(2) knows


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_a_place_is_the_same_for_processes_that_see_one_another() -> None:
    script = "from penstock.services.links.handshake import pid_namespace; print(pid_namespace())"
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert int(there.stdout) == handshake.pid_namespace() != 0


def test_another_namespace_and_another_boot_are_other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, namespace = tmp_path / "boot_id", tmp_path / "pid"
    boot.write_text("one\n")
    namespace.symlink_to("pid:[1]")
    monkeypatch.setattr(handshake, "BOOT", boot)
    monkeypatch.setattr(handshake, "NAMESPACE", namespace)
    found = {handshake.pid_namespace()}
    boot.write_text("another\n")
    found.add(handshake.pid_namespace())
    namespace.unlink()
    namespace.symlink_to("pid:[2]")
    found.add(handshake.pid_namespace())
    assert len(found) == 3
    boot.unlink()
    assert handshake.pid_namespace() == 0


def test_only_a_process_of_this_place_is_watched(child: subprocess.Popen[bytes]) -> None:
    assert handshake.open_pidfd(child.pid, handshake.pid_namespace() ^ 1) is None
    assert handshake.open_pidfd(child.pid, 0) is None
    found = handshake.open_pidfd(child.pid, handshake.pid_namespace())
    assert found is not None
    os.close(found)


def test_one_that_has_ended_and_was_reaped_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert handshake.open_pidfd(process.pid, handshake.pid_namespace()) is None


def test_an_end_is_seen_also_beyond_a_thousand_descriptors(child: subprocess.Popen[bytes]) -> None:
    before = soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= BEYOND:
        pytest.skip("this user may not open as many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, BEYOND + 1), most))
    pidfd = handshake.open_pidfd(child.pid, handshake.pid_namespace())
    assert pidfd is not None
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, BEYOND)
    try:
        assert not handshake.ended(high)
        child.kill()
        child.wait()
        assert handshake.ended(high)
    finally:
        os.close(high)
        os.close(pidfd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
