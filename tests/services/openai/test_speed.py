"""The path that costs most, from the rows of a TextBatch to the bytes of 256 streams (stream_writer.py)."""

from __future__ import annotations

import asyncio
import struct
import time

import msgspec
from starlette.types import Message

from penstock.protocol.links import TEXT, decoder
from penstock.protocol.messages import Finish, Sampling, SubmitText
from penstock.protocol.outputs import TextBatch, TextExtra
from penstock.services.client.output_collector import OutputCollector
from penstock.services.http.request_context import STREAM_WRITER
from penstock.services.openai.answers import Identity
from penstock.services.openai.generation import attended, stream
from penstock.services.openai.sse import SSEEncoder
from tests.services.client.fake_engine import FakeLink, app_state, request_context, silent
from tests.speed import slowness

STREAMS = 256
STEPS = 60
TARGET = 100_000  # tokens per second of one process's CPU time
IDENTITY = Identity("chatcmpl-0123456789abcdef0123456789abcdef", 1_700_000_000, "model")


def batches(ids: list[int]) -> list[bytes]:
    """What a tokenizer sends in STEPS steps, one token for each stream in each."""
    columns = {
        "ids": struct.pack(f"<{STREAMS}q", *ids),
        "choices": bytes(2 * STREAMS),
        "tokens": struct.pack(f"<{STREAMS}i", *[1] * STREAMS),
        "token_ids": bytes(4 * STREAMS),
    }
    made = []
    for step in range(STEPS):
        last = step == STEPS - 1
        batch = TextBatch(
            text=tuple(f" word{(row * 7 + step) % 97}" for row in range(STREAMS)),
            finish=bytes([Finish.STOP if last else Finish.NONE]) * STREAMS,
            extras=() if step else tuple(TextExtra(row=row, prompt_tokens=9) for row in range(STREAMS)),
            **columns,
        )
        made.append(msgspec.msgpack.encode(batch))
    return made


async def run() -> tuple[float, int]:
    """Rows per second of CPU time, and bytes sent."""
    port = FakeLink(silent)
    parts = app_state(port)
    sent = 0

    async def send(message: Message) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    class Wire:
        """What stands for the connection of a client that reads."""

        open = True

        def write(self, body: bytes) -> None:
            nonlocal sent
            sent += len(body)

    async def receive() -> Message:
        return await asyncio.Future()

    async def answer(collector: OutputCollector) -> None:
        context = request_context(receive=receive, send=send, **{STREAM_WRITER: Wire()})
        async with attended(collector, parts.engine_client, context):
            frames = SSEEncoder(IDENTITY, chat=True, choices=1)
            await stream(collector, frames, context)

    answers, ids = [], []
    for _ in range(STREAMS):
        collector = OutputCollector(1, 1, stream=True, timings=parts.traffic.timings, now=time.monotonic())
        request = SubmitText(prompt="a", sampling=Sampling(), stream=True)
        parts.engine_client.submit([request], collector, time.monotonic())
        ids += collector.request_ids
        answers.append(asyncio.create_task(answer(collector)))
    await asyncio.sleep(0)
    link = decoder(TEXT, at_binder=False)
    steps = batches(ids)
    started = time.process_time()
    for step in steps:
        port.arrive(link.decode(step))
        await asyncio.sleep(0)
    await asyncio.gather(*answers)
    return STREAMS * STEPS / (time.process_time() - started), sent


async def test_a_process_makes_more_frames_than_a_gpu_makes_tokens() -> None:
    target, rates = TARGET / slowness(), []
    while not rates or (rates[-1] <= target and len(rates) < 10):  # what shares the cores costs time of them as well
        rate, sent = await run()
        rates.append(rate)
        assert sent > STREAMS * (STEPS + 2) * 100
    assert max(rates) > target
