from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.protocol.config import RunConfig
from penstock.protocol.links import Role
from penstock.services.supervisor import process
from penstock.services.supervisor.process import PARENT, ExitCode, Stop, follow_parent, orphaned

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 60.0
FOLLOWER = """
import os, signal, sys
from penstock.services.supervisor import process
process.follow_parent()
print(os.getpid(), flush=True)
signal.pause()
"""
WATCHER = """
import select
from penstock.services.supervisor import process
found = process.parent()
print(flush=True)
select.select([found], [], [])
print(process.orphaned(), flush=True)
"""
LAUNCHER = """
import os, subprocess, sys, threading, time
for _ in range(4):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
from penstock.services.supervisor.process import PARENT
environ = {**os.environ, PARENT: sys.argv[2] or str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environ)
sys.exit(child.wait())
"""


@pytest.fixture
def stop():
    opened = Stop(once=False)
    yield opened
    opened.close()


def test_starts_are_counted_by_process(tmp_path):
    file, other = process.starts_file(tmp_path, Role.API, 0), process.starts_file(tmp_path, Role.API, 1)
    assert process.starts(file) == 0
    for _ in range(3):
        process.count_start(file)
    process.count_start(other)
    assert (process.starts(file), process.starts(other)) == (3, 1)
    process.leave(Role.API, 1, RunConfig(run_dir=str(tmp_path)))
    assert process.starts(other) == 0
    process.count_start(other)
    file.write_text("not a number")
    process.count_start(file)
    assert process.starts(file) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"api-0.starts", "api-1.starts"}


def test_a_signal_wakes_a_loop_and_is_counted(stop):
    assert not stop.asked
    assert select.select([stop], [], [], 0)[0] == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert select.select([stop], [], [], LIMIT)[0] == [stop]
    assert stop.asked
    stop.drain()
    assert select.select([stop], [], [], 0)[0] == []
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.count == 2


def test_closing_gives_the_signals_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    Stop().close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_of_a_process_is_its_end(first, second):
    code = "import os, signal\nfrom penstock.services.supervisor.process import Stop\nstop = Stop()\n"
    code += f"os.kill(os.getpid(), {first:d})\nassert stop.asked\nos.kill(os.getpid(), {second:d})\n"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=LIMIT, check=False)
    assert found.returncode == -second


def follower(parent: str, child: str = FOLLOWER) -> subprocess.Popen[str]:
    """A launcher of several threads, and its child."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, child, parent], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_child_dies_with_its_launcher():
    launcher = follower("")
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    descriptor = os.pidfd_open(child)
    launcher.kill()
    launcher.wait()
    assert select.select([descriptor], [], [], LIMIT)[0]
    os.close(descriptor)
    launcher.stdout.close()


def test_a_killed_launcher_has_ended_once_its_last_thread_has():
    """Its threads end one after the other; until the last one has, the child is not an orphan."""
    with follower("", WATCHER) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.kill()
        assert launcher.stdout.readline() == "True\n"


def test_a_child_whose_launcher_is_gone_already_does_not_start():
    with follower("1") as launcher:
        assert launcher.wait(LIMIT) == ExitCode.FAILED
        assert launcher.stdout is not None
        assert launcher.stdout.read() == ""


def test_without_a_launcher_nobody_is_followed():
    follow_parent({})
    assert not orphaned({})
    assert not orphaned({PARENT: str(os.getppid())})
    assert orphaned({PARENT: "1"}) == (os.getppid() != 1)


def test_the_age_of_a_process_counts_from_its_start():
    first = process.age()
    assert 0 < first < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert process.age() >= first


def test_a_parents_end_turns_a_descriptor_readable() -> None:
    assert process.parent({}) is None
    found = process.parent({process.PARENT: str(os.getppid())})
    assert found is not None
    assert select.select([found], [], [], 0)[0] == []
    os.close(found)


def test_a_parent_that_is_not_ours_has_ended() -> None:
    with pytest.raises(SystemExit):
        process.parent({process.PARENT: str(os.getpid())})
    with pytest.raises(SystemExit):
        process.parent({process.PARENT: str(2**22 + 1)})
