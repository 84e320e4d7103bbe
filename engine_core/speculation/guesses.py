"""Drafts that the executors make by themselves: how many a slot gets, and what became of them. Columns over the slots.

What a draft says is not known here, only how often drafts came true: the first of a row, and one behind another that
did. Executors are asked for drafts a step ahead of the one that verifies them, as many as make that step give the most
tokens per second; its time, as measured, has the time of drafting in it. Where drafts do not pay nothing is drafted,
and so nothing would be learned: now and then a few rows that have waited longest are tried with a single draft, as long
as trials take a small share of the time. Trials are left out where no draft could pay, however well it guessed.

The draft model's keys and values are the executors' too. What a slot's lack is counted here, so that drafting begins
with the positions that the draft model has not seen.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.speculation.acceptance import ALL, OWN, WEIGHT
from engine_core.speculation.cost import StepCost

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FIRST, NEXT = 0, 1  # lines of the odds: the first draft of a row, one behind a draft that came true
TRIAL_SHARE = 0.01  # of the time, for trials of rows that have no drafts
TRIAL_ROWS = 8  # of a step
TRIAL_STEPS = 16  # between trials, at least


class GuessStatistics(msgspec.Struct, frozen=True):
    """Chances over all choices, and how many rows were tried without a hope."""

    first: float
    next: float
    trials: int


class Guesses:
    """Owner of the columns. `most`: drafts that executors make for a row, 0 where they make none."""

    def __init__(self, slots: int, most: int) -> None:
        self.most = most
        self.standing = np.zeros(slots, np.int64)  # drafts behind the slot's tokens once its planned steps have run
        self.lacking = np.zeros(slots, np.int64)  # positions that the draft model has not seen then, at most
        self._wanted = np.zeros(slots, np.bool_)  # the slot's choice may have drafts
        self._asked = np.zeros(slots, np.int64)  # step after which drafts were last made
        self._prior = np.full((2, slots), 0.5)
        self._hits, self._trials = np.zeros((2, slots)), np.zeros((2, slots))
        self._all_hits, self._all_trials = np.zeros(2), np.zeros(2)
        self._saved = 0.0  # seconds that may go into the next trial
        self._tried_at = 0  # step
        self._tried = 0  # rows

    def enter(self, slot: int, *, wanted: bool) -> None:
        """Another choice has the slot. What its cached blocks hold the draft model is taken to have seen."""
        self.standing[slot] = self.lacking[slot] = 0
        self._wanted[slot] = wanted and self.most > 0
        self._asked[slot] = 0
        self._prior[:, slot] = self._of_all()
        self._hits[:, slot] = self._trials[:, slot] = 0.0

    def ask(self, slots: Ints, room: Ints, most: int, cost: StepCost, step: int) -> Ints:
        """How many drafts to make for each of the slots that sample in this step, at most `room` and `most` in all, for
        the next step to verify. # [rows]"""
        rows = len(slots)
        room = np.where(self._wanted[slots], np.clip(room, 0, self.most), 0)
        lengths = np.zeros(rows, np.int64)
        if most <= 0 or not room.any():
            return lengths
        chances = self._chances(slots)  # [rows, most]
        chances[np.arange(self.most) >= room[:, None]] = 0.0
        flat = chances.ravel()
        order = np.argsort(-flat, kind="stable")[: min(most, int(room.sum()))]
        seconds = cost.seconds(rows, rows + np.arange(len(order) + 1, dtype=np.float64))
        count = len(order)
        if seconds is not None:
            tokens = rows + np.concatenate((np.zeros(1), np.cumsum(flat[order])))
            count = int(np.argmax(tokens / seconds))
        np.add.at(lengths, order[:count] // self.most, 1)
        if seconds is not None:
            self._try(slots, room, lengths, seconds, step)
        self._asked[slots[lengths > 0]] = step
        return lengths

    def _try(self, slots: Ints, room: Ints, lengths: Ints, seconds: Floats, step: int) -> None:
        """Give some rows without drafts one, if it is time for it. seconds: of steps with 0, 1, .. drafts."""
        asleep = ((lengths == 0) & (room > 0)).nonzero()[0]
        total = int(lengths.sum())
        last = len(seconds) - 1
        if not len(asleep) or total >= last:
            return
        self._saved += TRIAL_SHARE * float(seconds[0])
        if step - self._tried_at < TRIAL_STEPS:
            return
        hopeful = min(total + len(asleep), last)
        rows = len(slots)
        if (rows + hopeful) / seconds[hopeful] <= (rows + total) / seconds[total]:
            return
        tried = asleep[np.argsort(self._asked[slots[asleep]], kind="stable")[: min(TRIAL_ROWS, last - total)]]
        if self._saved < float(seconds[total + len(tried)] - seconds[total]):
            return
        self._saved, self._tried_at = 0.0, step
        self._tried += len(tried)
        lengths[tried] = 1

    def tell(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """What became of drafts that were verified. # [rows] each"""
        hits = np.stack((accepted > 0, np.maximum(accepted - 1, 0))).astype(np.float64)
        trials = np.stack((np.ones(len(slots)), np.minimum(accepted, drafted - 1)))
        kept = OWN**trials
        self._hits[:, slots] = self._hits[:, slots] * kept + hits
        self._trials[:, slots] = self._trials[:, slots] * kept + trials
        kept = ALL ** trials.sum(1)
        self._all_hits = self._all_hits * kept + hits.sum(1)
        self._all_trials = self._all_trials * kept + trials.sum(1)

    def statistics(self) -> GuessStatistics:
        first, following = self._of_all().tolist()
        return GuessStatistics(first, following, self._tried)

    def _of_all(self) -> Floats:
        """Chances over all choices: the prior of a new one. # [2]"""
        return (self._all_hits + WEIGHT * 0.5) / (self._all_trials + WEIGHT)

    def _chances(self, slots: Ints) -> Floats:
        """That each place of a row's draft holds, with all before it. # [rows, most]"""
        odds = (self._hits[:, slots] + WEIGHT * self._prior[:, slots]) / (self._trials[:, slots] + WEIGHT)
        chances: Floats = odds[FIRST][:, None] * odds[NEXT][:, None] ** np.arange(self.most)
        return chances
