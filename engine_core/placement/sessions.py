"""Which replica a session was last at. Bounded: the one that was quiet for longest is forgotten first."""

from __future__ import annotations

MOST = 1 << 16


class Sessions:
    """Replicas by a session's name, least recent first."""

    def __init__(self, most: int = MOST) -> None:
        self._replicas: dict[str, int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, session: str) -> int | None:
        """Where the session was last; None for one that is not known, or that has no name."""
        return self._replicas.get(session)

    def put(self, session: str, replica: int) -> None:
        """The session goes on there. One without a name is none."""
        if not session:
            return
        self._replicas.pop(session, None)
        self._replicas[session] = replica
        if len(self._replicas) > self._most:
            del self._replicas[next(iter(self._replicas))]
