"""What must not be left of faults: looks at a server that rests, and at what one has left that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import leftovers
from benchmarks.blows import ROLES
from benchmarks.leftovers import command, grown, processes, remains, rests, settled, soon, whole
from benchmarks.samples import read_samples
from benchmarks.server import Server

WAITS = "import sys; print(flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}, 'scheduler'])"


def health(**change: Any) -> dict[str, Any]:
    engine = {"time": 10.0, "running": 0, "waiting": 0, "blocks": 9, "blocks_free": 4, "blocks_idle": 5}
    found: dict[str, Any] = {
        "ready": True, "capacity": {"unfinished_requests": 0}, "engine": engine,
        "parts": {"tokenizer": {"connected": 2, "configured": 2}},
    }  # fmt: skip
    for name, value in change.items():
        place = next((part for part in (found["capacity"], engine, found["parts"]["tokenizer"]) if name in part), found)
        place[name] = value
    return found


def test_a_server_that_rests() -> None:
    assert whole(health(), 9.0)


@pytest.mark.parametrize(
    "change",
    [{"time": 9.0}, {"running": 1}, {"waiting": 1}, {"blocks_idle": 4}, {"unfinished_requests": 1}, {"ready": False},
     {"connected": 1}, {"engine": None}],
)  # fmt: skip
def test_one_that_does_not(change: dict[str, Any]) -> None:
    assert not whole(health(**change), 9.0)


def samples(**change: float) -> str:
    values = {"engine_blocks": 9, "engine_blocks_free": 4, "engine_blocks_idle": 5, "engine_block_faults_total": 0}
    lines = [f'penstock_{name}{{replica="0"}} {change.get(name, value)}' for name, value in values.items()]
    lines += [f'penstock_unfinished_requests{{api="{api}"}} {change.get("unfinished", 0) * api}' for api in (0, 1)]
    for role in ROLES:
        lines.append(f'penstock_processes{{role="{role}"}} {change.get(role, 2.0)}')
        lines.append(f'penstock_configured_processes{{role="{role}"}} 2.0')
    return "# HELP penstock_processes of them\n" + "\n".join(lines) + "\n"


def test_the_metrics_say_the_same() -> None:
    assert settled(read_samples(samples()))


@pytest.mark.parametrize(
    "change",
    [
        {"engine_blocks_free": 3},
        {"engine_blocks": 0},
        {"engine_block_faults_total": 1},
        {"unfinished": 1},
        {"api": 1.0},
    ],
)
def test_the_metrics_of_a_server_that_does_not_rest(change: dict[str, float]) -> None:
    assert not settled(read_samples(samples(**change)))


def test_a_server_that_does_not_answer_does_not_rest() -> None:
    assert not rests("http://127.0.0.1:1", 0.0)


def test_waiting_has_an_end() -> None:
    turns = iter([False, False, True])
    assert soon(lambda: next(turns), 60.0)
    assert not soon(lambda: False, 0.01)


def test_processes_of_a_role_are_found_below_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "REST_LIMIT", 0.01)
    launcher = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"\n"
        (pid,) = processes(launcher.pid, "scheduler")
        assert b"scheduler" in command(pid)
        assert processes(launcher.pid, "executor") == []
    finally:
        launcher.communicate(timeout=120)
    assert command(pid) == []


def test_memory_that_has_grown() -> None:
    before = {"api-1": 100.0, "executor-2": 500.0, "tokenizer-3": 80.0}
    assert grown(before, {"api-1": 130.0, "tokenizer-3": 113.0}) == ["tokenizer-3 with 113 MiB in place of 80"]


def ended(folder: Path, code: int) -> Server:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    process.wait()
    return Server(process, "", 0.0, folder / "log")


def test_nothing_remains(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    server = ended(tmp_path, 0)
    assert remains(server, [server.pid], tmp_path, None) == []


def test_what_remains_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "END_LIMIT", 0.01)
    monkeypatch.setattr(leftovers, "device_memory", lambda: 900.0)
    (tmp_path / "steps.sock").touch()
    assert remains(ended(tmp_path, 1), [os.getpid()], tmp_path, 100.0) == [
        "an exit with 1", f"process {os.getpid()}", "file steps.sock", "800 MiB of the device's memory",
    ]  # fmt: skip
    assert remains(ended(tmp_path, 0), [], tmp_path, 890.0) == ["file steps.sock"]


def test_a_machine_without_a_gpu_has_no_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert leftovers.device_memory() is None
