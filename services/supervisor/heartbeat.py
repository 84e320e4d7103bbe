"""A process tells its supervisor that it still turns: WATCHDOG=1 of the sd_notify protocol.

systemd asks for it with WatchdogSec=, `penstock serve` asks its own children; both kill a process that fell silent.
Penstock watches only who has begun to tell: loading takes as long as it takes. Source: sd_watchdog_enabled(3).

A notice is lost where a supervisor that is late has as many waiting as the kernel keeps for it, ten by default. What a
process says of itself for good, that it is ready above all, therefore stands in every beat.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping

from penstock.services.supervisor.sd_notify import notify, speaker

INTERVAL = "WATCHDOG_USEC"  # microseconds of silence after which the supervisor acts
PID = "WATCHDOG_PID"  # whom it means, if anybody in particular
SHARE = 4  # beats per interval
PASSING = "STATUS="  # what begins so is said once: it is of a moment
LONGEST = 60.0  # seconds between looks of who was not asked to beat


class Heartbeat:
    """Called in every turn of a loop; tells now and then."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        meant = environ.get(PID, str(os.getpid())) == str(os.getpid())
        asked = environ.get(INTERVAL, "")
        self.interval = int(asked) / 1e6 / SHARE if meant and asked.isdecimal() and int(asked) else float("inf")
        self._next = float("-inf") if self.interval < float("inf") else float("inf")
        self._told: tuple[str, ...] = ()
        # Who beats is killed when it falls silent, so it must be able to speak with no descriptor left.
        self._speaker = speaker() if self.interval < float("inf") else None
        if self._speaker is not None:
            weakref.finalize(self, self._speaker.close)

    def tell(self, *lines: str) -> None:
        """Tell it now, behind all that was told before, and again with each beat; a status now alone. By one thread."""
        lasting = [line for line in lines if not line.startswith(PASSING)]
        self._told = tuple(dict.fromkeys((*self._told, *lasting)))
        notify(*self._told, *(line for line in lines if line.startswith(PASSING)), environ=self._environ)

    def tick(self, now: float) -> None:
        """`now` is in monotonic seconds."""
        if now >= self._next:
            self._next = now + self.interval
            # Until it is ready a process may have to wait for others: as long as it beats, that is no timeout.
            patience = f"EXTEND_TIMEOUT_USEC={int(2e6 * SHARE * self.interval)}"
            notify("WATCHDOG=1", patience, *self._told, environ=self._environ, given=self._speaker)


async def beating(heartbeat: Heartbeat) -> None:
    """Tick on the running loop, until it is cancelled: the beats say that this loop turns."""
    loop = asyncio.get_running_loop()
    while True:
        heartbeat.tick(loop.time())
        await asyncio.sleep(min(heartbeat.interval, LONGEST))
