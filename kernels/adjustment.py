"""Steps 1 and 2 of kernels/sampling.py: what a request forbids, biases and penalises, as the plain-torch reference."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.records import (
    ALLOWED,
    EDITS,
    NO_MASK,
    PENALTIES,
    WORD_END,
    WORDS,
    Entries,
    SlotHistory,
    SlotSampling,
)

Numbers = NDArray[np.int32]


def adjust(
    logits: Tensor, uses: Numbers, masks: Numbers, entries: Entries, sampling: SlotSampling, history: SlotHistory
) -> None:
    """Change the logits in place: float32 [entries, vocabulary]. uses, masks: of each entry, on the host."""
    for lines, rows in (
        (masks, (masks != NO_MASK).nonzero()[0]),
        (sampling.own_masks + entries.slots.numpy(), (uses & ALLOWED).nonzero()[0]),
    ):
        if len(rows):
            forbid(logits, rows, sampling.masks.numpy()[lines[rows]])
    for row in (uses & WORDS).nonzero()[0].tolist():
        logits[row, completing(row, entries, sampling, history)] = -math.inf
    edited = (uses & EDITS).nonzero()[0]
    if len(edited):
        edit(logits, edited, entries, sampling, history.known.numpy()[entries.slots.numpy()])
    penalised = (uses & PENALTIES).nonzero()[0]
    if len(penalised):
        penalise(logits, penalised, entries, sampling, history)


def forbid(logits: Tensor, rows: NDArray[np.int64], bits: Numbers) -> None:
    """Give -inf to the tokens of `rows` whose bit is 0 in `bits`, int32 [rows, ceil(vocabulary / 32)]."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little").view(bool)
    values = logits.numpy()
    for row, kept in zip(rows.tolist(), allowed, strict=True):
        np.copyto(values[row], -np.inf, where=~kept)


def completing(row: int, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> Tensor:
    """The tokens that would complete a bad word of the entry, judging by the output so far: int64 [tokens]."""
    slot = int(entries.slots[row])
    words = sampling.words[slot, : sampling.word_counts[slot]].numpy()  # [words, longest]
    longest = words.shape[1]
    tail = output_tail(row, longest - 1, entries, sampling, history)
    matches = (words[:, 1:] == WORD_END) | (words[:, 1:] == tail)
    return torch.from_numpy(words[matches.all(1), 0].astype(np.int64))


def output_tail(row: int, count: int, entries: Entries, sampling: SlotSampling, history: SlotHistory) -> Numbers:
    """The last `count` tokens before an entry, the nearest first, drafts included; -2 where they are not output."""
    slot, depth = int(entries.slots[row]), int(entries.depth[row])
    known, prompt = int(history.known[slot]), int(sampling.prompt_tokens[slot])
    tail = np.full(count, -2, np.int32)
    near = min(depth, count)
    tail[:near] = entries.drafts.numpy()[row - near : row][::-1]
    output = history.tokens.numpy()[slot, max(prompt, known - (count - near)) : known][::-1]
    tail[near : near + len(output)] = output
    return tail


def edit(logits: Tensor, rows: NDArray[np.int64], entries: Entries, sampling: SlotSampling, known: Numbers) -> None:
    """Biases, and -inf for what min_tokens forbids, on `rows` of the logits. known: tokens that each slot has."""
    values, counts, tokens = logits.numpy(), sampling.edit_counts.numpy(), sampling.edit_tokens.numpy()
    until, early, late = (
        column.numpy() for column in (sampling.edit_until, sampling.edit_early, sampling.edit_late)
    )  # fmt: skip
    slots, positions = entries.slots.numpy(), known + entries.depth.numpy()
    for row in rows.tolist():
        slot = slots[row]
        edits = slice(counts[slot])
        added = np.where(positions[row] < until[slot, edits], early[slot, edits], late[slot, edits])
        values[row, tokens[slot, edits]] += added  # each token is there once


def penalise(
    logits: Tensor, rows: NDArray[np.int64], entries: Entries, sampling: SlotSampling, history: SlotHistory
) -> None:
    """Repetition, then frequency and presence, on `rows` of the logits. Drafts before an entry count as its output."""
    slots = torch.from_numpy(entries.slots.numpy()[rows])
    counts = history.counts.index_select(0, slots)  # a copy
    depth, drafts, twice = entries.depth.numpy()[rows], entries.drafts.numpy(), counts.new_tensor(2)
    for back in range(1, int(depth.max()) + 1):
        behind = (depth >= back).nonzero()[0]
        places = torch.from_numpy(behind), torch.from_numpy(drafts[rows[behind] - back]).long()
        counts.index_put_(places, twice, accumulate=True)
    index = torch.from_numpy(rows)
    repetition, presence, frequency = (
        column.index_select(0, slots)[:, None]
        for column in (sampling.repetition, sampling.presence, sampling.frequency)
    )
    found = logits[index]
    repeated = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(counts > 0, repeated, found)
    times = counts >> 1
    logits[index] = found - frequency * times - presence * (times > 0)
