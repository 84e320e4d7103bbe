"""What a replica's prefix cache probably holds, as seen from outside: the identities of blocks that were sent there.

An approximation on purpose: the replica never tells. It holds as many identities as the replica has blocks, and forgets
the one that was used least recently, a chain's end before its beginning, as the replica's pool does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST = 1 << 18  # identities of one replica; some 30 MB


class Shadow:
    """Identities by use, least recent first."""

    def __init__(self) -> None:
        self._identities: OrderedDict[bytes, None] = OrderedDict()  # a dict's first is ever farther behind what is gone
        self._limit = 0

    def __len__(self) -> int:
        return len(self._identities)

    @property
    def room(self) -> int:
        """Blocks that can be added before any is forgotten."""
        return self._limit - len(self._identities)

    def resize(self, blocks: int) -> None:
        """The replica has so many blocks."""
        self._limit = min(blocks, MOST)
        self._trim()

    def hits(self, chain: Sequence[bytes]) -> int:
        """How many blocks at the beginning of `chain` are there."""
        identities = self._identities
        count = 0
        for identity in chain:
            if identity not in identities:
                break
            count += 1
        return count

    def use(self, chain: Sequence[bytes]) -> None:
        """These blocks are used, or made, now."""
        identities = self._identities
        for identity in reversed(chain):  # the beginning last: whatever is longer goes through it
            identities[identity] = None
            identities.move_to_end(identity)
        self._trim()

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._identities.clear()

    def _trim(self) -> None:
        for _ in range(len(self._identities) - self._limit):
            self._identities.popitem(last=False)
