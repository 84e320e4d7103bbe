"""Ids of the device's own drafts by drafts.py and drafts_triton.py, against a loop over the entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.gather import place_drafts, read_drafts, standing_drafts
from penstock.kernels.gather_triton import drafts_of
from penstock.kernels.records import NO_DRAFT, OWN_DRAFT
from penstock.protocol import steps
from tests.kernels.sampling_scene import Row, Scene, scene

VOCABULARY = 40


def drafted(seed: int, rows: int = 7) -> Scene:
    """Rows whose drafts are the host's, the device's own, or none, with something behind every slot's known tokens."""
    chance = np.random.default_rng(seed)
    drawn = [tuple(chance.integers(0, VOCABULARY, chance.integers(0, 5)).tolist()) for _ in range(rows)]
    found = scene([Row(seed=at, drafts=drafts) for at, drafts in enumerate(drawn)], VOCABULARY, padding=3)
    own = torch.from_numpy(chance.random(len(found.entries.drafts)) < 0.6)
    found.entries.drafts.masked_fill_(own & (found.entries.drafts != NO_DRAFT), OWN_DRAFT)
    found.history.tokens.copy_(torch.from_numpy(chance.integers(0, VOCABULARY, found.history.tokens.shape)))
    return found


def plainly(given: Scene) -> list[int]:
    """Entry after entry."""
    entries, history, found = given.entries, given.history, []
    for slot, depth, draft in zip(*(c.tolist() for c in (entries.slots, entries.depth, entries.drafts)), strict=True):
        place = min(int(history.known[slot]) + depth, history.tokens.shape[1] - 1)
        found.append(int(history.tokens[slot, place]) if draft == OWN_DRAFT else draft)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_own_drafts_stand_behind_the_known_tokens(seed: int, device: str) -> None:
    given = drafted(seed)
    before, expected = given.entries.drafts.tolist(), plainly(given)
    assert expected != before
    assert read_drafts(given.entries, given.history).drafts.tolist() == expected
    moved = given.on(device)
    assert drafts_of(moved.entries, moved.history).tolist() == expected
    assert given.entries.drafts.tolist() == moved.entries.drafts.tolist() == before, "a graph reads them again"


def test_a_place_past_the_rows_end_is_its_last(device: str) -> None:
    given = drafted(1)
    given.history.known.fill_(given.history.tokens.shape[1])
    expected = plainly(given)
    assert read_drafts(given.entries, given.history).drafts.tolist() == expected
    moved = given.on(device)
    assert drafts_of(moved.entries, moved.history).tolist() == expected


def test_entries_without_own_drafts_are_what_they_were(device: str) -> None:
    given = drafted(2)
    given.entries.drafts.masked_fill_(given.entries.drafts == OWN_DRAFT, 5)
    assert read_drafts(given.entries, given.history).drafts is given.entries.drafts
    moved = given.on(device)
    assert drafts_of(moved.entries, moved.history).tolist() == given.entries.drafts.tolist()


def test_many_entries(device: str) -> None:
    """More than one program takes of them."""
    given = drafted(3, rows=90)
    moved = given.on(device)
    assert len(given.entries.drafts) > 128
    assert drafts_of(moved.entries, moved.history).tolist() == plainly(given)


def test_drafts_stand_elsewhere_as_they_do_where_they_were_made() -> None:
    made, told = drafted(4), drafted(4)
    told.history.tokens.zero_()
    slots = torch.tensor([5, 0, 3])
    drafts = standing_drafts(slots, 4, made.history)
    assert drafts.dtype == torch.int32
    place_drafts(drafts, slots, told.history)
    for slot in slots.tolist():
        known = int(made.history.known[slot])
        expected = made.history.tokens[slot, known : known + 4]
        assert torch.equal(told.history.tokens[slot, known : known + 4], expected)
        told.history.tokens[slot, known : known + 4] = 0
    assert not told.history.tokens.any(), "nothing else was written"


def test_drafts_past_the_rows_end_are_lost() -> None:
    given = drafted(5)
    length = given.history.tokens.shape[1]
    given.history.known[:2] = torch.tensor([length - 2, length])
    before = given.history.tokens.clone()
    place_drafts(torch.tensor([[41, 42, 43], [51, 52, 53]], dtype=torch.int32), torch.tensor([0, 1]), given.history)
    assert int(given.history.tokens[0, -2]) == 41
    assert int(given.history.tokens[0, -1]) in (42, 43)
    assert int(given.history.tokens[1, -1]) in (51, 52, 53)
    before[:2, -2:] = given.history.tokens[:2, -2:]
    assert torch.equal(given.history.tokens, before)
    assert standing_drafts(torch.tensor([1]), 3, given.history).unique().numel() == 1


def test_the_constant_is_the_protocols() -> None:
    assert OWN_DRAFT == steps.OWN_DRAFT
    assert len({OWN_DRAFT, NO_DRAFT, steps.REJECTED}) == 3
