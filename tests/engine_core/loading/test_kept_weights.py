"""Weights that are kept in a file of the host's memory: a model that was just built computes with them what the first
one did, and a file that is not whole, or another model's, fills none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.loading import kept_weights, load, streaming
from penstock.engine_core.loading.kept_weights import (
    KINDS,
    KeptWeightsError,
    Parts,
    decoded,
    encoded,
    mapped,
    places,
    read_table,
    restore,
    size_of,
    sum_of,
    write,
)
from penstock.engine_core.loading.streaming import WeightStream
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.registry import build
from penstock.engine_core.models.spec import read_spec
from penstock.kernels.grouped_linear import PlaneForm, PlaneWeight
from tests.engine_core.loading.test_live import CASES, EXPERTS, SMALL, loaded, logits
from tests.engine_core.models.parity import SIZES, write_checkpoint
from tests.engine_core.models.quantized_folders import CONFIGS, write_pair
from tests.engine_core.models.test_kv_cache import checkpoint, named

CPU = torch.device("cpu")
ROOM = 1 << 30
QUANTIZED: Mapping[str, tuple[str, PreTrainedConfig]] = {
    "fp8 blocks": ("fp8 blocks", LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "intermediate_size": 128})),
    "w4a16 in order": ("w4a16 in order", LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "intermediate_size": 128})),
    "awq": ("awq", LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "intermediate_size": 128})),
}
ROUNDED: Mapping[str, PreTrainedConfig] = {
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16),
    "latents": CASES["latents"],
}


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("weights")
    yield made
    os.close(made)


def fresh(folder: Path, quantization: str = "none", group: Group | None = None) -> Decoder:
    """The same model without its weights, in memory that holds other numbers."""
    with torch.inference_mode():
        model = build(
            read_spec(folder, quantization), torch.float32, CPU, 64, **({} if group is None else {"group": group})
        )
        for place in model.destinations().values():
            if place.tensor is not None:
                place.tensor.fill_(7)
    return model


def parts(model: Decoder) -> Parts:
    return {"model": model}


def restored(file: int, model: Decoder, key: str = "key") -> Decoder:
    restore(file, parts(model), key, CPU)
    return model


@pytest.mark.parametrize("case", CASES)
def test_plain_weights_come_back(case: str, file: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", CASES[case])
    model = loaded(tmp_path / "a")
    expected = logits(model)
    write(file, parts(model), "key", "/folder", "3", ROOM)
    table = restore(file, parts(again := fresh(tmp_path / "a")), "key", CPU)
    assert torch.equal(logits(again), expected)
    assert (table.path, table.version) == ("/folder", "3")


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_weights_come_back(case: str, file: int, tmp_path: Path) -> None:
    name, config = QUANTIZED[case]
    folder, _ = write_pair(tmp_path, config, CONFIGS[name])
    model = loaded(folder)
    expected, size = logits(model), model.weight_bytes
    write(file, parts(model), "key", "", "0", ROOM)
    again = restored(file, fresh(folder))
    assert torch.equal(logits(again), expected)
    assert again.weight_bytes == size


def test_after_damage_quantized_weights_are_read_from_files(file: int, tmp_path: Path) -> None:
    """Those of some layers have come back by then."""
    name, config = QUANTIZED["awq"]
    folder, _ = write_pair(tmp_path, config, CONFIGS[name])
    model = loaded(folder)
    write(file, parts(model), "key", "", "0", ROOM)
    last = [one.tensors[-1].bytes for one in read_table(file).made if one.tensors][-1]
    os.pwrite(file, bytes([os.pread(file, 1, last.first)[0] ^ 1]), last.first)
    again = fresh(folder)
    with pytest.raises(KeptWeightsError, match="its bytes are damaged"):
        restore(file, parts(again), "key", CPU)
    with torch.inference_mode():
        load(again, folder)
        pack(places(again))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("case", ROUNDED)
def test_weights_that_were_rounded_as_they_were_read(case: str, file: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", ROUNDED[case])
    model = loaded(tmp_path / "a", "fp8")
    expected = logits(model)
    write(file, parts(model), "key", "", "0", ROOM)
    assert torch.equal(logits(restored(file, fresh(tmp_path / "a", "fp8"))), expected)


def test_scales_of_the_cache_come_back(file: int, tmp_path: Path) -> None:
    own: dict[str, Tensor] = {}
    for layer in range(SIZES["num_hidden_layers"]):
        own.update(named(layer, torch.tensor(0.5 + layer), torch.tensor(0.25)))
    folder = checkpoint(tmp_path, own)
    model, again = kv_model(folder), kv_model(folder, read=False)
    write(file, parts(model), "key", "", "0", ROOM)
    options = [block.attention.options.kv_scales for block in again.blocks if block.attention is not None]
    restored(file, again)
    assert [scales.tolist() for scales in options if scales is not None] == [
        [[0.5 + layer] * SIZES["num_key_value_heads"], [0.25] * SIZES["num_key_value_heads"]]
        for layer in range(SIZES["num_hidden_layers"])
    ], "where attention reads them"
    assert (again.missing_kv_scales, again.weight_bytes) == (0, model.weight_bytes)


def kv_model(folder: Path, *, read: bool = True) -> Decoder:
    from penstock.engine_core.models.kv_cache import with_kv_cache

    with torch.inference_mode():
        model = build(with_kv_cache(read_spec(folder), "auto"), torch.float32, CPU, 64)
        if read:
            load(model, folder)
    return model


def test_each_rank_keeps_its_share(file: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LlamaConfig(**{**SMALL, "vocab_size": 161}))
    group = Group(1, 2)
    model = loaded(tmp_path / "a", group=group)
    assert model.head is not None
    x = torch.randn(3, 32)
    expected = model.head.forward(x)
    write(file, parts(model), "key", "", "0", ROOM)
    again = restored(file, fresh(tmp_path / "a", group=group))
    assert again.head is not None
    assert torch.equal(again.head.forward(x), expected), "padding too"
    with pytest.raises(KeptWeightsError, match="not those of the model"):
        restore(file, parts(fresh(tmp_path / "a")), "key", CPU)


def test_planes_can_be_made_again() -> None:
    """They are a GPU's alone."""
    numbers = torch.arange(8, dtype=torch.int32)
    weight = PlaneWeight(PlaneForm("int4", 16, 2, "bfloat16"), 64, numbers, numbers + 1, numbers * 0, order=numbers + 2)
    found: list[Tensor] = []
    code = msgspec.json.decode(msgspec.json.encode(encoded((weight, None), found, 0)))
    made, nothing = decoded(code, found)  # type: ignore[misc]
    assert nothing is None
    assert isinstance(made, PlaneWeight)
    assert (made.form, made.inputs, made.zeros) == (weight.form, 64, None)
    assert torch.equal(made.order, weight.order)  # type: ignore[arg-type]
    assert set(KINDS) >= {type(weight).__name__, type(weight.form).__name__}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "a", LlamaConfig(**SMALL))
    return tmp_path / "a"


@pytest.fixture
def kept(file: int, plain: Path) -> int:
    write(file, parts(loaded(plain)), "key", "", "0", ROOM)
    return file


def cut_off(file: int) -> None:
    os.ftruncate(file, os.fstat(file).st_size - 1)


def empty(file: int) -> None:
    os.ftruncate(file, 0)


def without_data(file: int) -> None:
    size = os.fstat(file).st_size
    table = os.pread(file, size, size - 16 - int.from_bytes(os.pread(file, 8, size - 16), "little"))
    os.ftruncate(file, 0)
    os.pwrite(file, table, 64)


def one_bit(file: int) -> None:
    os.pwrite(file, bytes([os.pread(file, 1, 1000)[0] ^ 1]), 1000)


def another_table(file: int) -> None:
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, size - 16), "little")
    os.pwrite(file, b"[", size - 16 - length)


DAMAGES: Mapping[str, tuple[Callable[[int], None], str]] = {
    "cut off": (cut_off, "it is cut off"),
    "empty": (empty, "it is cut off"),
    "without its data": (without_data, "shorter than its tensors"),
    "one bit": (one_bit, "its bytes are damaged"),
    "table": (another_table, "its table is damaged"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_found(
    damage: str, kept: int, plain: Path, monkeypatch: pytest.MonkeyPatch, *, streamed: bool
) -> None:
    if streamed:
        as_on_a_gpu(monkeypatch)
    spoil, message = DAMAGES[damage]
    spoil(kept)
    with pytest.raises(KeptWeightsError, match=message):
        restore(kept, parts(fresh(plain)), "key", CPU)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors go through buffers, by threads."""
    monkeypatch.setattr(streaming, "LEAST", 100)
    monkeypatch.setattr(streaming, "CHUNK", 1000)
    monkeypatch.setattr(kept_weights, "stream_of", WeightStream)


def test_weights_that_go_through_buffers_come_back(plain: Path, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = loaded(plain)
    expected = logits(model)
    write(file, parts(model), "key", "", "0", ROOM)
    assert torch.equal(logits(restored(file, fresh(plain))), expected)


def test_a_file_of_another_key_is_not_used(kept: int, plain: Path) -> None:
    assert read_table(kept).key == "key"
    with pytest.raises(KeptWeightsError, match="of another model, or of other options"):
        restore(kept, parts(fresh(plain)), "other", CPU)


def test_a_file_of_other_layers_is_not_used(kept: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "b", LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))
    with pytest.raises(KeptWeightsError, match="not those of the model"):
        restore(kept, parts(fresh(tmp_path / "b")), "key", CPU)


def test_a_file_of_other_parts_is_not_used(kept: int, plain: Path) -> None:
    """Of the same sizes."""
    with pytest.raises(KeptWeightsError, match="not those of the model"):
        restore(kept, {"draft": fresh(plain)}, "key", CPU)


def test_nothing_is_written_without_room(file: int, plain: Path) -> None:
    with pytest.raises(MemoryError, match="and 1000 of the host's memory are free"):
        write(file, parts(loaded(plain)), "key", "", "0", 1000)
    assert os.fstat(file).st_size == 0


def bytes_of_data(file: int) -> int:
    size = os.fstat(file).st_size
    return size - 16 - int.from_bytes(os.pread(file, 8, size - 16), "little")


def test_the_bytes_of_a_copy_are_known_before(file: int, plain: Path, tmp_path: Path) -> None:
    model = fresh(plain)  # nothing is packed yet, as on a GPU
    size = size_of(parts(model))
    write(file, parts(model), "key", "", "0", ROOM)
    assert size == bytes_of_data(file)
    name, config = QUANTIZED["awq"]
    folder, _ = write_pair(tmp_path, config, CONFIGS[name])
    model = loaded(folder)
    size = size_of(parts(model))
    write(file, parts(model), "key", "", "0", ROOM)
    assert size >= sum(tensor.bytes.count for one in read_table(file).made for tensor in one.tensors) > 0


def test_memory_that_is_mapped_is_not_mapped_again(file: int, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has a larger copy."""
    model = loaded(plain)
    expected = logits(model)
    write(file, {"model": model, "draft": loaded(plain)}, "key", "", "0", ROOM)
    memory = mapped(file, os.fstat(file).st_size)
    with monkeypatch.context() as patched:
        patched.delattr(kept_weights, "mapped")
        write(file, parts(model), "key", "", "1", ROOM, memory)
    assert read_table(file).version == "1"
    assert torch.equal(logits(restored(file, fresh(plain))), expected)


def test_memory_that_is_too_small_is_mapped_again(file: int, plain: Path) -> None:
    model = loaded(plain)
    expected = logits(model)
    os.ftruncate(file, 4096)
    write(file, parts(model), "key", "", "0", ROOM, mapped(file, 4096))
    assert torch.equal(logits(restored(file, fresh(plain))), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_a_changed_bit_changes_the_sum(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 255, (999, 8), dtype=torch.uint8).view(dtype)
    before, sliced = sum_of([bits, bits.t()[:1], torch.empty(0)]), sum_of([bits])
    assert before[0] == sliced[0]
    assert before[2] == 0
    bits.view(torch.uint8)[500, 0] ^= 1
    assert sum_of([bits]) != sliced


def test_an_expansion_of_latents_is_filled_in_place(file: int, tmp_path: Path) -> None:
    """Its keys and values are views."""
    folder, _ = write_pair(tmp_path, CASES["latents"], CONFIGS["fp8 channels"])
    model = loaded(folder)
    expected = logits(model)
    write(file, parts(model), "key", "", "0", ROOM)
    again = fresh(folder)
    expansions = [one for owner in kept_weights.owners(parts(again)) for one in owner.made if isinstance(one, Tensor)]
    assert expansions, "it is quantized"
    restored(file, again)
    assert torch.equal(logits(again), expected)
