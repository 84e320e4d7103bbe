"""The progress of many requests: a bar on a terminal, else a line every few seconds, on standard error; and text that
fits a narrow terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from types import TracebackType

LINE_SECONDS = 5.0


def fitted(text: str) -> str:
    """The text for standard output. On a terminal, lines that are too long go on in the next, at a blank."""
    if not sys.stdout.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(wrapper.fill(line) if len(line) > columns else line for line in text.split("\n"))


class ProgressBar:
    """Shows how many of `total` requests are done, with a note. A context manager."""

    def __init__(self, title: str, total: int, *, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._title, self._total, self._shown = title, total, shown
        self.start = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=total, note="")
        self._live = shown and sys.stderr.isatty()
        self._done = 0

    def __enter__(self) -> ProgressBar:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def show(self, done: int, note: str) -> None:
        """Set the number of requests that are done."""
        self._done = done
        if self._live:
            self._bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._print(note)

    def conclude(self, note: str) -> None:
        """Replace the bar by a last line."""
        if self._live:
            self._bar.stop()
        self._print(note)

    def _print(self, note: str) -> None:
        self._printed = time.monotonic()
        if self._shown:
            print(f"{self._title}: {self._done:,}/{self._total:,} requests, {note}", file=sys.stderr, flush=True)
