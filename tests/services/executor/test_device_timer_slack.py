"""A thread's sleeps become exact, and nobody else's."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

from penstock.services.executor.device import set_timer_slack

PR_GET_TIMERSLACK = 30


def slack() -> int:
    """Nanoseconds, of the calling thread."""
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


def test_the_calling_thread_is_woken_in_time() -> None:
    before = slack()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(set_timer_slack, 1000).result(60)
        assert thread.submit(slack).result(60) == 1000
    assert slack() == before
