"""What an api process tells of itself, and all that it knows of the others."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.figures import ProcessFigures
from penstock.services.client.engine_client import PipelineStatistics
from penstock.services.http.accept import RoomStatistics
from penstock.services.links.async_link import Watch
from penstock.services.metrics.snapshot import Vitals, add_link
from penstock.services.openai.responses.store import ResponseStore


class Figures:
    """The process's own. `watches` are its ends of the text link, one for each tokenizer."""

    def __init__(self, vitals: Vitals, watches: Sequence[Watch], responses: ResponseStore | None = None) -> None:
        self._vitals = vitals
        self._watches = tuple(watches)
        self._responses = responses

    def own(self, pipeline: PipelineStatistics, room: RoomStatistics, wall: float, *, ready: bool) -> ProcessFigures:
        """As of now, `wall` in unix seconds; `ready`: it takes requests."""
        sheet = self._vitals.sheet()
        queued = pipeline.held + pipeline.aborts_owed
        add_link(sheet, "text", [watch.statistics() for watch in self._watches], queued)
        sheet.put("waiting_requests", pipeline.held, "tokenizer")
        sheet.put("api_ready", ready)
        if self._responses is not None:
            stored = self._responses.statistics()
            sheet.put("stored_responses", stored.responses)
            sheet.put("stored_response_bytes", stored.bytes)
            sheet.put("stored_response_evictions", stored.evicted)
            sheet.put("stored_response_losses", stored.lost)
        sheet.put("connections", room.open)
        sheet.put("connections_limit", room.limit)
        sheet.put("accept_waits", room.waits)
        sheet.put("accept_failures", room.failures)
        return sheet.figures(self._vitals.me, wall)
