"""Which place each token of a step reads."""

from __future__ import annotations

import pytest
import torch

from penstock.engine_core.execution.adapter_slots import AdapterSlots
from penstock.engine_core.execution.input_batch import decode_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.adapters import AdapterPlaces
from penstock.engine_core.models.registry import build
from penstock.kernels.records import InputRows
from tests.engine_core.execution.harness import Life, column
from tests.engine_core.models.specs import small_spec

CPU = torch.device("cpu")


@pytest.fixture
def slots() -> AdapterSlots:
    """Slots 1 and 3 of 4, and scratch, have places 2 and 1."""
    spec = small_spec()
    made = AdapterSlots(AdapterPlaces(build(spec, torch.float32, CPU, 16), spec, 2, 4), 5, Upload(CPU))
    made.start([Life([1], slot=1, adapter=2).start(), Life([1], slot=3, adapter=1).start(), Life([1], slot=0).start()])
    return made


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_tokens_read_the_places_of_their_rows(slots: AdapterSlots) -> None:
    """What pads a step reads none: rows without tokens, and tokens behind the last row, whose slot has an adapter."""
    starts, nothing = ints(0, 2, 3, 5, 5), ints(*[0] * 7)
    rows = InputRows(starts, ints(3, 0, 1, 4), ints(0, 0, 0, 0), nothing)
    assert slots.of_tokens(rows).tolist() == [1, 1, 0, 2, 2, 0, 0]
    rows = InputRows(ints(0, 1, 2), ints(1, 3), ints(0, 0), ints(0, 0, 0))
    assert slots.of_tokens(rows).tolist() == [2, 1, 0]


def test_a_step_is_served_if_one_of_its_rows_has_an_adapter(slots: AdapterSlots) -> None:
    def served(*own: int) -> bool:
        return slots.serve(decode_rows(ints(*own).numpy()))

    assert [served(0), served(0, 2), served(0, 1), served(3)] == [False, False, True, True]
    slots.start([Life([1], slot=1).start()])
    assert [served(0, 1), served(3)] == [False, True]
    slots.reset()
    assert not served(0, 1, 2, 3)
    assert not slots.of_tokens(InputRows(ints(0, 1), ints(3), ints(0), ints(0))).any()


def test_a_copy_fills_one_place(slots: AdapterSlots) -> None:
    memory = slots.places.memory
    slots.loaded = {7: torch.ones(memory.shape[1]), 8: 2 * torch.ones(memory.shape[1])}
    slots.change(column(8, 2))
    assert [memory[place].unique().tolist() for place in range(2)] == [[0.0], [2.0]]
    slots.change(column(7, 2, 8, 1))
    assert [memory[place].unique().tolist() for place in range(2)] == [[2.0], [1.0]]
