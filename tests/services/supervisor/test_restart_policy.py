"""The waits before a start, the end of hope, and what others read of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.services.supervisor.restart_policy import (
    CRASH_LOOP_DELAY,
    DELAYS,
    FILE,
    FILE_BYTES,
    LIMIT,
    WINDOW,
    RestartPolicy,
    crash_loops,
)

EXECUTOR = Role.EXECUTOR, 0
API = Role.API, 1


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[RestartPolicy]:
    restarts = RestartPolicy(tmp_path)
    yield restarts
    restarts.close()


def fail(restarts: RestartPolicy, times: int, now: float = 100.0) -> None:
    for _ in range(times):
        restarts.died(*EXECUTOR, "signal SIGKILL", now)
        restarts.due(float("inf"))


def test_the_first_start_is_at_once_and_later_ones_wait_longer(restarts: RestartPolicy) -> None:
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


def test_deaths_that_are_far_apart_are_each_the_first(restarts: RestartPolicy) -> None:
    for number in range(3 * LIMIT):
        now = 100.0 + number * WINDOW
        assert restarts.died(*EXECUTOR, "exit code 1", now) is None
        assert restarts.due(now) == [EXECUTOR]


def test_each_process_has_failures_of_its_own(restarts: RestartPolicy) -> None:
    fail(restarts, LIMIT - 1)
    assert restarts.died(*API, "exit code 1", 100.0) is None
    assert restarts.due(100.0) == [API]


def test_a_crash_loop_is_reported_once_and_restarted_now_and_then(restarts: RestartPolicy, tmp_path: Path) -> None:
    fail(restarts, LIMIT - 1)
    assert crash_loops(tmp_path) == ()
    failure = restarts.died(*EXECUTOR, "exit code 7", 101.0)
    assert failure is not None
    assert "executor-0 failed 5 times" in failure.reason
    assert "exit code 7" in failure.reason
    assert crash_loops(tmp_path) == (failure,)
    assert restarts.due(101.0 + CRASH_LOOP_DELAY - 1) == []
    assert restarts.due(101.0 + CRASH_LOOP_DELAY) == [EXECUTOR]
    assert restarts.died(*EXECUTOR, "exit code 7", 200.0) is None
    assert restarts.next == 200.0 + CRASH_LOOP_DELAY
    assert len(crash_loops(tmp_path)) == 1


def test_a_ready_process_ends_its_crash_loop_and_may_begin_another(restarts: RestartPolicy, tmp_path: Path) -> None:
    restarts.recovered(*EXECUTOR)
    fail(restarts, LIMIT)
    restarts.recovered(*EXECUTOR)
    assert crash_loops(tmp_path) == ()
    assert restarts.died(*EXECUTOR, "exit code 7", 102.0) is not None
    restarts.recovered(*EXECUTOR)
    assert restarts.died(*EXECUTOR, "exit code 7", 102.0 + WINDOW) is None
    assert restarts.due(102.0 + WINDOW) == [EXECUTOR]


def test_at_the_end_nobody_is_waited_for(restarts: RestartPolicy, tmp_path: Path) -> None:
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
    assert crash_loops(tmp_path) == ()


def test_one_that_ends_because_another_died_has_not_failed(restarts: RestartPolicy, tmp_path: Path) -> None:
    for number in range(3 * LIMIT):
        now = 100.0 + number
        restarts.ended_with_group(*EXECUTOR, now)
        assert restarts.due(now) == [EXECUTOR]
    assert crash_loops(tmp_path) == ()
    now += 1
    assert restarts.died(*EXECUTOR, "exit code 1", now) is None
    assert restarts.due(now) == [EXECUTOR], "as after a first failure"


def test_what_a_killed_launcher_told_is_of_processes_that_are_gone(tmp_path: Path) -> None:
    with closing(RestartPolicy(tmp_path)) as killed:
        fail(killed, LIMIT)
        assert crash_loops(tmp_path)
        with closing(RestartPolicy(tmp_path)):
            assert crash_loops(tmp_path) == ()


def test_a_full_directory_takes_what_was_reserved(restarts: RestartPolicy, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing is created, extended or renamed once the server runs."""
    before = (tmp_path / FILE).stat()
    assert before.st_size == FILE_BYTES
    assert before.st_blocks * 512 >= FILE_BYTES
    for name in ("replace", "rename", "open", "posix_fallocate"):
        monkeypatch.setattr(os, name, full)
    fail(restarts, LIMIT)
    monkeypatch.undo()
    assert len(crash_loops(tmp_path)) == 1
    after = (tmp_path / FILE).stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_more_failures_than_were_reserved_for_are_told_in_part(restarts: RestartPolicy, tmp_path: Path) -> None:
    for index in range(200):
        for _ in range(LIMIT):
            restarts.died(Role.EXECUTOR, index, "x" * 100, 100.0)
    told = crash_loops(tmp_path)
    assert 10 < len(told) < 200
    assert told[0].process == "executor-0"


def test_no_room_at_start_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"--run-dir.*16 KiB of it must be free: No space left"):
        RestartPolicy(tmp_path)
    assert not list(tmp_path.iterdir())
