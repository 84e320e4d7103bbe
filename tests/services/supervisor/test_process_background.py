"""A background task that fails is reported; one that is cancelled, or has ended, is not."""

from __future__ import annotations

import asyncio

import pytest

from penstock.services.supervisor.process import background_task


async def test_a_failure_is_told() -> None:
    failures: list[Exception] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("out of room")

    task = background_task(fail(), failures.append)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(failure) for failure in failures] == ["out of room"]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_an_end_in_order_is_not(cancelled: bool) -> None:
    failures: list[Exception] = []
    over = asyncio.Event()

    async def wait() -> None:
        await over.wait()

    task = background_task(wait(), failures.append)
    await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    over.set()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert task.cancelled() is cancelled
    assert failures == []
