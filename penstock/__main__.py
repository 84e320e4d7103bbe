"""`python -m penstock`, and the file that the launcher starts its processes by."""

from __future__ import annotations

import sys
from pathlib import Path


def find_package(file: Path) -> None:
    """Let `penstock` be imported, and not `services` or `kernels`: started by path, Python puts the folder of `file` on
    the path, where a user's packages may have the same names as the folders in it."""
    sys.path[:] = [entry for entry in sys.path if entry != str(file.parent)]
    if str(file.parents[1]) not in sys.path:
        sys.path.insert(0, str(file.parents[1]))


if __name__ == "__main__":
    if not __package__:
        find_package(Path(__file__).absolute())
    from penstock.services.cli import entry

    entry()
