"""Pictures of requests: whatever a file is, it is decoded or refused within its limits, and nobody else is harmed
(image_worker.py, worker_protocol.py)."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine_core.images.picture import Picture, digest_of
from penstock.engine_core.images.processor_spec import FixedSize, ProcessorSpec, SmartResize
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Client
from penstock.services.tokenizer import image_decoder, image_worker, worker_pool
from penstock.services.tokenizer.confinement import limit_passed
from penstock.services.tokenizer.image_decoder import ImageDecoder
from penstock.services.tokenizer.worker_pool import Reply
from penstock.services.tokenizer.worker_protocol import DECODED, Decoded, ImageJob, ImageSettings, Refusal
from tests.engine_core.images.pictures import files, noise, read_picture, write

PROCESSOR = ProcessorSpec(mean=(0.5,) * 3, std=(0.5,) * 3, resize=SmartResize(least=3136, most=100_000, factor=28))
LIMITS: dict[str, Any] = {"media_workers": 1, "media_timeout": 5.0, "media_memory": 256 << 20}
SMALL = write(noise(64, 64), "PNG")  # "square" of files()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is limited, as each test says. By the clock a busy machine may take a minute."""
    monkeypatch.setattr(image_decoder, "SLACK", 60.0)


@asynccontextmanager
async def decoding(limit: int = 4, processor: ProcessorSpec = PROCESSOR, **options: Any) -> AsyncIterator[ImageDecoder]:
    decoder = ImageDecoder(processor, limit, TokenizerConfig(**{**LIMITS, **options}))
    decoder.start()
    await decoder.warm()
    try:
        yield decoder
    finally:
        workers = list(decoder._pool.workers)
        decoder.close()
        for worker in workers:
            await worker.end()


def file(data: bytes, detail: str = "auto") -> ImageFile:
    return ImageFile(data=data, detail=detail, param="messages[0].content[1].image_url")


def blank(width: int, height: int) -> bytes:
    """A PNG of zeros, a thousandth of its pixels in bytes."""
    found = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(1)
    body = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(height)) + packer.flush()
    for name, content in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")):
        found += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return found


async def refused(decoder: ImageDecoder, data: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await decoder.pictures((file(data),))
    return caught.value


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
async def test_confined_workers_decode_every_kind() -> None:
    """As this process does, whatever Pillow imports for it; the same picture twice is decoded once."""
    async with decoding(limit=99, media_workers=2) as decoder:
        named = {name: data for name, data in files().items() if name != "flat"}
        found = await decoder.pictures(tuple(file(data, "low") for data in named.values()))
        for (name, data), picture in zip(named.items(), found, strict=True):
            assert picture == read_picture(data, "low", PROCESSOR, 1 << 24), name
        again = await decoder.pictures(tuple(map(file, (SMALL, SMALL))))
        assert [picture.pixels for picture in again] == [found[4].pixels] * 2
        statistics = decoder.statistics()
        assert (statistics.decoded, statistics.hits, statistics.refused) == (len(named) + 1, 1, 0)
        assert statistics.waiting == 0
        assert statistics.workers <= 3, "two at work, and a spare"


async def test_refusals_name_the_field_and_harm_no_neighbour() -> None:
    async with decoding(media_max_pixels=1 << 20) as decoder:
        before = resident(os.getpid())
        for data, message, code in (
            (b"GIF89a", "it is a GIF; images are PNG, JPEG or WebP", "invalid_image_format"),
            (SMALL[:300], "it is a PNG that is truncated or damaged", "image_parse_error"),
            (
                header(100_000, 100_000),
                "it has 100000 x 100000 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
            ),
            (
                write(noise(900, 3), "PNG"),
                "it has 900 x 3 pixels; for this model one side may be at most 200 times the other", "image_too_small",
            ),
        ):  # fmt: skip
            found, good = await asyncio.gather(refused(decoder, data), decoder.picture(file(SMALL)))
            assert found.message == f"messages[0].content[1].image_url: {message}"
            assert (found.param, found.code) == ("messages[0].content[1].image_url", code)
            assert isinstance(good, Picture)
        assert decoder.statistics().refused == 4
        assert resident(os.getpid()) - before < 16 << 20
        assert decoder._pool.replaced == 0


def header(width: int, height: int) -> bytes:
    return SMALL[:16] + struct.pack(">II", width, height) + SMALL[24:29] + zlib.crc32(
        SMALL[12:16] + struct.pack(">II", width, height) + SMALL[24:29]
    ).to_bytes(4, "big") + SMALL[33:]  # fmt: skip


async def test_limits_are_named() -> None:
    large = blank(6000, 6000)
    async with decoding(media_timeout=0.05) as decoder:
        found = await refused(decoder, large)
        assert found.message.endswith("decoding it takes more than 0.05 s (--media-timeout)")
        assert found.code == "image_too_complex"
        assert isinstance(await decoder.picture(file(SMALL)), Picture)
    async with decoding(media_memory=64 << 20) as decoder:
        found = await refused(decoder, large)
        assert found.message.endswith("decoding it takes more than 64 MiB (--media-memory)")
        assert isinstance(await decoder.picture(file(SMALL)), Picture)
        assert decoder._pool.replaced == 0, "the child died, and not the worker"


async def test_more_images_than_allowed_are_refused_before_any_is_decoded() -> None:
    async with decoding(limit=2) as decoder:
        with pytest.raises(InvalidRequest) as caught:
            await decoder.pictures((file(SMALL),) * 3)
        assert caught.value.message == "a prompt may hold 2 images (--limit-mm-per-prompt), and this one holds 3"
        assert caught.value.code == "limit_exceeded"
        assert decoder.statistics().decoded == 0


async def test_a_decoder_that_hangs_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decoding(media_timeout=0.1) as decoder:
        (worker,) = decoder._pool.workers
        os.kill(worker.pid, signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(image_decoder, "SLACK", 0.0)
            found = await refused(decoder, SMALL)
        assert found.message.endswith("more than 0.1 s (--media-timeout)")
        assert isinstance(await decoder.picture(file(SMALL)), Picture)
        assert worker not in decoder._pool.workers


async def test_a_worker_that_is_killed_costs_time_only() -> None:
    async with decoding() as decoder:
        (worker,) = decoder._pool.workers
        os.kill(worker.pid, signal.SIGKILL)
        assert isinstance(await decoder.picture(file(SMALL)), Picture)


async def test_what_no_worker_answers_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decoding() as decoder:

        async def fails(*_: object) -> bytes:
            raise EngineFailure("no worker")

        with monkeypatch.context() as patched:
            patched.setattr(decoder._pool, "ask", fails)
            with pytest.raises(EngineFailure):
                await decoder.pictures((file(SMALL),))
        monkeypatch.setattr(decoder._pool, "waiting", 1 << 20)
        with pytest.raises(Overloaded):
            await decoder.pictures((file(SMALL),))


class Bench:
    """Takes the place of the workers: what is asked is held until the test lets it go."""

    def __init__(self, decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[bytes] = []
        self.held: dict[bytes, asyncio.Future[None]] = {}
        monkeypatch.setattr(decoder._pool, "_ask", self.ask)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # digests are made in order

    async def ask(self, body: bytes, seconds: float) -> Reply:
        data = msgspec.msgpack.decode(body, type=ImageJob).data
        self.begun.append(data)
        self.held[data] = asyncio.get_running_loop().create_future()
        await self.held[data]
        del self.held[data]
        if data.startswith(b"bad"):
            return Reply(msgspec.msgpack.encode(Refusal("it is bad", "image_parse_error")))
        return Reply(msgspec.msgpack.encode(Decoded(1, 1)), bytes(3))

    async def until(self, *data: bytes) -> None:
        """Whatever can begin has begun: these are held, and nothing else."""
        await settled()
        await asyncio.get_running_loop().run_in_executor(None, int)  # behind all digests
        await settled()
        assert self.held.keys() == set(data)

    def let(self, *data: bytes) -> None:
        for each in data:
            self.held[each].set_result(None)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def asking(
    decoder: ImageDecoder, client: Client, *data: bytes, wanted: Callable[[], bool] = lambda: True
) -> asyncio.Task[tuple[Picture, ...]]:
    return asyncio.create_task(decoder.pictures(tuple(map(file, data)), client=client, wanted=wanted))


ONE, OTHER = Client(name="one"), Client(name="other")


async def test_a_client_leaves_a_worker_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decoding(media_workers=2) as decoder:
        bench = Bench(decoder, monkeypatch)
        slow = asking(decoder, ONE, b"a", b"b", b"c")
        await bench.until(b"a")
        assert decoder.statistics().waiting == 2
        other = asking(decoder, OTHER, b"d")
        await bench.until(b"a", b"d")
        bench.let(b"d")
        assert len(await other) == 1
        again = asking(decoder, OTHER, b"d")
        assert len(await again) == 1, "what is cached needs no turn"
        for each in (b"a", b"b", b"c"):
            await bench.until(each)
            bench.let(each)
        assert len(await slow) == 3
        assert decoder.statistics().waiting == 0


async def test_one_worker_is_whoevers_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client waits for more than one picture of another."""
    async with decoding() as decoder:
        bench = Bench(decoder, monkeypatch)
        slow = asking(decoder, ONE, b"a", b"b", b"c")
        await bench.until(b"a")
        other = asking(decoder, OTHER, b"d")
        for each in (b"a", b"d", b"b", b"c"):
            await bench.until(each)
            bench.let(each)
        assert (len(await slow), len(await other)) == (3, 1)


async def test_a_key_gains_nothing_by_inventing_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decoding(media_workers=2) as decoder:
        bench = Bench(decoder, monkeypatch)
        invented = [asking(decoder, Client("key", name), name.encode()) for name in ("a", "b", "c")]
        await bench.until(b"a", b"b")
        other = asking(decoder, Client("other key", "d"), b"d")
        await bench.until(b"a", b"b")
        bench.let(b"a")
        await bench.until(b"b", b"d")
        bench.let(b"b", b"d")
        await bench.until(b"c")
        bench.let(b"c")
        await asyncio.gather(*invented, other)


async def test_the_first_picture_that_is_refused_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and none of its others is begun."""
    async with decoding(media_workers=3) as decoder:
        bench = Bench(decoder, monkeypatch)
        found = asking(decoder, ONE, b"a", b"bad", b"b", b"c")
        await bench.until(b"a", b"bad")
        bench.let(b"bad")
        with pytest.raises(InvalidRequest, match="it is bad"):
            await found
        await bench.until(b"a")
        bench.let(b"a")
        assert len(await asking_for(bench, decoder, b"d")) == 1
        assert bench.begun == [b"a", b"bad", b"d"]
        assert decoder.statistics().waiting == 0


async def asking_for(bench: Bench, decoder: ImageDecoder, data: bytes) -> tuple[Picture, ...]:
    """One more picture of a client whose others had their turns before."""
    found = asking(decoder, ONE, data)
    await bench.until(data)
    bench.let(data)
    return await found


async def test_pictures_of_a_request_that_has_ended_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that another request waits for."""
    async with decoding() as decoder:
        bench = Bench(decoder, monkeypatch)
        wanted = True
        ended = asking(decoder, ONE, b"a", b"b", b"c", wanted=lambda: wanted)
        await bench.until(b"a")
        other = asking(decoder, OTHER, b"b")
        await bench.until(b"a")
        wanted = False
        bench.let(b"a")
        await bench.until(b"b")
        bench.let(b"b")
        assert len(await other) == 1
        with pytest.raises(EngineFailure):
            await ended
        assert len(await asking_for(bench, decoder, b"d")) == 1
        assert bench.begun == [b"a", b"b", b"d"]


async def test_a_client_with_too_many_waiting_pictures_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other client."""
    async with decoding() as decoder:
        bench = Bench(decoder, monkeypatch)
        monkeypatch.setattr(image_decoder, "MOST_WAITING", 3)
        slow = asking(decoder, ONE, b"a", b"b")
        await bench.until(b"a")
        more = asking(decoder, ONE, b"c", b"d")
        await settled()
        assert isinstance(more.exception(), Overloaded)
        other = asking(decoder, OTHER, b"c", b"d")
        for each in (b"a", b"c", b"b", b"d"):
            await bench.until(each)
            bench.let(each)
        await asyncio.gather(slow, other)


async def test_the_cache_is_bounded_and_keeps_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    each = 3 * 84 * 84 + image_decoder.ENTRY
    monkeypatch.setattr(image_decoder, "MOST_BYTES", 3 * each)
    async with decoding() as decoder:
        data = [write(noise(84, 84, seed=number), "PNG") for number in range(4)]
        for number in (0, 1, 2, 0, 3):
            assert len((await decoder.picture(file(data[number]))).pixels) == each - image_decoder.ENTRY
        assert list(decoder._cache._kept) == [digest_of(data[number], "auto") for number in (2, 0, 3)]
        assert decoder.statistics().bytes == 3 * each


async def test_requests_for_one_picture_share_its_decoding() -> None:
    async with decoding() as decoder:
        found = await asyncio.gather(*(decoder.pictures((file(SMALL),)) for _ in range(5)))
        assert len(set(found)) == 1
        assert (decoder.statistics().decoded, decoder.statistics().hits) == (1, 4)


async def test_memory_of_a_large_picture_is_given_back() -> None:
    """The pixels of the next one are its own: no worker's memory holds more than a few megabytes of the last."""
    side = 1300
    processor = ProcessorSpec(mean=(0.5,) * 3, std=(0.5,) * 3, resize=FixedSize(height=side, width=side))
    async with decoding(processor=processor) as decoder:
        large = await decoder.picture(file(write(noise(64, 64), "PNG")))
        assert len(large.pixels) == 3 * side * side
        assert any(large.pixels[worker_pool.KEPT :])
        memories = [worker._shared for worker in decoder._pool.workers]
        (shared,) = [one for one in memories if one is not None and any(one[: worker_pool.KEPT])]
        assert len(shared) == image_decoder.MOST_PIXELS
        assert not any(shared[worker_pool.KEPT : len(large.pixels)])


def test_a_child_that_says_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pixels than there are, none, or no answer at all; the next picture has a child of its own."""
    settings, job = ImageSettings(PROCESSOR, 1 << 20, 5.0, 256 << 20), msgspec.msgpack.encode(ImageJob(SMALL, "auto"))
    pixels = mmap.mmap(-1, 3 * 100_000)
    for lie in (Decoded(1 << 20, 1 << 20), Decoded(0, 64), Decoded(-5, -5), b"nothing"):
        with monkeypatch.context() as patched:
            body = msgspec.msgpack.encode(lie)
            patched.setattr(image_worker.ImageWorker, "_decode", lambda _, __, body=body: body)
            worker = image_worker.ImageWorker(settings, pixels)
            answer, size = worker.answer(job)
            assert (DECODED.decode(answer), size) == (Refusal("it cannot be decoded", "image_parse_error"), 0), lie
        worker.renew(prepared=False)
        answer, size = worker.answer(job)
        expected = read_picture(SMALL, "auto", PROCESSOR, 1 << 20)
        assert DECODED.decode(answer) == Decoded(expected.height, expected.width)
        assert pixels[:size] == expected.pixels
        worker._child.end(kill=True)


def test_how_a_child_ended_is_told() -> None:
    settings = ImageSettings(PROCESSOR, 1 << 20, 2.0, 64 << 20)
    for code, text in (
        (-signal.SIGPROF, "2 s (--media-timeout)"),
        (-signal.SIGXCPU, "2 s (--media-timeout)"),
        (-signal.SIGSEGV, "64 MiB (--media-memory)"),
        (os.EX_UNAVAILABLE, "64 MiB (--media-memory)"),
    ):
        found = limit_passed(code, settings.limits)
        assert isinstance(found, Refusal)
        assert text in found.message
    assert limit_passed(os.EX_SOFTWARE, settings.limits) is None


def resident(pid: int) -> int:
    """Bytes. Source: proc(5), statm."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
