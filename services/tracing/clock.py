"""Wall time for spans: monotonic seconds and an offset that is found once, so that what nests in one nests in all.

Processes of one machine share the kernel's clocks and get the offset of their launcher. A process elsewhere has clocks
of its own: it estimates, from the handshakes that it begins, how far the binder's are ahead, and goes by those.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

VARIABLE = "PENSTOCK_CLOCK"  # nanoseconds of the launcher's offset, in its children's environment
SAMPLES = 8  # handshakes that an estimate is taken from; they come every two seconds
LOOKS = 5
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Sample(msgspec.Struct, frozen=True, order=True):
    """One handshake: the shorter its round trip, the less is unknown about the offset."""

    round_trip: int  # nanoseconds
    offset: int


class Clock:
    """One process's wall time. `place` tells machines apart; equal ones have the same clocks. `leads`: it goes by
    nobody's."""

    def __init__(self, offset: int, place: int = 0, *, leads: bool = False) -> None:
        self.place = place
        self._settled = leads  # or it has heard of whom it goes by
        self.correction = 0  # nanoseconds that the binders are ahead of us
        self.offset = offset  # nanoseconds from monotonic to our own wall time
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)

    def nanoseconds(self, monotonic: float) -> int:
        """Unix nanoseconds of a moment in monotonic seconds."""
        return round(monotonic * 1e9) + self.offset + self.correction

    def local(self) -> int:
        """Unix nanoseconds now, as our own clock has them."""
        return time.monotonic_ns() + self.offset

    def now(self) -> int:
        """Unix nanoseconds now, as we tell them to whoever goes by us; 0 while we have not heard of whom we go by."""
        return self.local() + self.correction if self._settled else 0

    @property
    def uncertainty(self) -> int:
        """Nanoseconds by which the correction may be wrong."""
        return min(self._samples).round_trip // 2 + 1 if self._samples else 0

    def welcome(self, place: int, sent: int, answered: int) -> None:
        """A binder's answer has come. Where it goes by clocks of this machine nothing is corrected."""
        if not (place and sent and answered):
            return
        self._settled = True
        if place != self.place:
            self.observe(sent, answered, self.local())

    def observe(self, sent: int, answered: int, received: int) -> None:
        """A binder elsewhere answered at `answered`, as its `now` told it, to what left at `sent` and came back at
        `received`, as our `local` did. Source: RFC 5905, section 8, with the binder's two times taken as one."""
        self._settled = True
        self._samples.append(Sample(received - sent, answered - (sent + received) // 2))
        self.correction = min(self._samples).offset


def clock_of(environ: Mapping[str, str] = os.environ, *, leads: bool = False) -> Clock:
    """This process's clock, by the launcher's offset where there is one."""
    given = environ.get(VARIABLE, "")
    return Clock(int(given) if given.lstrip("-").isdecimal() else found_offset(), machine(), leads=leads)


def machine() -> int:
    """A number for this kernel since it was booted: whoever has the same has the same clocks. 0 where that cannot be
    known. Source: random(4)."""
    try:
        return zlib.crc32(BOOT.read_bytes())
    except OSError:
        return 0


def found_offset() -> int:
    """Nanoseconds from monotonic to unix time: the look that took the shortest."""
    looks = []
    for _ in range(LOOKS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        looks.append((after - before, wall - (before + after) // 2))
    return min(looks)[1]
