"""How far a run is: a bar on a terminal, a line every few seconds anywhere else. Written to standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.load.worker import Progress as Report

LINE_SECONDS = 5.0


class Meter:
    """Shows the reports of one run: requests finished, failed and open, chunks with tokens per second."""

    def __init__(self, title: str, requests: int) -> None:
        self._title, self._requests = title, requests
        self._start = self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"), TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=requests, said="")
        self._live = sys.stderr.isatty()

    def __enter__(self) -> Meter:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        if self._live:
            self._bar.stop()

    def show(self, report: Report) -> None:
        now = time.monotonic()
        rate = report.events / max(now - self._start, 1e-9)
        failed = f", {report.failed} failed" if report.failed else ""
        said = f"{report.open} open{failed}, {rate:,.0f} tok/s so far"
        if self._live:
            self._bar.update(self._task, completed=report.finished, said=said)
        elif now - self._printed >= LINE_SECONDS:
            self._printed = now
            print(f"{self._title}: {report.finished}/{self._requests} requests, {said}", file=sys.stderr, flush=True)
