"""A `penstock serve` under measurement: its start, its processes' CPU time, its log when something goes wrong."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cpu_seconds import cpu_seconds
from benchmarks.report import ROOT
from penstock.services.supervisor.sd_notify import NoticeSocket

START_LIMIT = 180.0  # seconds
END_LIMIT = 30.0
TAIL = 40  # lines of the log that are shown
MODULES = tuple(f"penstock.services.{role}" for role in (
    "supervisor.launcher", "openai.api_server", "tokenizer.main", "scheduler.main", "executor.main", "executor.startup",
))  # fmt: skip


class Server:
    """A server that is ready."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, seconds: float, log: Path) -> None:
        self.url = url
        self.seconds = seconds  # from the start of the first process to readiness
        self.pid = process.pid
        self._process = process
        self._log = log
        self._told = 0  # bytes of it

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tail(self) -> str:
        """What its log says since the last call, less its lines about requests; the end of that, if it is long."""
        with self._log.open("rb") as file:
            file.seek(self._told)
            lines = file.read().decode(errors="replace").splitlines()
            self._told = file.tell()
        return "\n".join([line for line in lines if " request id=" not in line][-TAIL:])

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def lines(self, words: str) -> list[str]:
        """The lines of its whole log that have these words."""
        with self._log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in file if words in line]

    def logged(self, words: str) -> int:
        """How many lines of its whole log have these words."""
        return len(self.lines(words))

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of user and system that each role's processes have taken since they started."""
        return cpu_seconds(self._process.pid)


@contextmanager
def serving(arguments: Sequence[str], environ: Mapping[str, str] | None = None, root: Path = ROOT) -> Iterator[Server]:
    """`penstock serve` of the tree `root` on a free port, ready. Raises TimeoutError with the end of its log when it is
    not in time."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        notices, log = NoticeSocket(Path(place) / "notify.sock"), Path(place) / "log"
        environment = {**os.environ, **(environ or {}), "NOTIFY_SOCKET": str(notices.path), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *arguments]
        start = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            url = ready_url(process, notices, start + START_LIMIT)
            server = Server(process, url, time.monotonic() - start, log)
            if not url:
                raise TimeoutError(f"penstock serve did not become ready:\n{server.tail()}")
            yield server
        finally:
            end(process)
            notices.close()


def with_bytecode(place: Path, modules: Sequence[str] = MODULES) -> dict[str, str]:
    """Variables of the environment with which a server finds bytecode below `place` where this Python is told to keep
    none. Installers leave it beside what they install; without it a process imports for twice as long."""
    if not sys.dont_write_bytecode:
        return {}
    kept = {"PYTHONPYCACHEPREFIX": str(place / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", "import " + ", ".join(modules)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **kept}, check=True)
    return kept


def ready_url(process: subprocess.Popen[bytes], notices: NoticeSocket, deadline: float) -> str:
    """The address that came with the server's readiness; empty when it ended or the deadline passed."""
    url = ""
    while time.monotonic() < deadline and process.poll() is None:
        select.select([notices.fileno()], [], [], 0.5)
        for notice in notices.receive():
            url = notice.fields.get("X_PENSTOCK_URL", url)
            if notice.ready and notice.pid == process.pid:
                return url
    return ""


def end(process: subprocess.Popen[bytes], seconds: float = END_LIMIT) -> None:
    """End a server in order, by force if that takes longer."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
