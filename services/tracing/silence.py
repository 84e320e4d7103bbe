"""What one process of a server learned of its collector when it ended, for those that end after it.

A server's processes end one by one, so a collector that hangs would cost its stop every one's last words. The first
one that waited for nothing leaves word in the run directory; whoever ends soon after does not wait.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.services.supervisor import run_directory

NAME = "collector.silent"
RECENT = 30.0  # seconds for which the word counts; a stop takes less, and by then a collector may be back


class Silence:
    """The word of one run directory; without one it is neither left nor found."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / NAME

    def note(self) -> None:
        """The collector took nothing in all the time that there was."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the directory is gone: so are those who would look there
                self._file.touch(mode=0o600)

    def known(self) -> bool:
        """Whether a process of this server has noted it just now."""
        if self._file is None:
            return False
        try:
            return abs(time.time() - self._file.stat().st_mtime) < RECENT
        except OSError:
            return False


def silence_of(environ: Mapping[str, str] = os.environ) -> Silence:
    """That of the server whose process this is."""
    directory = environ.get(run_directory.SHARED, "")
    return Silence(Path(directory) if directory else None)
