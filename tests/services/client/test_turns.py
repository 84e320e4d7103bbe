"""Each client has so many turns at once, and nobody waits behind another's."""

from __future__ import annotations

import asyncio

from penstock.protocol.messages import Client
from penstock.services.client.turns import ClientTurns

ONE, OTHER = Client(name="one"), Client(name="other")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_clients_jobs_wait_for_its_own_in_order() -> None:
    turns, go = ClientTurns(2), [asyncio.Event() for _ in range(5)]
    begun: list[int] = []

    async def job(number: int, client: Client) -> None:
        async with turns.turn(client):
            begun.append(number)
            await go[number].wait()

    jobs = [asyncio.create_task(job(number, ONE)) for number in range(4)]
    jobs.append(asyncio.create_task(job(4, OTHER)))
    await settled()
    assert begun == [0, 1, 4]
    assert (turns.jobs(ONE), turns.jobs(OTHER), turns.waiting) == (4, 1, 2)
    jobs[2].cancel()
    await settled()
    assert (turns.jobs(ONE), turns.waiting) == (3, 1)
    go[1].set()
    await settled()
    assert begun == [0, 1, 4, 3]
    for each in go:
        each.set()
    await asyncio.gather(*jobs, return_exceptions=True)
    assert (turns.jobs(ONE), turns.jobs(OTHER), turns.waiting) == (0, 0, 0)
    assert not turns._lanes
