"""Does to the weights what the scheduler asks for: looks at folders and tensors, reads them into the model, sums it up.
It meets trainers beside the steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from threading import Thread

from penstock.engine_core.distributed.update_group import UpdateGroup
from penstock.engine_core.loading.live import LiveWeights
from penstock.protocol.control import (
    FIRST_VERSION,
    IN_MEMORY,
    PARTIAL,
    Asked,
    CheckWeights,
    MeetTrainer,
    SumWeights,
    WeightsAnswer,
    WriteWeights,
)
from penstock.protocol.errors import ModelError
from penstock.services.executor.kept_weights import KeptWeights
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

NO_GROUP = "there is no group {!r} of a trainer's: join it by POST /init_weights_update_group"


class BrokenWeights(RuntimeError):
    """Weights could not be read to their end. The model is of no version now: the process ends, and begins anew."""


class WeightUpdates:
    """Which weights this executor has, and the trainers' groups that it is in."""

    def __init__(
        self, weights: LiveWeights, index: int = 0, path: str = "", version: str = FIRST_VERSION,
        kept: KeptWeights | None = None,
    ) -> None:  # fmt: skip
        """path, version: what the weights are now. kept: the copy of them that is wrong once others are written."""
        self._weights = weights
        self._index = index  # of this executor
        self._kept = kept
        self._groups: dict[str, UpdateGroup] = {}
        self._asked: deque[Asked] = deque()
        self._schedulers = 0  # that have gone
        self.answers: deque[WeightsAnswer] = deque()  # threads append, too
        self.path = path  # empty: those that the server began with
        self.version = version

    @property
    def busy(self) -> bool:
        """Whether something is to be done, or to be answered."""
        return bool(self._asked or self.answers)

    def ask(self, message: Asked) -> None:
        self._asked.append(message)

    def forget(self) -> None:
        """A new scheduler asks for itself; what has been written is in what it is told first."""
        self._schedulers += 1
        self._asked.clear()
        self.answers.clear()

    def run(self, *, resting: bool) -> bool:
        """Do the next thing that was asked for; whether weights were written. Raises BrokenWeights. resting: no step is
        left to run, without which they are neither written nor read."""
        if not self._asked or (isinstance(self._asked[0], WriteWeights | SumWeights) and not resting):
            return False
        match self._asked.popleft():
            case CheckWeights() as asked:
                self.answers.append(WeightsAnswer(asked.number, self._trouble(asked)))
            case WriteWeights() as asked:
                self._write(asked)
                self.answers.append(WeightsAnswer(asked.number))
                return True
            case SumWeights(number):
                self.answers.append(WeightsAnswer(number, digests=self._weights.digests()))
            case MeetTrainer() as asked:
                if asked.asked.address:
                    Thread(target=self._join, args=(asked, self._schedulers), name="trainer", daemon=True).start()
                else:
                    self._leave(asked)
        return False

    def _trouble(self, asked: CheckWeights) -> str:
        """Why it could not be written; empty: it could."""
        try:
            if not asked.tensors:
                self._weights.check(self._folder(asked.path))
            elif asked.group and asked.group not in self._groups:
                return NO_GROUP.format(asked.group)
            else:
                self._weights.check_tensors(asked.tensors, shared=not asked.group)
        except ModelError as found:
            logs.warning(log, "weights_refused", path=asked.path, reason=str(found))
            return str(found)
        return ""

    def _write(self, asked: WriteWeights) -> None:
        began = time.monotonic()
        if self._kept is not None:
            self._kept.outdate()
        try:
            if not asked.tensors and asked.path not in (IN_MEMORY, PARTIAL):
                self._weights.write(self._folder(asked.path))
            elif asked.group:
                self._weights.receive(asked.tensors, self._groups[asked.group].receive)
            elif asked.tensors:
                self._weights.copy(asked.tensors)
        except (ModelError, OSError, RuntimeError) as found:
            raise BrokenWeights(f"{found}; the weights are of no version") from found
        self.path, self.version = asked.path, asked.version
        fields = {"path": asked.path, "version": asked.version, "tensors": len(asked.tensors)}
        logs.info(log, "weights_written", **fields, seconds=round(time.monotonic() - began, 3))

    def _folder(self, path: str) -> Path:
        return Path(path) if path else self._weights.folder

    def _join(self, message: MeetTrainer, scheduler: int) -> None:
        """In a thread of its own: the trainer comes when it does, and perhaps the scheduler has gone by then."""
        asked, error = message.asked, ""
        rank = asked.offset + self._index
        try:
            if asked.name in self._groups:
                self._groups.pop(asked.name).leave()  # the trainer began anew
            self._groups[asked.name] = UpdateGroup(
                asked.name, asked.address, asked.port, rank, asked.size, asked.backend
            )
        except (RuntimeError, ValueError) as found:
            error = f"executor {self._index} has not met the trainer: {str(found).splitlines()[0]}"
            logs.warning(log, "trainer_not_met", group=asked.name, reason=error)
        if scheduler == self._schedulers:
            self.answers.append(WeightsAnswer(message.number, error))

    def _leave(self, message: MeetTrainer) -> None:
        group = self._groups.pop(message.asked.name, None)
        if group is not None:
            group.leave()
        error = "" if group is not None else NO_GROUP.format(message.asked.name)
        self.answers.append(WeightsAnswer(message.number, error))
