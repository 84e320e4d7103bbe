"""The end of a server on this host: in which order its processes are asked to end, and until when."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence

from penstock.protocol.links import Role
from penstock.protocol.parts import ORDER
from penstock.services.supervisor.child import Child
from penstock.services.supervisor.restart_policy import RestartPolicy

END_ORDER = ORDER  # from the clients to the device: each role may still serve the ones before it
END_SECONDS = 5.0  # from SIGTERM to SIGKILL, beyond draining


class Shutdown:
    """The end of a server: its roles are asked to end one after the other, and killed after a deadline."""

    def __init__(self, restarts: Iterable[RestartPolicy], drain_seconds: float) -> None:
        self.remaining: list[Role] | None = None  # roles not yet asked to end; None while serving
        self.asked: list[Child] = []  # by the last request
        self.deadline = float("inf")  # monotonic seconds at which those are killed
        self._restarts = tuple(restarts)
        self._drain_seconds = drain_seconds
        self._drained = False  # once the first role has drained, the others have no requests left

    @property
    def begun(self) -> bool:
        return self.remaining is not None

    def begin(self, children: Sequence[Child]) -> None:
        """End in order: each role after the roles that it serves."""
        self.remaining = list(END_ORDER)
        self.next_role(children)

    def next_role(self, children: Sequence[Child]) -> None:
        """Ask the next role that has processes to end."""
        assert self.remaining is not None
        while self.remaining:
            role = self.remaining.pop(0)
            found = [child for child in children if child.role is role]
            self._give_up((role,))
            if found:
                drains, self._drained = not self._drained, True
                self._ask(found, END_SECONDS + (self._drain_seconds if drains else 0.0))
                return

    def all_at_once(self, children: Sequence[Child]) -> None:
        """Ask all processes to end: nothing is left to drain."""
        self.remaining = []
        self._ask(children, END_SECONDS)

    def cancel(self) -> None:
        """Wait for nothing more; the caller kills the remaining processes."""
        self.remaining = []
        self._give_up(Role)

    def _ask(self, children: Sequence[Child], seconds: float) -> None:
        if not self.remaining:
            self._give_up(Role)  # these are the last
        self.asked = list(children)
        self.deadline = time.monotonic() + seconds
        for child in self.asked:
            child.signal(signal.SIGTERM)

    def _give_up(self, roles: Iterable[Role]) -> None:
        for policy in self._restarts:
            policy.give_up(roles)
