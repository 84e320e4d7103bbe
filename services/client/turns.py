"""What clients may use at once of something that all share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from penstock.protocol.messages import Client


class Lane(msgspec.Struct):
    """The jobs of one client."""

    turns: asyncio.Semaphore
    jobs: int = 0  # that have a turn or wait for one


class ClientTurns:
    """Turns at so many jobs of each client; its others wait in order, and nobody else behind them."""

    def __init__(self, each: int) -> None:
        self.waiting = 0  # jobs without a turn
        self._each = each
        self._lanes: dict[Client, Lane] = {}

    def jobs(self, client: Client) -> int:
        """That have a turn or wait for one."""
        lane = self._lanes.get(client)
        return 0 if lane is None else lane.jobs

    @asynccontextmanager
    async def turn(self, client: Client) -> AsyncIterator[None]:
        """While inside, the job has its turn."""
        lane = self._lanes.setdefault(client, Lane(asyncio.Semaphore(self._each)))
        lane.jobs += 1
        try:
            self.waiting += 1
            try:
                await lane.turns.acquire()
            finally:
                self.waiting -= 1
            try:
                yield
            finally:
                lane.turns.release()
        finally:
            lane.jobs -= 1
            if not lane.jobs:
                del self._lanes[client]
