"""The vision encoder piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.engine_core.execution.encoder import Encoder
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.memory_estimate import image_sizes
from penstock.engine_core.models.parts import Placement
from tests.engine_core.execution.image_scene import CPU, VISION, asked, made, seeing_spec

SIZE = Size(16, 24)


class FakeTower:
    """Two pieces; rows are sums of the pixels of their line of cells."""

    def __init__(self) -> None:
        self.spec = VISION
        self.placement = Placement(torch.float32, CPU)
        self.begun = 0
        self.error: Exception | None = None
        self.scale = 1.0

    def slices(self, pixels: Tensor) -> Iterator[Tensor | None]:
        self.begun += 1
        yield None
        if self.error is not None:
            raise self.error
        rows = pixels.float().view(-1, 8, pixels.shape[1] // 8, 8, 3).sum((1, 3, 4)).flatten()
        yield (rows * self.scale)[:, None].expand(-1, VISION.row_width)


def finish(encoder: Encoder) -> int:
    """Launch what is left; how many pieces."""
    count = 1
    while not encoder.launch().last:
        count += 1
    return count


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
def encoder(tower: FakeTower) -> Encoder:
    return Encoder(tower, 20)  # type: ignore[arg-type]


def test_rows_are_in_the_cache_behind_the_last_piece(encoder: Encoder) -> None:
    encoder.begin(asked(SIZE, 1, 3, 6))
    pieces = [encoder.launch() for _ in range(2)]
    assert not encoder.cache.any()
    pieces.append(encoder.launch())
    assert [piece.last for piece in pieces] == [False, False, True]
    assert all(piece.finished for piece in pieces)
    assert encoder.trouble() == ""
    filled = encoder.cache.any(1)
    assert filled.nonzero()[:, 0].tolist() == [*range(3, 9)]


def test_the_next_picture_takes_the_place_of_one_that_is_left(encoder: Encoder, tower: FakeTower) -> None:
    encoder.begin(asked(SIZE, 1, 0, 6))
    encoder.launch()
    encoder.launch()
    encoder.begin(asked(SIZE, 2, 10, 6))
    assert finish(encoder) == 3
    assert tower.begun == 2
    assert encoder.cache.any(1).nonzero()[:, 0].tolist() == [*range(10, 16)]


def test_rows_that_are_no_numbers(encoder: Encoder, tower: FakeTower) -> None:
    tower.scale = float("inf")
    encoder.begin(asked(SIZE, 1, 0, 6))
    finish(encoder)
    assert encoder.trouble() == "its embeddings are not finite numbers"
    tower.scale = 1.0
    encoder.begin(asked(SIZE, 1, 0, 6))
    finish(encoder)
    assert encoder.trouble() == ""


def test_other_rows_than_the_scheduler_has_room_for(encoder: Encoder) -> None:
    encoder.begin(asked(SIZE, 1, 0, 5))
    finish(encoder)
    assert encoder.trouble() == "it has 6 rows of embeddings, not 5"
    assert not encoder.cache.any()


def test_what_fails_is_left(encoder: Encoder, tower: FakeTower) -> None:
    tower.error = MemoryError()
    encoder.begin(asked(SIZE, 1, 0, 6))
    encoder.launch()
    encoder.launch()
    with pytest.raises(MemoryError):
        encoder.launch()
    tower.error = None
    encoder.begin(asked(SIZE, 1, 0, 6))
    assert finish(encoder) == 3


def test_dummy_runs_leave_the_cache_as_it_is(encoder: Encoder, tower: FakeTower) -> None:
    encoder.cache.fill_(1.0)
    for size in image_sizes(VISION):
        encoder.dummy_run(size)
    assert tower.begun == len(image_sizes(VISION))
    assert (encoder.cache == 1.0).all()


def test_rows_do_not_depend_on_what_was_encoded_before() -> None:
    """To the last bit: ranks of a group may have met other pictures."""
    scene = made(seeing_spec())
    assert scene.encoder is not None
    scene.encode(SIZE, 1, 0)
    scene.encode(Size(64, 32), 2, 6)
    scene.encode(SIZE, 1, 40)
    assert scene.encoder.cache[:6].any()
    assert torch.equal(scene.encoder.cache[:6], scene.encoder.cache[40:46])
