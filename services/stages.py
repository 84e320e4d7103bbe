"""The stages of a process's start: told to its supervisor as they begin, and kept with their times."""

from __future__ import annotations

import time

import msgspec

from services import process
from services.notify import progress

IMPORTS = "importing"  # from the process's very beginning


class Stage(msgspec.Struct, frozen=True):
    """One that begins, in monotonic seconds; it ends where the next one begins."""

    name: str
    began: float


class Stages:
    """Of this process. Each is named as the supervisor hears it."""

    def __init__(self) -> None:
        self.all = [Stage(IMPORTS, time.monotonic() - process.age())]

    def begin(self, name: str) -> None:
        """A stage that may take long, which the supervisor is told."""
        progress(name)
        self.note(name)

    def note(self, name: str) -> None:
        """One of which the supervisor knows, or needs not."""
        self.all.append(Stage(name, time.monotonic()))
