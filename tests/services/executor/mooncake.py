"""A Mooncake that is none, for tests: processes that are started meanwhile import it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


class FakeMooncake:
    """The folder of its blocks, and a port that answers in place of a master."""

    def __init__(self, folder: Path, listener: socket.socket) -> None:
        self.folder, self.port = folder, listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def fault(self, what: str = "") -> None:
        if what:
            part = self.folder / "fault.part"
            part.write_text(what)
            part.rename(self.folder / "fault")
        else:
            (self.folder / "fault").unlink(missing_ok=True)

    def blocks(self) -> list[Path]:
        return sorted(self.folder.glob("penstock@*"))


@contextmanager
def fake_mooncake(folder: Path) -> Iterator[FakeMooncake]:
    package = folder / "library" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "fake_mooncake.py", package / "store.py")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = FakeMooncake(folder, listener)
        path = os.pathsep.join(part for part in (str(package.parent), os.environ.get("PYTHONPATH", "")) if part)
        with patch.dict(os.environ, {"FAKE_MOONCAKE": str(folder), "PYTHONPATH": path}):
            yield found
