"""Work beside the loop comes back by a descriptor."""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.services.scheduler import background_jobs
from penstock.services.scheduler.background_jobs import BackgroundJobs


def readable(aside: BackgroundJobs[str, int]) -> bool:
    return bool(select.select([aside.fileno()], [], [], 0)[0])


def test_what_is_done_is_collected_once_and_the_descriptor_tells() -> None:
    aside: BackgroundJobs[str, int] = BackgroundJobs(ThreadPoolExecutor(2))
    gate = threading.Event()
    try:
        assert aside.collect() == []
        aside.start("slow", lambda: gate.wait() and 1)
        aside.start("sum", sum, [1, 2])
        assert select.select([aside.fileno()], [], [], 60)[0]
        ((key, future),) = aside.collect()
        assert (key, future.result(), aside.running) == ("sum", 3, 1)
        assert not readable(aside)
        assert aside.collect() == []
        gate.set()
        assert select.select([aside.fileno()], [], [], 60)[0]
        assert [key for key, _ in aside.collect()] == ["slow"]
        assert aside.running == 0
    finally:
        gate.set()
        aside.close()


def test_one_that_is_done_and_has_not_told_yet_is_collected_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its word would come when nothing runs: nobody would read it, and the loop's poll would never sleep."""
    aside: BackgroundJobs[str, int] = BackgroundJobs(ThreadPoolExecutor(2))
    begun, late, gate, tell = threading.Event(), threading.Event(), threading.Event(), os.eventfd_write

    def telling(descriptor: int, value: int) -> None:
        if begun.is_set():
            late.set()
            gate.wait()
        tell(descriptor, value)

    monkeypatch.setattr(background_jobs.os, "eventfd_write", telling)
    try:
        aside.start("told", lambda: 1)
        aside.start("late", lambda: begun.wait() and 2)
        assert select.select([aside.fileno()], [], [], 60)[0]
        begun.set()
        assert late.wait(60)
        assert [key for key, _ in aside.collect()] == ["told"]
        gate.set()
        assert select.select([aside.fileno()], [], [], 60)[0]
        assert [key for key, _ in aside.collect()] == ["late"]
        assert not readable(aside)
    finally:
        begun.set()
        gate.set()
        aside.close()


def test_closing_twice_closes_nobody_elses_descriptor() -> None:
    aside: BackgroundJobs[str, int] = BackgroundJobs(ThreadPoolExecutor(1))
    aside.close()
    reader, writer = os.pipe()  # one of them has the number
    aside.close()
    os.close(reader)
    os.close(writer)


def test_the_loop_may_wait_a_moment_for_what_runs() -> None:
    aside: BackgroundJobs[str, int] = BackgroundJobs(ThreadPoolExecutor(1))
    gate = threading.Event()
    try:
        assert not aside.wait(60.0), "nothing runs, so there is nothing to wait for"
        aside.start("slow", lambda: gate.wait() and 1)
        assert not aside.wait(0.0)
        gate.set()
        assert aside.wait(60.0)
        assert [key for key, _ in aside.collect()] == ["slow"]
    finally:
        gate.set()
        aside.close()


def test_a_failure_is_given_back_too() -> None:
    aside: BackgroundJobs[str, int] = BackgroundJobs(ThreadPoolExecutor(1))
    try:
        aside.start("bad", int, "x")
        assert select.select([aside.fileno()], [], [], 60)[0]
        ((_, future),) = aside.collect()
        assert isinstance(future.exception(), ValueError)
    finally:
        aside.close()
