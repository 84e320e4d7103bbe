"""Drafts that the executors' draft model makes: how many a slot gets, and how many were accepted. Columns over slots.

The scheduler does not know a draft's tokens, only how often drafts were accepted: the first of a row, and one behind
an accepted one. Drafts are requested a step ahead of the one that verifies them: as many as give that step, with the
time of drafting, the most tokens per second.

Where drafts do not pay none are made, so nothing would be learned; nor is anything learned of a second draft where
there is only one. So now and then the few rows that have waited longest get so many that both chances are taught, or
the fewest that could pay, as long as trials take a small share of the time. There are no trials where no number of
drafts could pay even if all were accepted.

The executors hold the draft model's keys and values. Positions of a slot that are missing from them are counted here,
so that drafting begins with the positions that the draft model has not seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engine_core.speculation.acceptance import ALL, WEIGHT
from penstock.engine_core.speculation.step_cost import DraftCost, StepCost

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KEPT = 31 / 32  # weight that one trial leaves to a slot's earlier ones
FIRST, NEXT = 0, 1  # rows of the odds: the first draft of a row, one behind an accepted draft
ENOUGH = 2  # drafts of a row that teach both
FINE = 8  # turns; beyond them whole, half and quarter drafts are compared
TRIAL_SHARE = 0.0075  # of the time, for trials
TRIAL_ROWS = 8  # of a step
TRIAL_STEPS = 16  # between trials, at least


class DeviceDrafts:
    """Owner of the columns. `most`: drafts that executors make for a row, 0 where they make none."""

    def __init__(self, slots: int, most: int) -> None:
        self.most = most
        self.available = np.zeros(slots, np.int64)  # drafts behind the slot's tokens once its planned steps have run
        self.unseen = np.zeros(slots, np.int64)  # positions that the draft model has not seen then, at most
        self._wanted = np.zeros(slots, np.bool_)  # the slot's sequence may have drafts
        self._learned = np.zeros(slots, np.int64)  # last step whose drafts of the slot teach both chances
        self._prior = np.full((2, slots), 0.5)
        self._hits, self._trials = np.zeros((2, slots)), np.zeros((2, slots))
        self._all_hits, self._all_trials = np.zeros(2), np.zeros(2)
        self.cost = DraftCost()
        self._places = np.arange(most)[None, :]
        self._turns = sorted({*range(1, min(most, FINE) + 1), *(most >> shift for shift in range(3))} - {0})
        self._saved = 0.0  # seconds that may go into the next trial
        self._tried_at = 0  # step

    def enter(self, slot: int, *, wanted: bool) -> None:
        """Another sequence has the slot. The draft model is assumed to have seen what its cached blocks hold."""
        self.available[slot] = self.unseen[slot] = 0
        self._wanted[slot] = wanted and self.most > 0
        self._learned[slot] = 0
        self._prior[:, slot] = self._of_all()
        self._hits[:, slot] = self._trials[:, slot] = 0.0

    def choose_lengths(
        self, slots: Ints, room: Ints, most: int, cost: StepCost, step: int, stretch: float = 1.0
    ) -> Ints:
        """How many drafts to make for each of the slots that sample in this step, at most `room` and `most` in all, for
        the next step to verify. # [rows]

        stretch: how many times the measured `cost` a step takes for each time that there is drafting.
        """
        rows = len(slots)
        self.cost.forget(step)
        room = np.where(self._wanted[slots], np.clip(room, 0, self.most), 0)
        most = min(most, int(room.sum()))
        if most <= 0:
            return np.zeros(rows, np.int64)
        seconds = cost.seconds(rows, rows + np.arange(most + 1, dtype=np.float64))  # to verify 0, 1, .. drafts
        if seconds is None:
            lengths = room - np.clip(np.cumsum(room) - most, 0, room)  # the cost is measured by trying
        else:
            seconds = seconds * stretch
            lengths = self._best(slots, room, seconds)
            self._try(slots, room, lengths, seconds, step)
        self._learned[slots[lengths >= ENOUGH]] = step
        return lengths

    def _best(self, slots: Ints, room: Ints, seconds: Floats) -> Ints:
        """The lengths that make the next step, drafting included, give the most tokens per second. # [rows]

        Drafts are taken by falling chance, so that each row keeps a beginning of its own, up to some number of turns.
        """
        rows = len(slots)
        chances = self._chances(slots)  # [rows, most], falling along each row
        chances[self._places >= room[:, None]] = 0.0
        order = np.argsort(-chances, axis=None, kind="stable")[: len(seconds) - 1]
        owners, places = np.divmod(order, self.most)
        sorted_chances = chances.ravel()[order]
        best, chosen = rows / float(seconds[0]), order[:0]
        for turns in self._turns:
            within = (places < turns).nonzero()[0]
            tokens = rows + np.cumsum(sorted_chances[within])
            drafting = self.cost.seconds(rows, turns)
            rates = tokens / (seconds[1 : 1 + len(within)] + drafting)
            count = int(np.argmax(rates))
            if rates[count] > best:
                best, chosen = float(rates[count]), within[: count + 1]
        lengths: Ints = np.bincount(owners[chosen], minlength=rows)
        return lengths

    def _try(self, slots: Ints, room: Ints, lengths: Ints, seconds: Floats, step: int) -> None:
        """Give some rows with few drafts more, if a trial is due. seconds: to verify 0, 1, .. drafts."""
        waiting = (lengths < np.minimum(room, ENOUGH)).nonzero()[0]
        total, rows = int(lengths.sum()), len(slots)
        last = len(seconds) - 1
        if not len(waiting) or total >= last:
            return
        self._saved += TRIAL_SHARE * float(seconds[0])
        if step - self._tried_at < TRIAL_STEPS:
            return
        least = int(lengths.max())
        now = float(seconds[total]) + self.cost.seconds(rows, least)
        for turns in self._turns:  # the fewest that could pay
            hopeful = min(int(np.maximum(lengths, np.minimum(room, turns)).sum()), last)
            whole = float(seconds[hopeful]) + self.cost.seconds(rows, max(turns, least))
            if turns >= min(ENOUGH, self.most) and (rows + hopeful) * now > (rows + total) * whole:
                break
        else:
            return
        tried = waiting[np.argsort(self._learned[slots[waiting]], kind="stable")[:TRIAL_ROWS]]
        more = np.minimum(room[tried], turns) - lengths[tried]
        more -= np.clip(np.cumsum(more) - (last - total), 0, more)
        taken = float(seconds[total + int(more.sum())]) + self.cost.seconds(rows, max(turns, least)) - now
        if self._saved < taken:
            return
        self._saved, self._tried_at = 0.0, step
        self._learned[slots[tried]] = step
        lengths[tried] += more

    def observe(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Drafts were verified. # [rows] each"""
        hits = np.stack((accepted > 0, np.maximum(accepted - 1, 0))).astype(np.float64)
        trials = np.stack((np.ones(len(slots)), np.minimum(accepted, drafted - 1)))
        kept = KEPT**trials
        self._hits[:, slots] = self._hits[:, slots] * kept + hits
        self._trials[:, slots] = self._trials[:, slots] * kept + trials
        kept = ALL ** trials.sum(1)
        self._all_hits = self._all_hits * kept + hits.sum(1)
        self._all_trials = self._all_trials * kept + trials.sum(1)

    def _of_all(self) -> Floats:
        """Chances over all sequences: the prior of a new one. # [2]"""
        return (self._all_hits + WEIGHT * 0.5) / (self._all_trials + WEIGHT)

    def _chances(self, slots: Ints) -> Floats:
        """The chance that each place of a row's draft is accepted, with all before it. # [rows, most]"""
        odds = (self._hits[:, slots] + WEIGHT * self._prior[:, slots]) / (self._trials[:, slots] + WEIGHT)
        chances: Floats = odds[FIRST][:, None] * odds[NEXT][:, None] ** self._places
        return chances
