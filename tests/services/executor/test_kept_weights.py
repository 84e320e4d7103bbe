"""Weights that an executor keeps while it sleeps: a start fills its model with them, or reads files and says why."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.folder import EMBEDDED_DRAFT
from penstock.protocol.config import Config
from penstock.protocol.control import FIRST_VERSION, WriteWeights
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig, SchedulerConfig
from penstock.protocol.errors import ModelError
from penstock.services.executor import kept_weights
from penstock.services.executor.kept_weights import NOT_KEPT, SPARE, KeptWeights, ReservedMemory, taken
from penstock.services.executor.sleep import FIRST_LIFE
from penstock.services.executor.startup import Engine, start
from penstock.services.executor.weight_updates import WeightUpdates

DRAFT = f'{{"method": "draft_model", "model": "{EMBEDDED_DRAFT}", "num_speculative_tokens": 2}}'


def config(folder: Path | str = "", **more: object) -> Config:
    sizes = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64}
    return Config(
        model=ModelConfig(model=str(folder), **{**sizes, **more}),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(speculative_config=DRAFT),
        executor=ExecutorConfig(device="cpu", cpu_threads=1, keep_weights=True),
    )


@pytest.fixture
def kept() -> Iterator[KeptWeights]:
    made = KeptWeights()
    yield made
    made.drop()


def tensors(engine: Engine) -> list[Tensor]:
    """Of the model and of its draft model."""
    for part in engine.loaded.parts.values():
        for place in dict(part.destinations()).values():
            if place.owner is not None:
                place.owner.reopen()
    return [place.tensor.clone() for part in engine.loaded.parts.values()
            for place in dict(part.destinations()).values() if place.tensor is not None]  # fmt: skip


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_files_are_not_read_again(kept: KeptWeights, tmp_path: Path, load_format: str) -> None:
    """Of the model, and of its draft model; random weights come back, too."""
    folder = Path(shutil.copytree(demo_folder(), tmp_path / "demo"))
    asked = config(folder, load_format=load_format, verify_weights=False)
    first = start(asked, 0, kept=kept)
    first.loaded.keep("", FIRST_VERSION)
    expected = tensors(first)
    if load_format == "auto":
        damaged = folder / "model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-4] + b"\1\2\3\4")
    again = start(asked, 0, kept=kept)
    assert set(again.loaded.parts) == {"model", "draft"}
    assert same(tensors(again), expected)
    assert again.ready.weight_bytes == first.ready.weight_bytes


def test_weights_of_an_update_come_back_as_such(kept: KeptWeights) -> None:
    first = start(config(), 0, kept=kept)
    first.loaded.keep("/update", "7")
    again = start(config(), 0, kept=kept)
    assert (again.loaded.path, again.loaded.version) == ("/update", "7")


def test_other_options_read_files_and_say_so(kept: KeptWeights, caplog: pytest.LogCaptureFixture) -> None:
    first = start(config(), 0, kept=kept)
    first.loaded.keep("", FIRST_VERSION)
    with caplog.at_level(logging.WARNING):
        again = start(config(seed=5), 0, kept=kept)
    assert sum("kept_weights_unusable" in record.getMessage() for record in caplog.records) == 1
    assert kept.file == NOT_KEPT
    assert same(tensors(again), tensors(first))


def test_damage_has_files_read(kept: KeptWeights, caplog: pytest.LogCaptureFixture) -> None:
    first = start(config(), 0, kept=kept)
    first.loaded.keep("/update", "7")
    byte = os.pread(kept.file, 1, 5)[0]
    os.pwrite(kept.file, bytes([byte ^ 1]), 5)
    with caplog.at_level(logging.WARNING):
        again = start(config(), 0, kept=kept)
    assert sum("kept_weights_unusable" in record.getMessage() for record in caplog.records) == 1
    assert kept.file == NOT_KEPT
    assert (again.loaded.path, again.loaded.version) == ("", FIRST_VERSION)
    assert same(tensors(again), tensors(first))


def test_they_are_copied_once(kept: KeptWeights) -> None:
    engine = start(config(), 0, kept=kept)
    engine.loaded.keep("", FIRST_VERSION)
    file, size = kept.file, kept.nbytes
    assert size > engine.ready.weight_bytes // 2
    engine.loaded.keep("", FIRST_VERSION)
    assert (kept.file, kept.nbytes) == (file, size)
    kept.drop()
    assert kept.nbytes == 0
    kept.drop()


@pytest.mark.parametrize("path", [str(demo_folder()), "/nowhere"])
def test_weights_that_are_written_are_not_what_was_kept(kept: KeptWeights, path: str) -> None:
    """Nor if the write fails. The next copy has the memory of the last one."""
    engine = start(config(), 0, kept=kept)
    engine.loaded.keep("", FIRST_VERSION)
    file, size = kept.file, kept.nbytes
    updates = WeightUpdates(engine.weights, kept=kept)
    updates.ask(WriteWeights(1, path, "2"))
    if path == "/nowhere":
        with pytest.raises(RuntimeError, match="of no version"):
            updates.run(resting=True)
    else:
        assert updates.run(resting=True)
    assert (kept.file, kept.nbytes) == (NOT_KEPT, 0)
    assert taken(file) >= size - PAGESIZE, "for the next copy"
    engine.loaded.keep(path, "2")
    assert kept.file == file
    assert start(config(), 0, kept=kept).loaded.version == "2"


def test_without_room_nothing_is_kept(
    kept: KeptWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(config(), 0, kept=kept)
    monkeypatch.setattr(kept_weights, "available_memory", lambda: SPARE + 1000)
    with caplog.at_level(logging.WARNING):
        engine.loaded.keep("", FIRST_VERSION)
    assert kept.file == NOT_KEPT
    assert any("weights_not_kept" in record.getMessage() for record in caplog.records)


def join() -> None:
    """Wait until what is being reserved is there."""
    for thread in threading.enumerate():
        if thread.name == "kept weights":
            thread.join()


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[ReservedMemory]:
    """All that are reserved from here on, in small pieces."""
    made: list[ReservedMemory] = []

    class Noted(ReservedMemory):
        def __init__(self, file: int, size: int) -> None:
            made.append(self)
            super().__init__(file, size)

    monkeypatch.setattr(kept_weights, "ReservedMemory", Noted)
    monkeypatch.setattr(kept_weights, "PIECE", 5 * PAGESIZE)
    return made


def test_memory_is_reserved_before_the_weights_are_kept(kept: KeptWeights, memories: list[ReservedMemory]) -> None:
    engine = start(config(), 0, kept=kept)
    engine.loaded.reserve()
    join()
    file = memories[0].file
    assert taken(file) >= os.fstat(file).st_size > 0
    assert kept.nbytes == 0, "nothing is kept yet"
    engine.loaded.keep("/update", "7")
    assert kept.file == file
    again = start(config(), 0, kept=kept)
    assert again.loaded.version == "7"
    again.loaded.reserve()
    assert len(memories) == 1, "there is a copy"


def test_a_sleep_does_not_wait_for_the_rest_of_the_memory(
    kept: KeptWeights, memories: list[ReservedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = start(config(), 0, kept=kept), []

    def available() -> int:
        asked.append(threading.current_thread().name)
        if asked.count("kept weights") == 3:
            memories[0].stopped.wait()
        return 1 << 40

    monkeypatch.setattr(kept_weights, "available_memory", available)
    engine.loaded.reserve()
    engine.loaded.keep("/update", "7")
    assert asked.count("kept weights") <= 3
    assert start(config(), 0, kept=kept).loaded.version == "7"


def test_memory_is_given_back_where_there_is_too_little(
    kept: KeptWeights, memories: list[ReservedMemory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others may have taken it meanwhile. It is said once, and the next sleep finds out for itself."""
    engine, rooms = start(config(), 0, kept=kept), iter([1 << 40, SPARE + PAGESIZE])
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(kept_weights, "available_memory", lambda: next(rooms))
        engine.loaded.reserve()
        join()
    assert taken(memories[0].file) == 0
    assert sum("weights_not_reserved" in record.getMessage() for record in caplog.records) == 1
    engine.loaded.keep("/update", "7")
    assert start(config(), 0, kept=kept).loaded.version == "7"


def test_memory_that_is_reserved_is_room_for_the_copy(
    kept: KeptWeights, memories: list[ReservedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(config(), 0, kept=kept)
    engine.loaded.keep("", FIRST_VERSION)
    kept.outdate()
    join()
    assert taken(memories[0].file)
    monkeypatch.setattr(kept_weights, "available_memory", lambda: 0)
    engine.loaded.keep("", FIRST_VERSION)
    assert kept.nbytes


def test_memory_that_is_reserved_is_given_back(kept: KeptWeights, memories: list[ReservedMemory]) -> None:
    engine = start(config(), 0, kept=kept)
    engine.loaded.reserve()
    kept.drop()
    assert "kept weights" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memories[0].file)
    assert (kept.file, kept.nbytes) == (NOT_KEPT, 0)


def test_hashes_are_not_computed_again_unless_files_change(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_folder(), tmp_path / "demo"))
    life = start(config(folder), 0).life
    assert life.verified
    weights = folder / "model.safetensors"
    status, data = weights.stat(), weights.read_bytes()
    damaged = bytearray(data)
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert start(config(folder), 0, earlier=life).life.verified == life.verified
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for earlier in (life, FIRST_LIFE):
        with pytest.raises(ModelError, match="the file is damaged"):
            start(config(folder), 0, earlier=earlier)
