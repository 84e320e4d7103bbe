"""Images of the running requests: which tokens of a step are rows of the encoder cache, and what else images change.

The host knows the images of each slot from its start. A step with chunks that hold some gets columns of its own; every
other step needs nothing but the slots' offsets of rotary positions (M-RoPE), which are on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.execution.forward import StepImages
from penstock.engine_core.execution.input_batch import Column, HostRows, IntArray
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.kernels.records import ImageRows
from penstock.protocol.step_columns import image_table, integers
from penstock.protocol.steps import SlotStart

AXES = 3  # of M-RoPE: time, line, column
NO_ROW = -1  # of the encoder cache: the token is no image's


@dataclass(frozen=True)
class PlacedImage:
    """One image in a slot's prompt."""

    places: IntArray  # positions of its placeholders, ascending
    end: int  # position behind its tokens
    first_row: int  # of the encoder cache; below 0: no step reads its rows
    columns: int  # of its grid
    before: int  # offset of rotary positions in front of it
    after: int  # and behind it


def placed_images(start: SlotStart, spec: VisionSpec) -> tuple[PlacedImage, ...]:
    """The images of a request, in their order."""
    tokens, offset, found = integers(start.token_ids), 0, []
    for position, length, first_row, width, height in image_table(start.images).tolist():
        end, grid = position + length, spec.grid(Size(height, width))
        places = position + (tokens[position:end] == spec.token_id).nonzero()[0]
        after = offset + max(grid) - length if spec.mrope else 0
        found.append(PlacedImage(places, end, first_row, grid.width, offset, after))
        offset = after
    return tuple(found)


@dataclass(frozen=True)
class ImageChunk:
    """A chunk of a slot with images that reaches some of their tokens, or text between them."""

    images: tuple[PlacedImage, ...]
    first: int  # position
    count: int
    token: int  # of the step, its first


class ImageSlots:
    """The slots' images. cache: of the encoder, `[rows, (1 + levels) * hidden]`; None behind the first stage."""

    def __init__(self, spec: VisionSpec, slots: int, upload: Upload, cache: Tensor | None) -> None:
        self._spec = spec
        self._upload = upload
        self._cache = cache
        self._images: dict[int, tuple[PlacedImage, ...]] = {}
        self._offsets = np.zeros(slots, np.int32)  # of rotary positions behind all images of a slot
        self.rope_offsets = torch.zeros(slots, dtype=torch.int32, device=upload.device) if spec.mrope else None

    def reset(self) -> None:
        """No slot has images."""
        self._images.clear()
        self._offsets[:] = 0
        if self.rope_offsets is not None:
            self.rope_offsets.zero_()

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Requests enter slots; nothing is sent where all keep the offset that their slots had."""
        changed = {}
        for start in starts:
            found = placed_images(start, self._spec) if start.images else ()
            if found:
                self._images[start.slot] = found
            else:
                self._images.pop(start.slot, None)
            offset = found[-1].after if found else 0
            if offset != self._offsets[start.slot]:
                changed[start.slot] = self._offsets[start.slot] = offset
        if changed and self.rope_offsets is not None:
            slots, offsets = np.array(list(changed), np.int64), np.array(list(changed.values()), np.int32)
            at, values = self._upload.send((slots, offsets))
            self.rope_offsets.index_copy_(0, at, values)

    def step(self, rows: HostRows) -> tuple[Column, ...] | None:
        """What images change in a step, as columns of a number for each token: rows of the encoder cache, M-RoPE's
        shifts by axis, limits, as far as the model has them. None: nothing but the offsets of slots. Behind the last
        image of its slot a chunk is like any other."""
        chunks = self._chunks(rows) if self._images else []
        if not chunks:
            return None
        cache_rows = np.full(rows.tokens, NO_ROW, np.int32)
        limits = np.zeros(rows.tokens, np.int32) if self._spec.mutual else None
        shifts = self._slot_shifts(rows) if self._spec.mrope else np.zeros((0, rows.tokens), np.int32)
        for chunk in chunks:
            for image in chunk.images:
                low, high = np.searchsorted(image.places, (chunk.first, chunk.first + chunk.count))
                at = image.places[low:high] - chunk.first + chunk.token
                if image.first_row >= 0:
                    cache_rows[at] = np.arange(low, high) + image.first_row
                if limits is not None and low < high:
                    limits[at] = image.places[-1]
            if len(shifts):
                shifts[:, chunk.token : chunk.token + chunk.count] = rope_shifts(chunk)
        if not len(shifts) and cache_rows.max() == NO_ROW:
            return None
        return cache_rows, *shifts, *(() if limits is None else (limits,))

    @property
    def padding(self) -> tuple[int, ...]:
        """Of each column of `step`, for tokens of no request."""
        return NO_ROW, *([0] * (AXES * self._spec.mrope + self._spec.mutual))

    def send(self, columns: Sequence[Column]) -> StepImages:
        """What `step` found, on the device."""
        return self.placed(self._upload.send(columns))

    def placed(self, columns: Iterable[Tensor]) -> StepImages:
        """Of the device's copies of the columns."""
        rows, *others = columns
        shifts = tuple(others[: AXES * self._spec.mrope])
        held = None if self._cache is None else ImageRows(rows, self._cache)
        return StepImages(held, shifts, others[-1] if self._spec.mutual else None)

    def _chunks(self, rows: HostRows) -> list[ImageChunk]:
        found = []
        for row in range(rows.decoding, rows.rows):
            images, first = self._images.get(int(rows.slots[row]), ()), int(rows.starts[row])
            if images and first < images[-1].end:
                token, end = int(rows.query_start[row]), int(rows.query_start[row + 1])
                found.append(ImageChunk(images, first, end - token, token))
        return found

    def _slot_shifts(self, rows: HostRows) -> Column:
        """Of tokens behind all images of their slots: [3, tokens]."""
        own = np.repeat(self._offsets[rows.slots], np.diff(rows.query_start))
        return np.tile(own.astype(np.int32), (AXES, 1))


def rope_shifts(chunk: ImageChunk) -> IntArray:
    """What is added to the positions of a chunk where it is turned, by axis: [3, tokens]. Token k of an image whose
    grid has w columns is at the time of its first, k // w lines and k % w columns behind it; the text behind goes on
    behind its longer side (M-RoPE: Qwen2-VL, 2024)."""
    positions = np.arange(chunk.first, chunk.first + chunk.count)
    offsets = np.array([0, *(image.after for image in chunk.images)])
    behind = np.searchsorted([image.end for image in chunk.images], positions, side="right")
    shifts = np.tile(offsets[behind], (AXES, 1))
    for image in chunk.images:
        low, high = np.searchsorted(image.places, (chunk.first, chunk.first + chunk.count))
        numbers = np.arange(low, high)
        shifts[:, image.places[low:high] - chunk.first] = (
            image.before
            - numbers
            + np.stack((np.zeros_like(numbers), numbers // image.columns, numbers % image.columns))
        )
    return shifts
