"""A real `penstock serve` for tests: every process, real sockets, a free port, readiness through NOTIFY_SOCKET."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import server
from benchmarks.samples import scrape, total
from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.e2e.chaos import faulty

ONE_EACH = ("--api-processes", "1", "--tokenizer-processes", "1")  # unless a test asks for more
FAULTY = Path(faulty.__file__)  # an entry whose executors fail, or take their time, at will
LIMIT = 120.0  # seconds for anything that a test waits for; a loaded two-core machine needs some of them


class Server:
    """A running server and what a test asks of it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, run_dir: Path, seconds: float) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.run_dir = run_dir
        self.start_seconds = seconds

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=LIMIT) as answer:
            return json.load(answer)

    def aborted(self) -> int:
        """Requests that the engine has ended because nobody takes their output any more."""
        return int(total(scrape(self.url), "engine_aborted_total"))

    def children(self) -> dict[str, int]:
        """Pid of every child process by its role, e.g. "scheduler"."""
        found = {}
        for pid in descendants(self.process.pid):
            words = command_line(pid)
            for role in (b"api", b"tokenizer", b"scheduler", b"executor"):
                if role in words:
                    found[role.decode()] = pid
        return found

    def slow(self) -> AbstractContextManager[None]:
        """Executors of FAULTY take long for each step, so that what runs does not end by itself."""
        return faulty.slow(self.log.parent)

    @contextmanager
    def no_restarts(self) -> Iterator[None]:
        """Whoever dies meanwhile is started again afterwards: the launcher stands still."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def logged(self, words: str, times: int = 1) -> None:
        """Wait until these words stand in the log, so often."""
        deadline = time.monotonic() + LIMIT
        while self.log.read_text().count(words) < times:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{words!r} is not {times} times in the log:\n{self.log.read_text()}")
            select.select([], [], [], 0.02)

    def healthy(self) -> None:
        """Wait until every part is there and requests are taken."""
        self.until("/health", lambda _: True)

    def until(self, path: str, done: Any) -> Any:
        """The first answer of GET `path` for which `done(answer)` holds; asks again as soon as it has an answer. One
        that is no success, or that breaks off, is none yet."""
        deadline, answer = time.monotonic() + LIMIT, None
        while True:
            try:
                answer = self.get(path)
                if done(answer):
                    return answer
            except OSError as error:
                answer = error
            assert time.monotonic() < deadline, f"{path} stayed at {answer}"
            select.select([], [], [], 0.02)


def descendants(pid: int) -> list[int]:
    """Pids of all living children, grandchildren and so on."""
    found = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    for child in map(int, children):
        found += [child, *descendants(child)]
    return found


def command_line(pid: int) -> list[bytes]:
    """The words that a process was started with; none once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


@contextmanager
def serving(
    folder: Path, *arguments: str, model: str = "", entry: Path | None = None, apart: bool = False
) -> Iterator[Server]:
    """`penstock serve` with `arguments`, ready; ended with SIGTERM, and by force if that takes too long.

    `entry` is run in place of penstock/__main__.py. `server.log` has all it says, or with `apart` what it logs alone.
    """
    notices = NoticeSocket(folder / "notify.sock")
    run_dir = folder / "run"
    log = folder / "server.log"
    command = [sys.executable, *([str(entry)] if entry else ["-m", "penstock"]), "serve", *([model] if model else [])]
    command += ["--port", "0", "--run-dir", str(run_dir), *ONE_EACH, *arguments]
    environment = {**os.environ, "NOTIFY_SOCKET": str(notices.path), "NO_COLOR": "1", faulty.FAULTS: str(folder)}
    started = time.monotonic()
    with log.open("wb") as errors, (folder / "stdout").open("wb") as out:
        process = subprocess.Popen(command, stdout=out if apart else errors, stderr=errors, env=environment)
    try:
        url = ready_url(notices, process, log)
        yield Server(process, url, log, run_dir, time.monotonic() - started)
    finally:
        end(process)
        notices.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """With SIGTERM, and by force if that takes too long; no child of its outlives it."""
    orphans = descendants(process.pid)
    server.end(process, LIMIT)
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ready_url(notices: NoticeSocket, process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for READY=1 and return the address that came with it."""
    deadline = time.monotonic() + LIMIT
    url = ""
    while True:
        select.select([notices], [], [], 0.5)
        for notice in notices.receive():
            url = notice.fields.get("X_PENSTOCK_URL", url)
            if notice.ready and url:
                return url
        assert process.poll() is None, f"penstock serve ended with {process.returncode}:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not ready after {LIMIT} s:\n{log.read_text()}"
