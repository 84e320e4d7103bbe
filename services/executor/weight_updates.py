"""Looks at folders of weights and reads them into the model, when the scheduler asks and no step is left to run."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path

from penstock.engine_core.loading.live import LiveWeights
from penstock.protocol.control import FIRST_VERSION, CheckWeights, WeightsAnswer, WriteWeights
from penstock.protocol.errors import ModelError
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)


class BrokenWeights(RuntimeError):
    """A folder could not be read to its end. The model is of no folder now: the process ends, and begins anew."""


class WeightUpdates:
    """Which weights this executor has."""

    def __init__(self, weights: LiveWeights) -> None:
        self._weights = weights
        self._asked: deque[CheckWeights | WriteWeights] = deque()
        self.answers: deque[WeightsAnswer] = deque()
        self.path = ""  # empty: those that it began with
        self.version = FIRST_VERSION

    @property
    def busy(self) -> bool:
        """Whether something is to be done, or to be answered."""
        return bool(self._asked or self.answers)

    def ask(self, message: CheckWeights | WriteWeights) -> None:
        self._asked.append(message)

    def forget(self) -> None:
        """A new scheduler asks for itself; what has been written is in what it is told first."""
        self._asked.clear()
        self.answers.clear()

    def run(self) -> bool:
        """Do the next thing that was asked for; whether weights were written. Raises BrokenWeights."""
        if not self._asked:
            return False
        asked = self._asked.popleft()
        folder = Path(asked.path) if asked.path else self._weights.folder
        error = ""
        if isinstance(asked, CheckWeights):
            try:
                self._weights.check(folder)
            except ModelError as found:
                logs.warning(log, "weights_refused", path=str(folder), reason=str(found))
                error = str(found)
        else:
            began = time.monotonic()
            try:
                self._weights.write(folder)
            except (ModelError, OSError) as found:
                raise BrokenWeights(f"{found}; the weights are of neither folder") from found
            self.path, self.version = asked.path, asked.version
            seconds = round(time.monotonic() - began, 3)
            logs.info(log, "weights_written", path=str(folder), version=asked.version, seconds=seconds)
        self.answers.append(WeightsAnswer(asked.number, error))
        return isinstance(asked, WriteWeights)
