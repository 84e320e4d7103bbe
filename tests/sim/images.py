"""Images of lives, and what the fake executors of a first stage have of them: rows of an encoder cache.

A row's content is the image that was last encoded into it, and which of its rows it is. From when an image is asked
for until its executor has encoded it, and a plan has had the others receive it, its rows hold nothing: so whoever reads
them early, or once they were given away, shows. Rows that a step reads may not be asked for anew before it was applied.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from penstock.engine_core.scheduling.encoder_cache import ENCODES
from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.images import EncodeImage, Image, ImageEncoded
from penstock.protocol.steps import SlotStart, StepPlan
from tests.sim.adapters import GROUP

PLACEHOLDER = 63  # the token that stands for a row
BREAK = 62  # ends a line of an image that has lines
LINE = 2  # rows of such a line
BAD = b"bad"  # in the pixels of an image that no executor can encode
REASON = "out of memory"


def picture(number: int, rows: int, position: int = 0, *, lines: bool = False, bad: bool = False) -> Image:
    """An image that differs from those of other numbers."""
    pixels = (BAD if bad else b"") + f"{number:06}-{rows}".encode()
    pixels += bytes(-len(pixels) % 3)
    return Image(
        position=position,
        length=len(tokens_of(rows, lines=lines)),
        rows=rows,
        width=len(pixels) // 3,
        height=1,
        digest=blake2b(pixels, digest_size=16).digest(),
        pixels=pixels,
    )


def tokens_of(rows: int, *, lines: bool = False) -> list[int]:
    """The tokens of an image."""
    found: list[int] = []
    for row in range(rows):
        found.append(PLACEHOLDER)
        if lines and row % LINE == LINE - 1:
            found.append(BREAK)
    return found


@dataclass(frozen=True, slots=True)
class Illustrated:
    """A prompt with its images."""

    tokens: list[int]
    images: tuple[Image, ...]

    def until(self, length: int) -> Illustrated:
        """Its first tokens, and the images among them. What is left of another one are tokens like others."""
        kept = tuple(image for image in self.images if image.position + image.length <= length)
        return Illustrated(self.tokens[:length], kept)

    def with_picture(self, number: int, rows: int, *, lines: bool) -> Illustrated:
        """One more at its end."""
        image = picture(number, rows, len(self.tokens), lines=lines)
        return Illustrated(self.tokens + tokens_of(rows, lines=lines), (*self.images, image))

    def exchanged(self, at: int, number: int) -> Illustrated:
        """Another image in place of one: the same tokens."""
        old = self.images[at]
        new = picture(number, old.rows, old.position, lines=old.length > old.rows)
        return Illustrated(self.tokens, (*self.images[:at], new, *self.images[at + 1 :]))


def random_text(rng: random.Random, count: int) -> list[int]:
    """Placeholders may stand in it, which are no images."""
    return [rng.randrange(PLACEHOLDER + 1) for _ in range(count)]


def random_prompt(rng: random.Random, start: Illustrated, length: int, most_rows: int, *, lines: bool) -> Illustrated:
    """A prompt of at most `length` tokens that begins like another one, with images out of a few."""
    found = start
    for at in range(len(found.images)):
        if rng.random() < 0.1:
            found = found.exchanged(at, rng.randrange(4))
    while len(found.tokens) < length:
        if rng.random() < 0.5:
            rows = rng.choice((1, most_rows // 2, most_rows))
            found = found.with_picture(rng.randrange(4), rows, lines=lines)
        found = Illustrated(found.tokens + random_text(rng, rng.randint(0, 6)), found.images)
    return found.until(length)


def read_images(start: SlotStart, images: tuple[Image, ...]) -> dict[int, int]:
    """First row of each image, by its position, as a start has it; it must tell all of the prompt's."""
    table = np.frombuffer(start.images, np.int32).reshape(-1, 5).tolist()
    expected = [(image.position, image.length, image.width, image.height) for image in images]
    assert [(position, length, width, height) for position, length, _, width, height in table] == expected
    return {position: first for position, _, first, _, _ in table}


class Encoders:
    """The encoder caches of all executors. `reading`: rows that steps read which were not applied."""

    def __init__(self, rows: int, reading: Callable[[], set[int]]) -> None:
        self.rows: list[tuple[bytes, int] | None] = [None] * rows  # what all have
        self.encoding: dict[int, EncodeImage] = {}
        self._own: dict[int, EncodeImage] = {}  # by first row, what its rank alone has
        self.encoded: list[bytes] = []  # pixels
        self._reading = reading
        self._last = 0

    def take(self, scheduler: Scheduler) -> bool:
        """Everything that the scheduler has to say; whether there was anything."""
        messages = scheduler.image_messages()
        for message in messages:
            assert message.number > self._last, "a number that was given before"
            self._last = message.number
            rows = rows_in(message)
            assert 0 <= rows.start < rows.stop <= len(self.rows)
            assert not self._reading().intersection(rows), "rows given away that a step in flight reads"
            for other in self.encoding.values():
                assert not set(rows).intersection(rows_in(other)), "written twice"
            for row in rows:
                self.rows[row] = None
            self._own = {first: own for first, own in self._own.items() if not set(rows).intersection(rows_in(own))}
            self.encoding[message.number] = message
            asked = [other for other in self.encoding.values() if other.rank == message.rank]
            assert len(asked) <= ENCODES, "more than the link has room for"
            assert 0 <= message.rank < GROUP
        found = bool(messages)
        messages.clear()
        return found

    def say(self, scheduler: Scheduler, now: float, rng: random.Random | None = None) -> bool:
        """One executor has encoded an image; whether any was being encoded."""
        if not self.encoding:
            return False
        number = next(iter(self.encoding)) if rng is None else rng.choice(list(self.encoding))
        message = self.encoding.pop(number)
        bad = message.pixels.startswith(BAD)
        if not bad:
            self.encoded.append(message.pixels)
            self._own[message.first_row] = message
        scheduler.image_encoded(ImageEncoded(number, REASON if bad else ""), now)
        return True

    def share(self, plan: StepPlan) -> None:
        """Each rank gets what one of them has, before the plan's step runs."""
        for rank, first, count in np.frombuffer(plan.images, np.int32).reshape(-1, 3).tolist():
            own = self._own.pop(first)
            assert (own.rank, own.rows) == (rank, count)
            for at in range(count):
                self.rows[first + at] = own.pixels, at


def rows_in(message: EncodeImage) -> range:
    return range(message.first_row, message.first_row + message.rows)


def rows_of(
    tokens: list[int], images: tuple[Image, ...], firsts: dict[int, int], start: int, end: int
) -> Iterator[tuple[int, bytes, int]]:
    """Of each placeholder of images among positions start .. end-1: its row, and what that must hold."""
    for image in images:
        at = 0
        for position in range(image.position, image.position + image.length):
            if tokens[position] == PLACEHOLDER:
                if start <= position < end:
                    assert firsts[image.position] >= 0, "an image without rows"
                    yield firsts[image.position] + at, image.pixels, at
                at += 1
