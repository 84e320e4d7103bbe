"""Counters and histograms of one api process."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.engine_core.histogram import Histogram

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
WHOLE_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Timings:
    """How long clients wait: for tokens where they are streamed, since only then somebody sees them come; for any
    response; for those that brought all the tokens that there were."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.request = Histogram(WHOLE_REQUEST)
        self.e2e = Histogram(WHOLE_REQUEST)


class TrafficStatistics(msgspec.Struct, frozen=True):
    """Responses by endpoint and status, and the tokens that went through this process."""

    responses: dict[tuple[str, int], int]
    prompt_tokens: int
    completion_tokens: int
    departures: int
    rejections: dict[str, int]  # by reason: an error's code


class Traffic:
    """What this process has answered."""

    def __init__(self) -> None:
        self.timings = Timings()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._departures = 0
        self._rejections: Counter[str] = Counter()

    def answered(
        self,
        endpoint: str,
        status: int,
        prompt_tokens: int,
        completion_tokens: int,
        seconds: float,
        rejection: str = "",
    ) -> None:
        """Count one response. Status 499 is a client that left; `rejection` says why it is, or ended with, an error."""
        self._responses[endpoint, status] += 1
        self._departures += status == 499
        self.timings.request.observe(seconds)
        self.ended(prompt_tokens, completion_tokens, rejection)
        if status == 200 and completion_tokens and not rejection:
            self.timings.e2e.observe(seconds)

    def ended(self, prompt_tokens: int, completion_tokens: int, rejection: str = "") -> None:
        """Count what a request came to. One in the background comes to it behind its response."""
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        if rejection:
            self._rejections[rejection] += 1

    def statistics(self) -> TrafficStatistics:
        return TrafficStatistics(
            dict(self._responses),
            self._prompt_tokens,
            self._completion_tokens,
            self._departures,
            dict(self._rejections),
        )
