"""How many drafts each row gets: as many as make the step give the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from penstock.engine_core.speculation.cost import StepCost


def draft_lengths(rows: int, chances: Sequence[Sequence[float]], cost: StepCost, most: int) -> list[int]:
    """Lengths of the drafts of a step of `rows` rows, at most `most` in all.

    chances: of each drafted row, that its draft is accepted up to each place; they fall along it. A step gives a token
    for each row and for each draft what its chance says. Taken by falling chance, the best number is where tokens per
    second are highest, and what is taken of a row is a beginning of its draft.
    """
    flat = np.fromiter(chain.from_iterable(chances), np.float64)
    order = np.argsort(-flat, kind="stable")[:most]
    if not len(order):
        return [0] * len(chances)
    seconds = cost.seconds(rows, rows + np.arange(len(order) + 1, dtype=np.float64))
    count = len(order)
    if seconds is not None:
        tokens = rows + np.concatenate((np.zeros(1), np.cumsum(flat[order])))
        count = int(np.argmax(tokens / seconds))
    owners = np.repeat(np.arange(len(chances)), [len(row) for row in chances])
    lengths: list[int] = np.bincount(owners[order[:count]], minlength=len(chances)).tolist()
    return lengths
