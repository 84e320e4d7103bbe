"""`penstock engine` or `penstock serve` as a child process of the program that uses it.

The command ends with the program, however that ends (services/supervisor/launcher.py). The program itself is not
forked or imported again, so a script needs no `if __name__ == "__main__"` guard.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.config import Config, adjusted
from penstock.protocol.errors import LinkError, PenstockError
from penstock.services.supervisor import options, run_directory
from penstock.services.supervisor.launcher import ENTRY, inherited
from penstock.services.supervisor.sd_notify import ERROR_FIELD, NoticeSocket, read_error

END_SECONDS = 15.0  # from SIGTERM to SIGKILL; the engine gives its own processes less
SOCKET = "program.sock"


class LauncherProcess:
    """A running launcher. `notices` and `pidfd` become readable when `poll` should be called."""

    def __init__(self, config: Config, command: str = "engine", environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to the program's."""
        given = config.run.run_dir
        if given:
            self.directory = run_directory.prepared(Path(given))
        else:
            parent = run_directory.temporary_parent()
            run_directory.sweep(parent)
            self.directory = Path(tempfile.mkdtemp(prefix=run_directory.PREFIX, dir=parent))
        self._temporary = not given
        self.config = adjusted(config, run_dir=str(self.directory))
        self.notices = NoticeSocket(self.directory / SOCKET)
        self.ready = False
        self.url = ""  # once a server is ready
        self.failure: PenstockError | None = None  # why it ended, except by `end`
        self._ended = False
        environ = inherited(self.config, self.notices.path)
        environ.pop(run_directory.TEMPORARY, None)
        if self._temporary:
            environ[run_directory.TEMPORARY] = str(self.directory)
        self._process = subprocess.Popen(
            [sys.executable, str(ENTRY), command, *options.arguments(self.config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environ | dict(environment or {}),
            start_new_session=True,  # the program handles Ctrl-C
        )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def poll(self) -> None:
        """Update `ready`, `url` and `failure`."""
        error = ""
        for notice in self.notices.receive():
            if notice.pid == self.pid:
                self.ready = self.ready or notice.ready
                self.url = notice.fields.get("X_PENSTOCK_URL", self.url)
                error = notice.fields.get(ERROR_FIELD, error)
        if error and self.failure is None:
            self.failure = read_error(error)
        if self._process.poll() is not None and self.failure is None and not self._ended:
            self.failure = LinkError(f"the engine ended ({self._process.returncode}) and did not say why")

    def end(self) -> None:
        """End every process, by force after END_SECONDS. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.notices.close()
        os.close(self.pidfd)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
