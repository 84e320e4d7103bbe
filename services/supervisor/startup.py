"""The stages of a process's start: told to its supervisor as they begin, and kept with their times."""

from __future__ import annotations

import time

import msgspec

from penstock.services.supervisor import process
from penstock.services.supervisor.sd_notify import progress

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

    def took(self, now: float) -> str:
        """What each of them took until `now`, in words for the log."""
        ends = [*(stage.began for stage in self.all[1:]), now]
        return ", ".join(f"{stage.name} {end - stage.began:.2f} s" for stage, end in zip(self.all, ends, strict=True))
