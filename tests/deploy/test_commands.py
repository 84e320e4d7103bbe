"""The commands of the units, started as systemd would, one by one, with its variables and shut in as the units say:
they get ready, in any order, beat, and end in order."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.supervisor.sd_notify import Notice, NoticeSocket
from tests.deploy.confinement import confinement
from tests.deploy.supervised import LIMIT, TOML, home_in
from tests.deploy.test_systemd import BINARY, ONE_HOST, UNITS, read

WATCHDOG_SECONDS = 2


class Units:
    """A process per unit, and what each told."""

    def __init__(self, folder: Path, toml: str = TOML) -> None:
        folder.mkdir(exist_ok=True)
        self.notices = NoticeSocket(folder / "notify.sock")
        self.told: dict[int, list[Notice]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._home = home_in(folder)
        (folder / "penstock.toml").write_text(toml)
        (folder / "run").mkdir(mode=0o700)

    def start(self, name: str) -> None:
        service = read(UNITS / name)["Service"]
        words = service["ExecStart"][0].replace("%i", "0").split()
        words = [word.replace(BINARY, str(self._home / "bin" / "penstock")) for word in words]
        words = [str(self._folder / "penstock.toml") if word.endswith(".toml") else word for word in words]
        given = dict(variable.replace("%i", "0").split("=", 1) for variable in service.get("Environment", []))
        run_dir = str(self._folder / "run")
        environ = {
            **os.environ, **given, "NOTIFY_SOCKET": str(self.notices.path), "RUNTIME_DIRECTORY": run_dir,
            "WATCHDOG_USEC": str(WATCHDOG_SECONDS * 1_000_000), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self._folder / f"{name}.log").open("wb") as log:
            words = [*confinement(service), *words]
            self.processes[name] = subprocess.Popen(words, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def fields(self, name: str, field: str) -> list[str]:
        """Every value of a field that the unit's process told."""
        notices = self.told.get(self.processes[name].pid, [])
        return [notice.fields[field] for notice in notices if field in notice.fields]

    def until(self, name: str, field: str, count: int = 1) -> None:
        """Listen until the unit has told a field so often."""
        deadline = time.monotonic() + LIMIT
        while len(self.fields(name, field)) < count:
            select.select([self.notices], [], [], 0.5)
            for notice in self.notices.receive():
                self.told.setdefault(notice.pid, []).append(notice)
            ended = [
                (unit, process.returncode) for unit, process in self.processes.items() if process.poll() is not None
            ]
            assert not ended, f"{ended}\n" + "".join(path.read_text() for path in self._folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{name} did not tell {field}: {self.told}"

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.notices.close()


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Units]:
    found = Units(tmp_path_factory.mktemp("units"))
    try:
        # Not the order of the units: without a supervisor's ordering all become ready as well.
        for name in sorted(ONE_HOST):
            found.start(name)
        for name in ONE_HOST:
            found.until(name, "READY")
        yield found
    finally:
        found.close()


def test_all_become_ready_and_serve(units: Units) -> None:
    assert len(units.processes) == 4
    (url,) = set(units.fields("penstock-api@.service", "X_PENSTOCK_URL"))  # every beat says it again
    with urllib.request.urlopen(url + "/health/ready", timeout=30) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("name", ONE_HOST)
def test_each_beats_and_says_how_it_is(units: Units, name: str) -> None:
    units.until(name, "WATCHDOG", len(units.fields(name, "WATCHDOG")) + 3)
    assert units.fields(name, "STATUS")


@pytest.mark.parametrize("name", ONE_HOST)
def test_a_start_that_takes_long_is_waited_for(units: Units, name: str) -> None:
    pid = units.processes[name].pid
    before = units.told[pid][: [notice.ready for notice in units.told[pid]].index(True)]
    assert any("EXTEND_TIMEOUT_USEC" in notice.fields for notice in before)


def test_a_hung_process_is_silent(units: Units) -> None:
    """Stopped, it tells nothing, which is what the supervisor acts on; the last test but one of this file."""
    name = "penstock-tokenizer@.service"
    units.processes[name].send_signal(signal.SIGSTOP)
    other = "penstock-scheduler.service"
    units.until(other, "WATCHDOG", len(units.fields(other, "WATCHDOG")) + 2)  # what it had sent is here by then
    before = len(units.fields(name, "WATCHDOG"))
    units.until(other, "WATCHDOG", len(units.fields(other, "WATCHDOG")) + 4)
    assert len(units.fields(name, "WATCHDOG")) == before
    units.processes[name].send_signal(signal.SIGCONT)
    units.until(name, "WATCHDOG", before + 1)


def test_all_end_in_order_when_they_are_told(units: Units) -> None:
    for role in ("api@", "tokenizer@", "scheduler", "executor@"):
        process = units.processes[f"penstock-{role}.service"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
