"""The waits before a start, the end of hope, and what others read of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.links import Role
from services.restarts import DELAYS, FILE, LIMIT, LONGEST, WINDOW, Restarts, failures

EXECUTOR = Role.EXECUTOR, 0
API = Role.API, 1


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path)


def fail(restarts: Restarts, times: int, now: float = 100.0) -> None:
    for _ in range(times):
        restarts.died(*EXECUTOR, "signal SIGKILL", now)
        restarts.due(float("inf"))


def test_the_first_start_is_at_once_and_later_ones_wait_longer(restarts: Restarts) -> None:
    waits, now = [], 100.0
    assert restarts.next == float("inf")
    for _ in DELAYS:
        assert restarts.died(*EXECUTOR, "signal SIGKILL", now) is None
        waits.append(restarts.next - now)
        assert restarts.due(restarts.next - 0.001) == []
        now = restarts.next
        assert restarts.due(now) == [EXECUTOR]
        assert restarts.due(now) == []
    assert tuple(waits) == DELAYS


def test_deaths_that_are_far_apart_are_each_the_first(restarts: Restarts) -> None:
    for number in range(3 * LIMIT):
        now = 100.0 + number * WINDOW
        assert restarts.died(*EXECUTOR, "exit code 1", now) is None
        assert restarts.due(now) == [EXECUTOR]


def test_each_process_has_failures_of_its_own(restarts: Restarts) -> None:
    fail(restarts, LIMIT - 1)
    assert restarts.died(*API, "exit code 1", 100.0) is None
    assert restarts.due(100.0) == [API]


def test_the_end_of_hope_is_told_once_and_it_is_tried_again(restarts: Restarts, tmp_path: Path) -> None:
    fail(restarts, LIMIT - 1)
    assert failures(tmp_path) == ()
    failure = restarts.died(*EXECUTOR, "exit code 7", 101.0)
    assert failure is not None
    assert "executor-0 failed 5 times" in failure.reason
    assert "exit code 7" in failure.reason
    assert failures(tmp_path) == (failure,)
    assert restarts.due(101.0 + LONGEST - 1) == []
    assert restarts.due(101.0 + LONGEST) == [EXECUTOR]
    assert restarts.died(*EXECUTOR, "exit code 7", 200.0) is None
    assert restarts.next == 200.0 + LONGEST
    assert restarts.statistics().hopeless == 1
    assert restarts.statistics().deaths == LIMIT + 1


def test_there_is_hope_for_who_comes_back_and_the_next_failure_ends_it(restarts: Restarts, tmp_path: Path) -> None:
    restarts.recovered(*EXECUTOR)
    fail(restarts, LIMIT)
    restarts.recovered(*EXECUTOR)
    assert failures(tmp_path) == ()
    assert not (tmp_path / FILE).exists()
    assert restarts.died(*EXECUTOR, "exit code 7", 102.0) is not None
    restarts.recovered(*EXECUTOR)
    assert restarts.died(*EXECUTOR, "exit code 7", 102.0 + WINDOW) is None
    assert restarts.due(102.0 + WINDOW) == [EXECUTOR]


def test_at_the_end_nobody_is_waited_for(restarts: Restarts, tmp_path: Path) -> None:
    fail(restarts, LIMIT)
    restarts.died(*EXECUTOR, "exit code 7", 102.0)
    restarts.died(*API, "exit code 7", 102.0)
    assert restarts.waiting == 2
    restarts.give_up((Role.EXECUTOR,))
    assert restarts.due(float("inf")) == [API]
    restarts.give_up(Role)
    assert restarts.waiting == 0
    restarts.close()
    restarts.close()
    assert not list(tmp_path.iterdir())


def test_half_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('[{"process":')
    assert failures(tmp_path) == ()


def test_one_that_ends_because_another_died_has_not_failed(restarts: Restarts) -> None:
    for number in range(3 * LIMIT):
        now = 100.0 + number
        restarts.left(*EXECUTOR, now)
        assert restarts.due(now) == [EXECUTOR]
    assert restarts.statistics().deaths == restarts.statistics().hopeless == 0


def test_what_a_killed_launcher_told_is_of_processes_that_are_gone(tmp_path: Path) -> None:
    fail(Restarts(tmp_path), LIMIT)
    assert failures(tmp_path)
    Restarts(tmp_path)
    assert failures(tmp_path) == ()
