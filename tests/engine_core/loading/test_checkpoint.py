from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import load
from penstock.engine_core.loading.checkpoint import cuts, read_checkpoint
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import Destination
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.weight_files import INDEX, SINGLE, stored_names
from penstock.protocol.errors import ModelError
from tests.engine_core.models.specs import small_spec


def spec(tied: bool = False, hidden: int = 8) -> ModelSpec:
    return small_spec(
        family="qwen2", layers=2, hidden=hidden, head_dim=4, intermediate=12, vocab_size=10, tied=tied, qkv_bias=True
    )


def model(tied: bool = False, dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1) -> Decoder:
    return build(spec(tied), dtype, torch.device("cpu"), 16, group=Group(rank, size))


def tensors(tied: bool = False) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    found = model(tied).destinations()
    return {name: torch.randn(destination.shape, generator=random) for name, destination in found.items()}


def write_shards(folder: Path, stored: dict[str, Tensor], count: int) -> None:
    names = list(stored)
    places = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        own = names[shard::count]
        save_file({name: stored[name] for name in own}, folder / file)
        places.update(dict.fromkeys(own, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def check_filled(found: Decoder, stored: dict[str, Tensor]) -> None:
    for name, destination in found.destinations().items():
        if destination.tensor is None:
            continue
        size = destination.tensor.shape[destination.axis]
        expected = stored[name].narrow(destination.axis, destination.start, size)
        assert torch.equal(destination.tensor, expected.to(found.dtype)), name


@pytest.mark.parametrize("tied", [False, True])
def test_one_file(tmp_path: Path, tied: bool) -> None:
    stored = tensors(tied)
    save_file(stored, tmp_path / SINGLE)
    found = model(tied)
    load(found, tmp_path)
    check_filled(found, stored)


@pytest.mark.parametrize("count", [1, 3])
def test_shards(tmp_path: Path, count: int) -> None:
    stored = tensors()
    write_shards(tmp_path, stored, count)
    found = model()
    load(found, tmp_path, "safetensors")
    check_filled(found, stored)


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_share(tmp_path: Path, size: int) -> None:
    stored = tensors()
    write_shards(tmp_path, stored, 2)
    for rank in range(size):
        found = model(rank=rank, size=size)
        load(found, tmp_path)
        check_filled(found, stored)


@pytest.mark.parametrize("stored_type", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("served_type", [torch.float32, torch.float16, torch.bfloat16])
def test_types_are_converted_on_the_way(tmp_path: Path, stored_type: torch.dtype, served_type: torch.dtype) -> None:
    stored = {name: tensor.to(stored_type) for name, tensor in tensors().items()}
    save_file(stored, tmp_path / SINGLE)
    found = model(dtype=served_type)
    load(found, tmp_path)
    check_filled(found, stored)


def test_leftovers_are_passed_over(tmp_path: Path) -> None:
    stored = tensors(tied=True)
    more = {"lm_head.weight": torch.zeros(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**stored, **more}, tmp_path / SINGLE)
    found = model(tied=True)
    load(found, tmp_path)
    check_filled(found, stored)


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(model(), folder)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_unknown_tensors(tmp_path: Path) -> None:
    save_file({**tensors(), "model.layers.0.self_attn.q_norm.weight": torch.ones(4)}, tmp_path / SINGLE)
    refused(tmp_path, SINGLE, "model.layers.0.self_attn.q_norm.weight", "not part of the model")


def test_a_missing_tensor(tmp_path: Path) -> None:
    stored = tensors()
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / SINGLE)
    refused(tmp_path, SINGLE, "model.layers.1.mlp.up_proj.weight is missing")
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / SINGLE)
    refused(tmp_path, "and 1 more are missing")


def test_a_missing_output_embedding(tmp_path: Path) -> None:
    save_file(tensors(tied=True), tmp_path / SINGLE)
    refused(tmp_path, "lm_head.weight is missing")


def test_a_tensor_missing_from_the_shard_that_should_have_it(tmp_path: Path) -> None:
    stored = tensors()
    write_shards(tmp_path, stored, 2)
    file = "model-00002-of-00002.safetensors"
    names = list(stored)[1::2]
    save_file({name: stored[name] for name in names[1:]}, tmp_path / file)
    refused(tmp_path, file, f"{names[0]} is missing")


def test_a_wrong_shape(tmp_path: Path) -> None:
    save_file({**tensors(), "model.norm.weight": torch.ones(9)}, tmp_path / SINGLE)
    refused(tmp_path, SINGLE, "model.norm.weight has shape [9]", "[8]")
    save_file({**tensors(), "lm_head.weight": torch.ones(8, 10)}, tmp_path / SINGLE)
    refused(tmp_path, "lm_head.weight has shape [8, 10]", "[10, 8]")


def test_a_wrong_type(tmp_path: Path) -> None:
    save_file({**tensors(), "model.norm.weight": torch.ones(8, dtype=torch.int8)}, tmp_path / SINGLE)
    refused(tmp_path, SINGLE, "model.norm.weight is of type I8", "BF16")


@pytest.mark.parametrize("stored_type", [torch.int64, torch.int32])
def test_integers_are_read_as_integers(tmp_path: Path, stored_type: torch.dtype) -> None:
    target = torch.zeros(3, dtype=torch.int64)
    save_file({"ids": torch.tensor([5, -1, 7], dtype=stored_type)}, tmp_path / SINGLE)
    read_checkpoint(tmp_path, {"ids": Destination(target, (3,))})
    assert target.tolist() == [5, -1, 7]
    save_file({"ids": torch.ones(3)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match="ids is of type F32; Penstock reads I64, I32"):
        read_checkpoint(tmp_path, {"ids": Destination(target, (3,))})


# Of a tensor, the axis of the slice, its start and size, and how many equal pieces the axis has.
SLICES = [
    ((12, 3), 0, 2, 2, 2),
    ((3, 12), 1, 1, 3, 3),
    ((12,), 0, 4, 2, 2),
    ((5, 6, 4), 0, 2, 2, 1),  # some of stacked matrices
    ((6, 4, 3), 0, 1, 1, 3),
    ((3, 12, 4), 1, 2, 3, 2),  # rows of each of them
    ((3, 4, 12), 2, 0, 4, 2),
]


@pytest.mark.parametrize(("shape", "axis", "start", "size", "pieces"), SLICES)
def test_a_slice_of_every_piece_is_read(
    shape: tuple[int, ...], axis: int, start: int, size: int, pieces: int, tmp_path: Path
) -> None:
    stored = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    expected = torch.cat([piece.narrow(axis, start, size) for piece in stored.chunk(pieces, axis)], axis)
    each = shape[axis] // pieces
    runs = tuple(slice(first + start, first + start + size) for first in range(0, shape[axis], each))
    destination = Destination(torch.empty_like(expected), shape, axis, runs=runs)
    save_file({"weight": stored}, tmp_path / SINGLE)
    read_checkpoint(tmp_path, {"weight": destination})
    assert destination.tensor is not None
    assert torch.equal(destination.tensor, expected)
    parts = [part for _, part in cuts(destination, destination.tensor)]
    matrices = len(expected) if len(shape) == 3 and axis == 0 else pieces * (len(expected) if len(shape) == 3 else 1)
    assert len(parts) == matrices, "one matrix at a time passes through the host's memory"


def test_the_names_of_every_file(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors(), 3)
    assert stored_names(tmp_path) == frozenset(tensors())


@pytest.mark.parametrize("keep", [0, 4, 100, -40, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    refused(tmp_path, SINGLE, "truncated")


@pytest.mark.parametrize("header", [b"\xff" * 8, struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_file_of_another_kind(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(header)
    refused(tmp_path, SINGLE)


def test_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors(), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors: no such file", INDEX)


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors(), 3)
    (tmp_path / INDEX).unlink()
    refused(tmp_path, f"{INDEX}: no such file")


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, weights: str) -> None:
    (tmp_path / weights).mkdir()  # reading it would raise something else
    refused(tmp_path, weights, "pickled", "safetensors only")


def test_no_weights_at_all(tmp_path: Path) -> None:
    refused(tmp_path, f"{SINGLE}: no such file")


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 3, None])
def test_an_index_points_nowhere_else(tmp_path: Path, place: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    refused(tmp_path, INDEX, "model.norm.weight", "not a safetensors file beside it")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_index_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, INDEX)


@pytest.mark.parametrize("names", [None, {}, [], ["model.norm.weight"], "model.safetensors"])
def test_an_index_without_names(tmp_path: Path, names: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({} if names is None else {"weight_map": names}))
    refused(tmp_path, INDEX, "weight_map", "an object of tensor names and files is expected")


def test_a_tensor_that_stands_twice(tmp_path: Path) -> None:
    stored = tensors()
    write_shards(tmp_path, stored, 2)
    name = next(iter(stored))
    second = "model-00002-of-00002.safetensors"
    save_file({name: stored[name], **{other: stored[other] for other in list(stored)[1::2]}}, tmp_path / second)
    refused(tmp_path, second, name, "model-00001-of-00002.safetensors too")


def peak_memory() -> int:
    """Bytes that were resident at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_stays_under_one_shard_beyond_the_model(tmp_path: Path) -> None:
    """Resident memory beyond the model's own, at its peak, for 24 files of 8 MiB."""
    rows, width, count = 2048, 1024, 24
    stored = {f"layer.{layer}": torch.full((rows, width), float(layer)) for layer in range(count)}
    write_shards(tmp_path, stored, count)
    del stored
    memory = torch.zeros(count * rows, width)  # touched, so that its pages count already
    destinations = {
        f"layer.{layer}": Destination(memory[layer * rows : (layer + 1) * rows], (rows, width))
        for layer in range(count)
    }
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = peak_memory()
    read_checkpoint(tmp_path, destinations)
    grown = peak_memory() - before
    assert torch.equal(memory[::rows, 0], torch.arange(count).float())
    assert grown <= 3 * rows * width * 4  # one file mapped, one tensor in flight, and some slack
