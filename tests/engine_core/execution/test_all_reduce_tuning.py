"""For how many rows the exchange is taken, with given times. Measured ones: `python -m benchmarks.exchange`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.engine_core.distributed.custom_all_reduce import Exchange
from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution import all_reduce_tuning as exchange_trial
from penstock.engine_core.execution.all_reduce_tuning import TRIED, Trial, quicker_rows, quickest, try_exchange
from penstock.kernels.exchange import Inboxes, empty_word

WIDTH = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Memory:
    """Stands for what ranks share."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def exchange_of(rows: int, memory: Memory) -> Exchange:
    """One rank's with itself."""
    box = torch.full((2, 1, rows, WIDTH), empty_word(torch.float32), dtype=torch.int32, device=DEVICE)
    boxes, turns = torch.tensor([box.data_ptr()], device=DEVICE), torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    inboxes = Inboxes(boxes, turns, 0, WIDTH, torch.float32)
    return Exchange(inboxes, memory, rows)  # type: ignore[arg-type]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What calls are found to take, one after the other; each is made once."""
    found: list[float] = []

    def microseconds(call: Callable[[], object], device: torch.device) -> float:
        call()
        return found.pop(0)

    monkeypatch.setattr(exchange_trial, "microseconds", microseconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


@pytest.mark.parametrize(("found", "expected"), [
    ([], 0), ([(1, 2.0, 3.0)], 1), ([(1, 3.0, 3.0)], 0), ([(1, 4.0, 3.0), (8, 1.0, 3.0)], 0),
    ([(1, 2.0, 3.0), (8, 2.0, 3.0), (32, 9.0, 3.0), (64, 2.0, 3.0)], 8),
])  # fmt: skip
def test_rows_up_to_the_first_size_that_is_no_quicker(found: list[tuple[int, float, float]], expected: int) -> None:
    assert quicker_rows([Trial(*one) for one in found]) == expected


def test_every_size_that_there_is_room_for_is_tried(times: list[float]) -> None:
    times += [3.0, 9.0, 4.0, 8.0, 5.0, 7.0]
    assert try_exchange(ALONE, exchange_of(63, Memory()), DEVICE) == [
        Trial(1, 3.0, 9.0), Trial(8, 4.0, 8.0), Trial(32, 5.0, 7.0)
    ]  # fmt: skip
    assert not times
    assert list(TRIED) == sorted(set(TRIED))


def test_the_group_has_it_for_the_rows_that_all_ranks_agree_on(
    times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Group, "all_min", lambda group, number: asked.append(number) or min(number, 8))
    times += [3.0, 9.0, 4.0, 8.0, 5.0, 7.0]
    memory = Memory()
    exchange = exchange_of(40, memory)
    group, trials = quickest(ALONE, exchange, DEVICE)
    assert asked == [32]
    assert [trial.rows for trial in trials] == [1, 8, 32]
    assert group == replace(ALONE, exchange=group.exchange)
    assert group.exchange is not None
    assert (group.exchange.rows, group.exchange.inboxes) == (8, exchange.inboxes)
    assert memory.closed == 0


def test_an_exchange_that_is_never_quicker_is_closed(times: list[float]) -> None:
    times += [9.0, 3.0]
    memory = Memory()
    group, trials = quickest(ALONE, exchange_of(1, memory), DEVICE)
    assert group.exchange is None
    assert trials == [Trial(1, 9.0, 3.0)]
    assert memory.closed == 1


@pytest.mark.gpu
def test_times_are_of_one_call() -> None:
    line = torch.zeros(1 << 26, device="cuda")
    calls = [lambda: line.add_(1.0), lambda: line.add_(1.0).add_(1.0)]
    one, both = (min(exchange_trial.microseconds(call, line.device) for _ in range(5)) for call in calls)  # others run
    assert 1.6 < both / one < 2.4
