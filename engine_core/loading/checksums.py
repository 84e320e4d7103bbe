"""Whether weight files are those that were published: their SHA-256 where the folder or the hub's cache names it.

Sources of hashes, the first that names a file: a `SHA256SUMS` in the folder (the format of coreutils' sha256sum); the
hub cache, whose snapshots are links to blobs that are called by their hash; the metadata that huggingface_hub leaves
beside files of a local folder (`.cache/huggingface/download/FILE.metadata`: revision, etag, time). An etag of 64 hex
digits is the SHA-256 of a large file, a shorter one is git's hash of a small one and says nothing here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from penstock.protocol.errors import ModelError

SUMS = "SHA256SUMS"
SHA256 = re.compile(r"[0-9a-f]{64}")
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
METADATA = Path(".cache", "huggingface", "download")


def published_hashes(folder: Path, files: list[Path]) -> dict[Path, str]:
    """The SHA-256 of each of `files` for which something names one, in lower case. Raises ModelError for a SHA256SUMS
    that cannot be read."""
    listed = read_sums(folder / SUMS)
    found = {}
    for path in files:
        digest = listed.get(path.name) or blob_hash(path) or metadata_hash(folder, path)
        if digest is not None:
            found[path] = digest
    return found


def read_sums(path: Path) -> dict[str, str]:
    """File names and hashes of a SHA256SUMS; nothing where there is none."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        match = LINE.fullmatch(line.rstrip())
        if match is not None:
            found[match[2].removeprefix("./")] = match[1].lower()
        elif line.strip():
            raise ModelError(f"{path}: line {number} is no hash and file name, as sha256sum writes them")
    return found


def blob_hash(path: Path) -> str | None:
    """The hash by which the hub's cache calls the file that a snapshot's link leads to."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    return target.name if target.parent.name == "blobs" and SHA256.fullmatch(target.name) else None


def metadata_hash(folder: Path, path: Path) -> str | None:
    """The hash that was noted when the file was downloaded into this folder."""
    try:
        lines = (folder / METADATA / f"{path.name}.metadata").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    etag = lines[1].strip().lower() if len(lines) > 1 else ""
    return etag if SHA256.fullmatch(etag) else None


def check_hash(path: Path, expected: str) -> None:
    """Raise ModelError unless the file has this SHA-256. Reads it once; releases the interpreter while it hashes."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: {error}") from None
    if found != expected:
        raise ModelError(
            f"{path}: the file is damaged: its SHA-256 is {found}, and {expected} was published; "
            "download it again, or serve it as it is with --no-verify-weights"
        )
