"""The command itself, as a person runs it: through pipes, or on a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 120.0  # seconds
AGAIN = 10.0  # seconds


def penstock(*words: str, given: str = "", key: str = "open", **environ: str) -> subprocess.CompletedProcess[str]:
    """One run with `given` piped in."""
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words], input=given, capture_output=True, text=True, timeout=LIMIT,
        cwd=ROOT, env={**os.environ, "PENSTOCK_API_KEY": key, **environ}, check=False,
    )  # fmt: skip


class Terminal:
    """A run whose standard streams are a terminal."""

    def __init__(self, *words: str) -> None:
        self.process_id, self._descriptor = pty.fork()
        if not self.process_id:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells let background jobs ignore it
            os.chdir(ROOT)
            os.environ |= {"PENSTOCK_API_KEY": "open", "TERM": "dumb"}
            os.execv(sys.executable, [sys.executable, "-m", "penstock", *words])
        self.seen = ""

    def until(self, text: str, start: int = 0, again: str = "") -> int:
        """Read on until `text` was shown behind position `start`; where it ends. More may have been shown by then.

        `again`: keys typed once more when nothing has come of them for AGAIN seconds: Python's readline forgets
        a Ctrl-C that comes while it writes a key, until the next one.
        """
        deadline = time.monotonic() + LIMIT
        while text not in self.seen[start:]:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._descriptor], [], [], min(left, AGAIN) if again else left)
            if not ready and again and left > AGAIN:
                self.type(again)
                continue
            assert ready, self.seen
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:
                data = b""
            assert data, self.seen
            self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return self.seen.index(text, start) + len(text)

    def type(self, text: str) -> int:
        """Type; the length of what had been shown."""
        shown = len(self.seen)
        os.write(self._descriptor, text.encode())
        return shown

    def ended(self) -> int:
        """The exit code."""
        while select.select([self._descriptor], [], [], LIMIT)[0]:
            try:
                if not os.read(self._descriptor, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.process_id, 0)
        self.process_id = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.process_id:
            os.kill(self.process_id, signal.SIGKILL)
            os.waitpid(self.process_id, 0)
        os.close(self._descriptor)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    found = Terminal(*words)
    try:
        yield found
    finally:
        found.close()
