"""Images in the schedule: which a sequence needs rows of, where its prompt is cut, and where a prefix hit may end.

A sequence needs rows of the images that do not end within its prefix hit, and may enter a slot when it can have all of
them. Then its prompt is computed up to the first image that is not encoded yet, and goes on from there when it is.
Nobody waits for that: others are planned past it, and so are those behind it in the queue.

Where tokens of an image see one another both ways, all of them are computed in one step. So no chunk ends within such
an image, no prefix hit does, and drafts leave room for it.
"""

from __future__ import annotations

from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.state import SchedulerState
from penstock.protocol.images import Image


def needed(sequence: Sequence, computed: int) -> tuple[Image, ...]:
    """The images whose embeddings the sequence needs if its first `computed` positions are there already."""
    return tuple(image for image in sequence.request.message.images if image.position + image.length > computed)


def ask_images(state: SchedulerState, sequence: Sequence, computed: int) -> bool:
    """Whether the next sequence in order has, or gets, the rows that it needs behind a prefix hit of so many positions;
    and whether its next position is no image that has to be encoded first."""
    cache = state.encoder_cache
    return cache.ask(sequence, needed(sequence, computed)) and cache.awaited(sequence) > computed


def cut_at_images(state: SchedulerState, sequence: Sequence, start: int, count: int) -> int:
    """How many of a prompt's next `count` positions from `start` on the next chunk has: none of an image that is not
    encoded, and none of an image that is computed as a whole and that it does not hold whole."""
    images = sequence.request.message.images
    if not images:
        return count
    end = min(start + count, state.encoder_cache.awaited(sequence))
    return max(0, (before_whole(images, end) if state.options.mutual else end) - start)


def before_whole(images: tuple[Image, ...], position: int) -> int:
    """The last position, up to this one, that is within no image."""
    return next((one.position for one in images if one.position < position < one.position + one.length), position)


def reusable(state: SchedulerState, sequence: Sequence, blocks: int) -> int:
    """How many of a sequence's first `blocks` blocks, which are there, it may begin behind."""
    images, size = sequence.request.message.images, state.options.block_size
    if not (images and state.options.mutual):
        return blocks
    while (whole := before_whole(images, blocks * size) // size) < blocks:
        blocks = whole
    return blocks


def whole_ahead(state: SchedulerState) -> int:
    """Tokens of the longest image that the first prompt in order cannot be cut in."""
    if not state.options.mutual:
        return 0
    first = state.prefilling[0] if state.prefilling else state.queue.walk().next()
    return 0 if first is None else max([image.length for image in first.request.message.images], default=0)


def lacks_images(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a waiting sequence cannot enter a slot for want of rows."""
    images = sequence.request.message.images
    return bool(images) and not state.encoder_cache.can_have(images)


def awaits_images(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a waiting sequence was passed over for want of rows, or since its images are being encoded."""
    return bool(sequence.request.message.images) and state.encoder_cache.waits(sequence)
