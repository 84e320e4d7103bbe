"""Masks of the steps in flight, filled beside the loop, one step after the other, and sent when they are done."""

from __future__ import annotations

from concurrent.futures import Executor

from engine_core.grammar.masks import FilledMasks, MaskStatistics, MaskStore
from engine_core.grammar.tokens import GrammarTokens
from engine_core.scheduling.masking import MaskWork
from protocol.steps import StepMasks
from services.scheduler.aside import Aside


class Masker:
    """Owner of the mask store of one epoch. `thread` runs one job at a time: masks come in the order of the steps."""

    def __init__(self, tokens: GrammarTokens | None, thread: Executor, fillers: int) -> None:
        self.aside: Aside[MaskWork, FilledMasks] = Aside(thread)
        self._tokens = tokens
        self._fillers = fillers
        self._store: MaskStore | None = None

    def renew(self, places: int) -> None:
        """New executors with empty stores of so many places. What is still being filled is for the old ones."""
        self._store = MaskStore(self._tokens, places, self._fillers) if self._tokens is not None and places else None

    @property
    def most(self) -> int:
        """Masked entries that one step may have."""
        return 0 if self._store is None else self._store.most

    def start(self, work: MaskWork, applied: int) -> None:
        """Fill a step's masks; steps up to `applied` are over."""
        assert self._store is not None
        self.aside.start(work, self._store.fill, work.step, applied, work.rows)

    def finished(self) -> list[StepMasks]:
        """Masks that are done. Raises what went wrong with a whole step: then the process is of no use."""
        return [step_masks(work, future.result()) for work, future in self.aside.collect()]

    def statistics(self) -> MaskStatistics | None:
        """Of this epoch; None if its executors keep no masks."""
        return None if self._store is None else self._store.statistics()


def step_masks(work: MaskWork, filled: FilledMasks) -> StepMasks:
    return StepMasks(
        step=work.step,
        epoch=work.epoch,
        entries=filled.entries,
        places=filled.places,
        fresh=filled.fresh,
        bits=filled.bits,
    )
