"""Hashes of weight files: where they are found, and that a damaged file is told."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.engine_core.loading.checksums import METADATA, SUMS, check_hash, published_hashes
from penstock.protocol.errors import ModelError

NAME = "model-00001-of-00002.safetensors"
CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.write_bytes(CONTENT)
    return path


def test_nothing_names_a_hash(file: Path) -> None:
    assert published_hashes(file.parent, [file]) == {}


@pytest.mark.parametrize("line", [f"{DIGEST}  {NAME}", f"{DIGEST.upper()} *{NAME}", f"{DIGEST}  ./{NAME}"])
def test_a_list_in_the_folder(file: Path, line: str) -> None:
    (file.parent / SUMS).write_text(f"{'0' * 64}  another\n{line}\n\n")
    assert published_hashes(file.parent, [file]) == {file: DIGEST}


@pytest.mark.parametrize("line", ["what is this", f"{DIGEST[1:]}  {NAME}", DIGEST])
def test_a_list_that_cannot_be_read_is_told(file: Path, line: str) -> None:
    (file.parent / SUMS).write_text(line)
    with pytest.raises(ModelError, match="SHA256SUMS: line 1"):
        published_hashes(file.parent, [file])


def test_a_snapshot_of_the_hubs_cache(tmp_path: Path) -> None:
    blob, link = tmp_path / "blobs" / DIGEST, tmp_path / "snapshots" / "abc" / NAME
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    link.symlink_to(Path("..", "..", "blobs", DIGEST))
    assert published_hashes(link.parent, [link]) == {link: DIGEST}
    check_hash(link, DIGEST)
    small = link.with_name("small.safetensors")
    (blob.parent / ("a" * 40)).write_bytes(CONTENT)  # git's hash, of a file that is not large
    small.symlink_to(blob.parent / ("a" * 40))
    assert published_hashes(link.parent, [small]) == {}


def test_what_was_noted_at_the_download(file: Path) -> None:
    note = file.parent / METADATA / f"{NAME}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"revision\n{DIGEST}\n1700000000.0\n")
    assert published_hashes(file.parent, [file]) == {file: DIGEST}
    note.write_text("revision\n" + "a" * 40 + "\n1700000000.0\n")
    assert published_hashes(file.parent, [file]) == {}


@pytest.mark.parametrize("bit", [0, 8 * 3000, 8 * len(CONTENT) - 1])
def test_one_flipped_bit_is_found(file: Path, bit: int) -> None:
    check_hash(file, DIGEST)
    damaged = bytearray(CONTENT)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
    with pytest.raises(ModelError, match=f"{NAME}: the file is damaged.*{DIGEST} was published"):
        check_hash(file, DIGEST)
