"""When an engine ends: it is closed, its object is collected, or the program ends."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable


class Ending:
    """Calls `end` once, which must not refer to `owner`: when called, when `owner` is collected, or at the program's
    end.

    The collector runs on any thread at any moment: on the engine's own loop, or under a lock that the loop needs. So
    an owner that is collected is ended on a thread of its own, for which the program's end waits.
    """

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, self._collected)
        self._finalizer.atexit = False  # a thread can no longer be started by then
        atexit.register(self)

    @property
    def alive(self) -> bool:
        """Whether nothing has called `end` yet."""
        return self._finalizer.alive

    def __call__(self) -> None:
        """End it now, unless that was done."""
        atexit.unregister(self)
        if self._finalizer.detach() is not None:
            self._end()

    def _collected(self) -> None:
        atexit.unregister(self)
        threading.Thread(target=self._end, name="penstock-end").start()
