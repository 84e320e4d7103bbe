"""What an api process tells of itself, and all that it knows of the others."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.figures import ProcessFigures
from services.api.pipeline import PipelineStatistics
from services.census import Vitals, add_link
from services.watch import Watch


class Figures:
    """The process's own. `watches` are its ends of the text link, one for each tokenizer."""

    def __init__(self, vitals: Vitals, watches: Sequence[Watch]) -> None:
        self._vitals = vitals
        self._watches = tuple(watches)

    def own(self, pipeline: PipelineStatistics, wall: float, *, ready: bool) -> ProcessFigures:
        """As of now, `wall` in unix seconds; `ready`: it takes requests."""
        sheet = self._vitals.sheet()
        queued = pipeline.held + pipeline.aborts_owed
        add_link(sheet, "text", [watch.statistics() for watch in self._watches], queued)
        sheet.put("waiting_requests", pipeline.held, "tokenizer")
        sheet.put("api_ready", ready)
        return sheet.figures(self._vitals.me, wall)
