"""Readers of the columns of steps as numpy arrays, which are views of the bytes.

They stand apart from steps.py, which api and tokenizer processes import, so that those need no numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int32]


def integers(column: bytes) -> Column:
    """A column of single numbers: slots, tokens, or what `StepMasks` has."""
    return np.frombuffer(column, "<i4")


def block_table(blocks: bytes, groups: int = 1) -> Column:
    """`StepPlan.blocks`. # [columns, 1 + groups]: slot, blocks"""
    return integers(blocks).reshape(-1, 1 + groups)


def chunk_table(chunks: bytes) -> Column:
    """`StepPlan.chunks`. # [chunks, 4]: slot, start, count, sample"""
    return integers(chunks).reshape(-1, 4)


def draft_table(drafts: bytes) -> Column:
    """`StepPlan.drafts`. # [drafted rows, 2]: slot, drafts"""
    return integers(drafts).reshape(-1, 2)


def drafting_table(drafting: bytes) -> Column:
    """`StepPlan.drafting`. # [rows, 5]: slot, start, count, drafts, told"""
    return integers(drafting).reshape(-1, 5)


def keep_table(keep: bytes) -> Column:
    """`StepPlan.keep`. # [kept, 4]: slot, position, place, place in the host's memory"""
    return integers(keep).reshape(-1, 4)


def adapter_table(adapters: bytes) -> Column:
    """`StepPlan.adapters`. # [changed, 2]: number, place"""
    return integers(adapters).reshape(-1, 2)


def copy_table(blocks: bytes) -> Column:
    """`CopyBlocks.blocks`. # [blocks, 2]: block on the device, block in the host's memory"""
    return integers(blocks).reshape(-1, 2)


def move_table(blocks: bytes) -> Column:
    """`MoveBlocks.blocks`. # [blocks, 2]: block in the host's memory, place on disk"""
    return integers(blocks).reshape(-1, 2)


def image_table(images: bytes) -> Column:
    """`SlotStart.images`. # [images, 5]: position, length, first row, width, height"""
    return integers(images).reshape(-1, 5)


def shared_images(images: bytes) -> Column:
    """`StepPlan.images`. # [images, 3]: rank, first row, rows"""
    return integers(images).reshape(-1, 3)


def chunk_positions(chunks: bytes) -> int:
    """Positions that all chunks of a step run."""
    return int(chunk_table(chunks)[:, 2].sum())
