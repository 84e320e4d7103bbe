"""Work beside the loop comes back by a descriptor."""

from __future__ import annotations

import select
import threading
from concurrent.futures import ThreadPoolExecutor

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
