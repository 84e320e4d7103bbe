"""How late the kernel may wake a thread that sleeps for microseconds."""

from __future__ import annotations

import ctypes

PR_SET_TIMERSLACK = 29  # prctl(2)


def set_timer_slack(nanoseconds: int) -> None:
    """Of the calling thread and of those that it starts from now on; the kernel's own choice is 50 microseconds. Where
    it refuses, sleeps are as they were. Source: prctl(2), PR_SET_TIMERSLACK."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)
