"""Counters and histograms of the requests that one api process has answered."""

from __future__ import annotations

from collections import Counter

from penstock.engine_core.histogram import Histogram

FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
WHOLE_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FETCH = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class ImageTraffic:
    """Images of requests, as far as they were read here."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()  # by where they were: data or url
        self.refused: Counter[str] = Counter()  # by a word for the reason
        self.fetch = Histogram(FETCH)


class Timings:
    """Latencies of streams' tokens, of all responses, and of complete ones."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN)
        self.inter_token = Histogram(INTER_TOKEN)
        self.request = Histogram(WHOLE_REQUEST)
        self.e2e = Histogram(WHOLE_REQUEST)


class Traffic:
    """Responses of this process, and their tokens."""

    def __init__(self) -> None:
        self.timings = Timings()
        self.responses: Counter[tuple[str, int]] = Counter()  # by endpoint and status
        self.rejections: Counter[str] = Counter()  # by an error's code
        self.images = ImageTraffic()
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def answered(
        self,
        endpoint: str,
        status: int,
        prompt_tokens: int,
        completion_tokens: int,
        seconds: float,
        rejection: str = "",
    ) -> None:
        """Count one response. Status 499: the client disconnected. `rejection` is the code of the error that the
        response was or ended with."""
        self.ended(prompt_tokens, completion_tokens, rejection)
        self.responses[endpoint, status] += 1
        self.timings.request.observe(seconds)
        if status == 200 and completion_tokens and not rejection:
            self.timings.e2e.observe(seconds)

    def ended(self, prompt_tokens: int, completion_tokens: int, rejection: str = "") -> None:
        """Count the tokens and the error of a request; one in the background ends after its response."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if rejection:
            self.rejections[rejection] += 1
