"""A measured server: CPU time by role, the log of a failure, a start that fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import server
from benchmarks.cpu_seconds import children, cpu_seconds
from benchmarks.report import ROOT
from benchmarks.server import MODULES, Server, end, ready_url, serving, with_bytecode
from penstock.services.supervisor.sd_notify import NoticeSocket

SAYS = """
import os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    for text in sys.argv[1:]:
        sender.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
sys.stdin.read()
"""
LAUNCHER = """
import subprocess, sys
spin = "import sys, time\\nwhile time.process_time() < 0.2: pass\\nprint('spun', flush=True)\\nsys.stdin.read()"
api = subprocess.Popen([sys.executable, "-c", spin, "api"], stdin=subprocess.PIPE)
sys.stdin.read()
api.stdin.close()
api.wait()
"""


def test_cpu_time_is_told_by_role() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"spun\n"
        found = cpu_seconds(launcher.pid)
        assert set(found) == {"launcher", "api"}
        assert found["api"] >= 0.15
        assert len(children(launcher.pid)) == 1
    finally:
        launcher.communicate(timeout=120)


def test_a_process_that_is_gone_costs_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds(gone.pid) == {}
    assert children(gone.pid) == []


def test_the_tail_is_what_is_new_and_not_about_requests(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n2026 info api-0 request id=1 status=200\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    found = Server(process, "", 0.0, log)
    assert found.tail() == "one"
    with log.open("a") as file:
        file.write("\n".join(map(str, range(100))))
    assert found.tail().splitlines() == [str(number) for number in range(100 - server.TAIL, 100)]
    assert found.tail() == ""
    process.wait()
    assert not found.running


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TimeoutError, match="architectures"), serving([str(tmp_path)]):
        raise AssertionError("it cannot start")


def test_a_server_that_does_not_end_is_killed() -> None:
    deaf = "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    end(process, 0.2)
    assert process.returncode == -9
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    assert os.getpid() not in children(os.getpid())


@pytest.mark.parametrize(
    ("said", "url"),
    [(["X_PENSTOCK_URL=http://x", "READY=1"], "http://x"), (["READY=1\nX_PENSTOCK_URL=http://y"], "http://y")],
)
def test_the_url_comes_with_readiness(tmp_path: Path, said: list[str], url: str) -> None:
    notices = NoticeSocket(tmp_path / "s")
    process = subprocess.Popen([sys.executable, "-c", SAYS, *said], env={"NOTIFY_SOCKET": str(tmp_path / "s")},
                              stdin=subprocess.PIPE)  # fmt: skip
    try:
        assert ready_url(process, notices, time.monotonic() + 120) == url
    finally:
        process.communicate(timeout=120)
        notices.close()


def test_a_server_that_ends_is_told(tmp_path: Path) -> None:
    notices = NoticeSocket(tmp_path / "s")
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert ready_url(process, notices, time.monotonic() + 120) == ""
    finally:
        process.wait(120)
        notices.close()


def test_bytecode_is_kept_where_python_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert with_bytecode(tmp_path) == {}
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    kept = with_bytecode(tmp_path, ("penstock.services.supervisor.restart_policy",))
    assert {path.name.partition(".")[0] for path in tmp_path.rglob("restart_policy.*.pyc")} == {"restart_policy"}
    script = "import sys, penstock.services.supervisor.restart_policy\n"
    script += "print(sys.pycache_prefix, sys.dont_write_bytecode)"
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **kept},
                           capture_output=True, text=True, check=True)  # fmt: skip
    assert found.stdout.split() == [str(tmp_path / "bytecode"), "False"]
    assert all(importlib.util.find_spec(module) for module in MODULES)
