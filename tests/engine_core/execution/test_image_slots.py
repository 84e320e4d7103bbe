"""Which tokens of a step are an image's, where they are turned, and how far they see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from penstock.engine_core.execution.forward import StepImages
from penstock.engine_core.execution.image_slots import ImageSlots
from penstock.engine_core.execution.input_batch import decode_rows, mixed_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.protocol.messages import Sampling
from penstock.protocol.steps import SlotStart, StepPlan
from tests.engine_core.execution.harness import column
from tests.engine_core.execution.image_scene import CPU, IMAGE, VISION

CACHE = torch.zeros(40, 4)
PROMPT = [1, 2, *[IMAGE] * 6, 3, *[IMAGE] * 2, 4, 6]  # images of 2 x 3 and 2 x 1 rows at 2 and 9
SIZES = Size(16, 24), Size(16, 8)
PLAIN = replace(VISION, mrope=False)


def start(slot: int = 0, rows: tuple[int, int] = (30, 10), tokens: list[int] = PROMPT, second: int = 2) -> SlotStart:
    images = [(2, 6, rows[0], 24, 16), (9, second, rows[1], 8, 16)]
    return SlotStart(
        slot=slot, token_ids=column(*tokens), prompt_tokens=len(tokens), computed=0, blocks=column(1),
        sampling=Sampling(), seed=0, images=np.array(images, "<i4").tobytes(),
    )  # fmt: skip


def step(slots: ImageSlots, *chunks: tuple[int, int, int], decoding: tuple[int, ...] = ()) -> StepImages | None:
    """Chunks of slot, first position and count behind decoding rows."""
    plan = StepPlan(step=1, epoch=0, chunks=b"".join(column(*chunk, 0) for chunk in chunks))
    found = slots.step(mixed_rows(np.array(decoding, np.int32), plan))
    assert found is None or len(found) == len(slots.padding)
    return None if found is None else slots.send(found)


def made(spec: VisionSpec, *starts: SlotStart, cache: torch.Tensor | None = CACHE) -> ImageSlots:
    found = ImageSlots(spec, 4, Upload(CPU), cache)
    found.start(starts)
    return found


def rows_of(found: StepImages | None) -> list[tuple[int, int]]:
    assert found is not None
    assert found.rows is not None
    return [(token, row) for token, row in enumerate(found.rows.rows.tolist()) if row >= 0]


@pytest.mark.parametrize(
    ("first", "count", "rows"),
    [
        (0, 13, [(2, 30), (3, 31), (4, 32), (5, 33), (6, 34), (7, 35), (9, 10), (10, 11)]),
        (4, 3, [(0, 32), (1, 33), (2, 34)]),
        (7, 3, [(0, 35), (2, 10)]),
        (10, 3, [(0, 11)]),
    ],
)
def test_placeholders_take_rows_of_their_image_in_order(first: int, count: int, rows: list[tuple[int, int]]) -> None:
    assert rows_of(step(made(PLAIN, start()), (0, first, count))) == rows


def test_tokens_between_placeholders_are_text() -> None:
    tokens = [1, 2, IMAGE, IMAGE, IMAGE, 7, IMAGE, IMAGE, 3, IMAGE, 8, IMAGE, 9]
    found = step(made(PLAIN, start(tokens=tokens, second=3)), (0, 3, 9))
    assert rows_of(found) == [(0, 31), (1, 32), (3, 33), (4, 34), (6, 10), (8, 11)]


def test_rows_of_several_slots_in_a_step() -> None:
    slots = made(PLAIN, start(), start(2, rows=(0, 20)))
    assert rows_of(step(slots, (2, 6, 2), (3, 0, 2), (0, 1, 2), decoding=(1,))) == [(1, 4), (2, 5), (6, 30)]


@pytest.mark.parametrize("chunk", [(0, 0, 2), (0, 8, 1), (0, 11, 2), (1, 0, 12)])
def test_a_step_without_tokens_of_images_is_like_any_other(chunk: tuple[int, int, int]) -> None:
    assert step(made(PLAIN, start()), chunk) is None


def test_text_behind_all_images_is_like_any_other() -> None:
    """Slots' offsets serve, in graphs as well."""
    slots = made(VISION, start())
    assert step(slots, (0, 10, 3)) is not None
    assert step(slots, (0, 11, 2), (1, 0, 9), decoding=(2,)) is None


def test_images_that_no_step_reads_have_positions_alone() -> None:
    found = step(made(VISION, start(rows=(-1, 10))), (0, 7, 5))
    assert rows_of(found) == [(2, 10), (3, 11)]
    assert found is not None
    assert len(found.shifts) == 3
    later = step(made(VISION, start(), cache=None), (0, 0, 13))
    assert later is not None
    assert later.rows is None, "a later stage embeds nothing"
    assert len(later.shifts) == 3


def expected_positions() -> torch.Tensor:
    """Of transformers, by axis: [3, tokens]."""
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *given, **options: Qwen3VLModel.get_vision_position_ids(
        model, *given, **options
    )
    ids = torch.tensor([PROMPT])
    grids = torch.tensor([[1, size.height // 4, size.width // 4] for size in SIZES])
    found: torch.Tensor = Qwen3VLModel.get_rope_index(model, ids, (ids == IMAGE).int(), grids)[0]
    return found[:, 0]


@pytest.mark.parametrize("cuts", [(), (1, 3, 6, 8, 9, 10, 11), (4, 9)])
def test_tokens_are_turned_where_transformers_turns_them(cuts: tuple[int, ...]) -> None:
    """Also behind all images, where slots' offsets serve."""
    slots, found = made(VISION, start()), []
    for first, end in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True):
        positions = torch.arange(first, end).repeat(3, 1)
        if (images := step(slots, (0, first, end - first))) is None:
            assert slots.rope_offsets is not None
            found.append(positions + slots.rope_offsets[0])
        else:
            found.append(positions + torch.stack(images.shifts))
    assert torch.equal(torch.cat(found, dim=1), expected_positions())


def test_offsets_are_of_the_slots_last_request() -> None:
    slots = made(VISION, start(1))
    offset = int(expected_positions().max()) + 1 - len(PROMPT)
    assert offset == -3
    assert slots.rope_offsets is not None
    assert slots.rope_offsets.tolist() == [0, offset, 0, 0]
    found = step(slots, (3, 0, 2), (1, 10, 1), (1, 11, 2), decoding=(1, 2))
    assert found is not None
    assert found.shifts[0].tolist() == [offset, 0, 0, 0, 6 - 10, offset, offset]
    slots.start([replace(start(1), images=b"")])
    assert not slots.rope_offsets.any()
    assert step(slots, (1, 0, 13)) is None
    slots.start([start(2)])
    slots.reset()
    assert not slots.rope_offsets.any()
    assert step(slots, (2, 0, 13)) is None
    assert slots.step(decode_rows(np.array([2], np.int32))) is None


def test_tokens_of_an_image_see_all_of_it() -> None:
    found = step(made(replace(PLAIN, mutual=True), start()), (1, 0, 2), (0, 2, 9), decoding=(3,))
    assert found is not None
    assert found.limits is not None
    assert found.limits.tolist() == [0, 0, 0, *[7] * 6, 0, *[10] * 2]
