"""Weights that go through buffers, on a CPU: the same bytes, in order, and errors that are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine_core.loading import streaming
from penstock.engine_core.loading.checkpoint import read_file
from penstock.engine_core.loading.streaming import WeightStream
from penstock.engine_core.models.layers import Destination

SHAPES = {"large": (64, 33), "small": (3, 2), "rows": (40, 33), "columns": (40, 33)}


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightStream]:
    monkeypatch.setattr(streaming, "LEAST", 100)
    monkeypatch.setattr(streaming, "CHUNK", 1000)  # no multiple of a row
    made = WeightStream(torch.device("cpu"))
    yield made
    made.close()


@torch.inference_mode()
def test_every_part_of_a_file_arrives(tmp_path: Path, stream: WeightStream, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    save_file(stored, tmp_path / "model.safetensors")
    places = {
        "large": Destination(torch.zeros(64, 33, dtype=torch.bfloat16), (64, 33)),
        "small": Destination(torch.zeros(3, 2, dtype=torch.bfloat16), (3, 2)),
        "rows": Destination(torch.zeros(20, 33, dtype=torch.bfloat16), (40, 33), axis=0, start=10),
        "columns": Destination(torch.zeros(40, 11, dtype=torch.float32), (40, 33), axis=1, start=22),
    }
    streamed: list[int] = []
    copy = stream.copy
    monkeypatch.setattr(stream, "copy", lambda part, found: (streamed.append(len(part)), copy(part, found)))
    read_file(tmp_path / "model.safetensors", tuple(SHAPES), places, stream)
    expected = {"rows": stored["rows"][10:30], "columns": stored["columns"][:, 22:].float()}
    for name, place in places.items():
        assert place.tensor is not None
        assert torch.equal(place.tensor, expected.get(name, stored[name])), name
    assert sorted(streamed) == [20, 64], "columns are neither contiguous nor of the type, and little is not worth it"


def test_what_a_copy_raises_is_told(stream: WeightStream) -> None:
    target = torch.zeros(500)
    stream.copy(target, torch.ones(400))  # a file that ends early
    with pytest.raises(RuntimeError):
        stream.flush()
    stream.copy(target, torch.ones(500))
    stream.flush()
    assert bool((target == 1).all())
