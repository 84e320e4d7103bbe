"""How long prompts and outputs are, observed where a choice ends."""

from __future__ import annotations

import msgspec

from penstock.engine_core.histogram import Histogram
from penstock.engine_core.scheduling.request import Choice
from penstock.protocol.figures import HistogramStatistics
from penstock.protocol.messages import Finish

TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
)  # fmt: skip


class LengthStatistics(msgspec.Struct, frozen=True):
    """Tokens of choices that ended here, once each."""

    prompt: HistogramStatistics
    output: HistogramStatistics  # what makes a vector has none


class Lengths:
    """Owner of the counts. Who was cut off says nothing of how long such a request is."""

    def __init__(self) -> None:
        self._prompt = Histogram(TOKENS)
        self._output = Histogram(TOKENS)

    def end(self, choice: Choice, finish: Finish) -> None:
        """It is over."""
        if finish not in (Finish.STOP, Finish.LENGTH):
            return
        self._prompt.observe(choice.request.prompt_tokens)
        if not choice.request.pools:
            self._output.observe(choice.outputs)

    def statistics(self) -> LengthStatistics:
        return LengthStatistics(self._prompt.statistics(), self._output.statistics())
