"""Decodes pictures of requests in worker processes, with limits on pixels, CPU time and memory, and caches them: every
turn of a chat brings the pictures of all turns before.

A picture that takes a decoder with it ends its request alone. One client leaves a worker to the others: its pictures
wait for its own. Of a request that has ended, or has a picture that is refused, no more are begun.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from penstock.engine_core.images.picture import Picture, digest_of
from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.text.image_prompt import PixelBudget
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest, Overloaded, RequestError
from penstock.protocol.images import ImageFile
from penstock.protocol.media import LIMIT
from penstock.protocol.messages import Client
from penstock.services.client.turns import ClientTurns
from penstock.services.tokenizer.confinement import environment
from penstock.services.tokenizer.outcome_cache import OutcomeCache
from penstock.services.tokenizer.worker_pool import MOST_WAITING, PATIENCE, WorkerKind, WorkerPool
from penstock.services.tokenizer.worker_protocol import DECODED, ImageJob, ImageSettings, Refusal

LEAST_WORKERS, MOST_WORKERS = 2, 4  # unless the operator says otherwise
SLACK = 2.0  # seconds beyond the CPU limit: a large file and its pixels on their way
MOST_BYTES = 256 << 20  # of cached pixels
MOST_PIXELS = 256 << 20  # bytes of those of one picture
NOBODY = Client()
ENTRY = 512  # bytes of a cache entry besides its pixels
# A child that decodes touches megabytes of new memory, page by page otherwise. Source: glibc's manual, tunables.
HUGE_PAGES: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def nobody(_: int) -> bool:
    return False


def always() -> bool:
    return True


class Demand(msgspec.Struct):
    """What one request wants decoded: for whom, and whether anybody waits for it."""

    client: Client = NOBODY
    wanted: Callable[[], bool] = always
    error: RequestError | None = None  # which its first picture that cannot be had has ended it with

    @property
    def stands(self) -> bool:
        return self.error is None and self.wanted()


class ImageDecoderStatistics(msgspec.Struct, frozen=True):
    """Counters since the start, and present numbers."""

    workers: int  # now
    waiting: int  # now: pictures without a worker
    bytes: int  # now: of the cache
    held: int  # bytes of pixels of unfinished requests, as of the last image
    decoded: int
    refused: int  # files, those that exceeded a limit included
    hits: int  # pictures that were cached or being decoded


class ImageDecoder:
    """Owns the workers and the cache. Used on one asyncio loop."""

    def __init__(self, processor: ProcessorSpec, limit: int, options: TokenizerConfig) -> None:
        """`limit`: images of one prompt."""
        self._options = options
        self._limit = limit
        self._decoded = self._refused = 0
        self._budget = PixelBudget(options.media_max_bytes)
        settings = ImageSettings(processor, options.media_max_pixels, options.media_timeout, options.media_memory)
        kind = WorkerKind(
            "image", "images cannot be decoded at this time", "penstock.services.tokenizer.image_worker",
            settings.limits, (str(os.getpid()),), {**environment(os.environ), **HUGE_PAGES},
            msgspec.msgpack.encode(settings), spare=1, shared=MOST_PIXELS,
        )  # fmt: skip
        by_cores = max(LEAST_WORKERS, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 4))
        size = options.media_workers or by_cores
        self._pool = WorkerPool(kind, size)
        self._turns, self._keys = ClientTurns(max(1, size - 1)), ClientTurns(size)
        self._cache: OutcomeCache[Picture | Refusal | None] = OutcomeCache(
            self._pool, "images wait to be decoded", size_of, MOST_BYTES
        )

    def start(self) -> None:
        self._pool.fill()

    async def warm(self) -> None:
        """Wait until a worker is ready for the first picture, or the log says why none is."""
        await self._pool.warm()

    async def pictures(
        self, files: Sequence[ImageFile], request: int = 0, alive: Callable[[int], bool] = nobody,
        client: Client = NOBODY, wanted: Callable[[], bool] = always,
    ) -> tuple[Picture, ...]:  # fmt: skip
        """The images of one prompt, decoded side by side. alive: whether a request has not ended. wanted: whether
        anybody waits for these.

        Raises InvalidRequest for the first one that is refused, whatever becomes of the others, and for more than one
        prompt may have; Overloaded, EngineFailure.
        """
        if len(files) > self._limit:
            message = f"a prompt may hold {self._limit} images ({LIMIT}), and this one holds {len(files)}"
            raise InvalidRequest(message, param=files[self._limit].param or None, code="limit_exceeded")
        if self._turns.jobs(client) + len(files) > MOST_WAITING:
            raise Overloaded("too many images wait to be decoded")
        demand = Demand(client, wanted)

        async def counted(file: ImageFile) -> Picture:
            picture = await self.picture(file, demand)
            self._budget.add(request, len(picture.pixels), alive)
            return picture

        try:
            return tuple(await asyncio.gather(*map(counted, files)))
        except RequestError as error:
            demand.error = error
            raise

    async def picture(self, file: ImageFile, demand: Demand | None = None) -> Picture:
        """One file as the model sees it. Raises InvalidRequest with the file's field, Overloaded, EngineFailure."""
        demand = demand or Demand()
        loop = asyncio.get_running_loop()
        key = await loop.run_in_executor(None, digest_of, file.data, file.detail)  # large files take milliseconds
        outcome = None
        while outcome is None:  # whoever asked first may need it no more
            if not demand.stands:
                raise demand.error or EngineFailure("its request has ended")
            outcome = await self._cache.get(key, partial(self._decode, key, file, demand))
        if isinstance(outcome, Refusal):
            raise refused(file, outcome)
        return outcome

    def close(self) -> None:
        self._cache.close()
        self._pool.close()

    def statistics(self) -> ImageDecoderStatistics:
        return ImageDecoderStatistics(
            workers=len(self._pool.workers),
            waiting=self._turns.waiting + self._keys.waiting + self._pool.waiting,
            bytes=self._cache.bytes,
            held=self._budget.total,
            decoded=self._decoded,
            refused=self._refused,
            hits=self._cache.hits,
        )

    async def _decode(self, key: bytes, file: ImageFile, demand: Demand) -> Picture | Refusal | None:
        """None: it is not needed any more. A key gains no turns by inventing users."""
        client = demand.client
        async with self._turns.turn(client), self._keys.turn(Client(client.tenant)):
            if not demand.stands:
                return None
            found = await self._outcome(key, msgspec.msgpack.encode(ImageJob(file.data, file.detail)))
            if isinstance(found, Refusal):
                demand.error = refused(file, found)  # before the next one's turn
                self._refused += 1
            else:
                self._decoded += 1
                self._cache.keep(key, found)
            return found

    async def _outcome(self, key: bytes, body: bytes) -> Picture | Refusal:
        """A worker's answer; a worker that exceeds a limit itself makes a refusal."""
        found = await self._pool.ask(body, self._options.media_timeout * PATIENCE + SLACK)
        if isinstance(found, Refusal):
            return found
        answer = DECODED.decode(found.body)
        return answer if isinstance(answer, Refusal) else Picture(answer.height, answer.width, key, found.shared)


def refused(file: ImageFile, refusal: Refusal) -> InvalidRequest:
    """The error of a request with such a file."""
    field = file.param or "image"
    return InvalidRequest(f"{field}: {refusal.message}", param=file.param or None, code=refusal.code)


def size_of(outcome: Picture | Refusal | None) -> int:
    assert isinstance(outcome, Picture), "a refusal is not kept: its file is decoded again"
    return ENTRY + len(outcome.pixels)
