"""Damaged weights end a start: by the hashes that a folder names, by the self-test where it names none."""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
from pathlib import Path

import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.loading.checksums import SUMS
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ExecutorConfig, ModelConfig
from penstock.protocol.errors import ModelError
from penstock.services.executor.startup import start

WEIGHTS = "model.safetensors"
FLIPPED = 2000  # bits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model, in a folder that names no hash."""
    path = Path(shutil.copytree(demo_folder(), tmp_path / "demo"))
    (path / SUMS).unlink(missing_ok=True)
    return path


def config(folder: Path, **options: object) -> Config:
    given = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64} | options
    model = ModelConfig(model=str(folder), **given)  # type: ignore[arg-type]
    return Config(model=model, executor=ExecutorConfig(device="cpu", cpu_threads=1))


def flip(path: Path, count: int) -> None:
    """Bits anywhere behind the header."""
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(0)
    for _ in range(count):
        data[chance.randrange(first, len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def name_hash(folder: Path) -> None:
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / SUMS).write_text(f"{digest}  {WEIGHTS}\n")


def test_sound_weights_are_told(folder: Path) -> None:
    assert start(config(folder), 0).facts == ("X_PENSTOCK_WEIGHTS=not verified: nothing names their SHA-256",)
    name_hash(folder)
    assert start(config(folder), 0).facts == ("X_PENSTOCK_WEIGHTS=SHA-256 of 1 of 1 files",)
    assert start(config(folder, verify_weights=False), 0).facts == ()


def test_one_flipped_bit_is_found_by_its_hash(folder: Path) -> None:
    name_hash(folder)
    flip(folder / WEIGHTS, 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: the file is damaged"):
        start(config(folder), 0)


def test_two_thousand_are_found_by_the_self_test(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(folder / WEIGHTS, FLIPPED)
    with pytest.raises(ModelError, match=r"failed its self-test.*--allow-wrong-output"):
        start(config(folder), 0)
    with caplog.at_level(logging.WARNING):
        start(config(folder, allow_wrong_output=True), 0)
    assert any("output_is_wrong" in record.getMessage() for record in caplog.records)


def test_the_embedded_model_has_a_canary() -> None:
    assert (demo_folder() / "self_test.json").is_file()
