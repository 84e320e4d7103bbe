"""The supervisord of `deploy/supervisord.conf`, run for real over the embedded model."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.e2e.server import descendants

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "deploy" / "supervisord.conf"
LIMIT = 120.0  # seconds for anything; a loaded two-core machine needs some of them
ROLES = ("api", "tokenizer", "scheduler", "executor")
TOML = """
[api]
port = 0
api_processes = 1
[tokenizer]
tokenizer_processes = 1
[executor]
device = "cpu"
"""


class Supervised:
    """A supervisord with its programs, and what they told of themselves through NOTIFY_SOCKET."""

    def __init__(
        self,
        folder: Path,
        process: subprocess.Popen[bytes],
        environ: dict[str, str],
        notices: NoticeSocket,
        conf: Path,
        roles: Sequence[str],
    ):
        self.process = process
        self.roles = tuple(roles)
        self._conf = conf
        self.log = folder / "log"
        self.run_dir = folder / "run"
        self.url = ""
        self._environ = environ
        self._notices = notices
        self._ready: set[int] = set()
        threading.Thread(target=self._listen, name="notices", daemon=True).start()

    def _listen(self) -> None:
        """Take every notice as it comes: the kernel keeps ten, and a process drops its own where there is no room."""
        while True:
            try:
                select.select([self._notices], [], [], 1.0)
                found = self._notices.receive()
            except (OSError, ValueError):  # closed
                return
            for notice in found:
                self.url = notice.fields.get("X_PENSTOCK_URL", self.url)
                if notice.ready:
                    self._ready.add(notice.pid)

    def control(self, *words: str) -> str:
        """What `supervisorctl` prints."""
        command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self._conf), *words]
        ran = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=LIMIT, check=False)
        return ran.stdout + ran.stderr

    def pids(self) -> dict[str, int]:
        """Pid of each program's process, by role."""
        found = {}
        for pid in descendants(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            for role in self.roles:
                if role.encode() in words[:4]:
                    found.setdefault(role, pid)
        return found

    def serving(self, *fresh: str, old: dict[str, int] | None = None) -> dict[str, int]:
        """Wait until every role has a process that is ready, those of `fresh` another than in `old`, and requests are
        taken; their pids."""
        deadline = time.monotonic() + LIMIT
        while True:
            select.select([], [], [], 0.05)
            pids = self.pids()
            whole = len(pids) == len(self.roles) and self._ready >= set(pids.values())
            if whole and not any((old or {}).get(role) == pids[role] for role in fresh) and self.answers():
                return pids
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{pids}, ready {self._ready}:\n{self.log.read_text()}"

    def until_url(self) -> None:
        """Wait until an api process listens and is ready."""
        deadline = time.monotonic() + LIMIT
        while not (self.url and self.answers()):
            assert time.monotonic() < deadline, self.log.read_text()
            select.select([], [], [], 0.05)

    def until(self, done: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a /health of which `done` holds."""
        deadline = time.monotonic() + LIMIT
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=30) as answer:
                    found = json.load(answer)
            except urllib.error.HTTPError as error:
                found = json.load(error)
            if done(found):
                return
            assert time.monotonic() < deadline, found
            select.select([], [], [], 0.02)

    def logged(self, words: str, times: int) -> None:
        """Wait until these words stand in the log so often."""
        deadline = time.monotonic() + LIMIT
        while self.log.read_text().count(words) < times:
            assert time.monotonic() < deadline, self.log.read_text()
            select.select([], [], [], 0.02)

    def answers(self) -> bool:
        """Whether requests are taken, where there is an api to take them."""
        if "api" not in self.roles:
            return True
        try:
            with urllib.request.urlopen(self.url + "/health/ready", timeout=30):
                return True
        except (urllib.error.URLError, OSError):
            return False


def home_in(folder: Path) -> Path:
    """What an operator's virtual environment has: bin/penstock."""
    binary = folder / "home" / "bin" / "penstock"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "penstock/__main__.py"}" "$@"\n')
    binary.chmod(0o755)
    return binary.parent.parent


@contextmanager
def supervised(
    folder: Path, *, conf: Path = CONF, toml: str = TOML, roles: Sequence[str] = ROLES
) -> Iterator[Supervised]:
    """supervisord with the programs of `deploy/`, started; whatever is left of it at the end is killed."""
    run_dir, config = folder / "run", folder / "penstock.toml"
    run_dir.mkdir(mode=0o700, parents=True)
    config.write_text(toml)
    notices = NoticeSocket(folder / "notify.sock")
    environ = {
        **os.environ, "PENSTOCK_HOME": str(home_in(folder)), "PENSTOCK_CONFIG": str(config),
        "PENSTOCK_RUN": str(run_dir), "NOTIFY_SOCKET": str(notices.path), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / "log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(conf)],
            stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=folder,
        )  # fmt: skip
    try:
        yield Supervised(folder, process, environ, notices, conf, roles)
    finally:
        left = descendants(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        notices.close()
