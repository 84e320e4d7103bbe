"""Weight files by their headers. What the loader refuses is in tests/engine_core/loading/test_checkpoint.py."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine_core.models.weight_files import SINGLE, StoredTensor, WantedTensor, check_tensors, read_header
from penstock.protocol.errors import ModelError


def test_a_header_gives_types_and_shapes(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / SINGLE, {"shape": "of a text", "format": "pt"})
    assert read_header(tmp_path / SINGLE) == {"a": StoredTensor("BF16", (2, 3), (0, 12))}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_than_its_header_says(tmp_path: Path, change: int) -> None:
    save_file({"a": torch.zeros(5)}, tmp_path / SINGLE)
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(size + change)
    with pytest.raises(ModelError, match=f"truncated or damaged: its header tells of {size} bytes, and it has"):
        read_header(tmp_path / SINGLE)


@pytest.mark.parametrize(
    "offsets", [[(-4, 0), (0, 4)], [(0, 4), (0, 4)], [(0, 4), (8, 12)], [(4, 8), (8, 12)]], ids=str
)
def test_tensors_that_overlap_or_leave_a_hole(tmp_path: Path, offsets: list[tuple[int, int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": one} for name, one in zip("ab", offsets, strict=True)
    }
    text = json.dumps(header).encode()
    end = max(one[1] for one in offsets)
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    with pytest.raises(ModelError, match="does not begin where the one before ends"):
        read_header(tmp_path / SINGLE)


def test_a_tensor_whose_bytes_do_not_fit_its_shape(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match="tensor a is not of the bytes that its shape needs"):
        read_header(tmp_path / SINGLE)


def test_where_each_tensor_is(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(2)}, tmp_path / SINGLE)
    found = check_tensors(tmp_path, {"a": WantedTensor((1,)), "b": WantedTensor((2,))})
    assert {path: sorted(names) for path, names in found.items()} == {tmp_path / SINGLE: ["a", "b"]}
