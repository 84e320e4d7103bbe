"""How far a run of many requests is: a bar on a terminal, a line every few seconds anywhere else, on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

LINE_SECONDS = 5.0


class Meter:
    """Shows how many of `total` requests are done, and `said` beside it. Use as a context manager."""

    def __init__(self, title: str, total: int, *, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._title, self._total, self._shown = title, total, shown
        self.start = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=total, said="")
        self._live = shown and sys.stderr.isatty()
        self._done = 0
        self._said = ""

    def __enter__(self) -> Meter:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def show(self, done: int, said: str) -> None:
        """So many are done now."""
        self._done, self._said = done, said
        if self._live:
            self._bar.update(self._task, completed=done, said=said)
        elif self._shown and time.monotonic() - self._printed >= LINE_SECONDS:
            self._print()

    def conclude(self, said: str) -> None:
        """The last word; it stays on the terminal."""
        self._said = said
        if self._live:
            self._bar.stop()
        if self._shown:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        print(f"{self._title}: {self._done:,}/{self._total:,} requests, {self._said}", file=sys.stderr, flush=True)
