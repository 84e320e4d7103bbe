"""What a process does beside its work, as long as it lives: nobody waits for it, so nobody would see it fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


def begin(duty: Coroutine[None, None, None], failed: Callable[[Exception], None]) -> asyncio.Task[None]:
    """Start a duty, the caller's to cancel. `failed` is called with what it ends by, if that is an error: a process
    whose duty is not done looks alive and is not, so it had better end."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            failed(error)

    task = asyncio.create_task(duty)
    task.add_done_callback(ended)
    return task
