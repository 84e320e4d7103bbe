"""What a limit of CPU time means on a machine that is slower than the one on which it was set."""

from __future__ import annotations

import time

TAKES = 0.0025  # seconds of CPU where the limits of tests were set
TRIES = 10


def slowness() -> float:
    """How many times as long as there a core needs here for the same work, the least of several tries; at least 1."""
    tries = []
    for _ in range(TRIES):
        began = time.thread_time()
        sum(number * number for number in range(100_000))
        tries.append(time.thread_time() - began)
    return max(1.0, min(tries) / TAKES)
