"""Folders of models: the embedded one by links, with files left out or replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.engine_core.embedded import demo_folder


def linked(folder: Path, *, without: tuple[str, ...] = (), **config: Any) -> Path:
    """A new folder with the embedded model, but the files `without`; `config` changes keys of config.json, and None
    removes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in demo_folder().iterdir():
        if file.is_file() and file.name not in (*without, "README.md"):
            (folder / file.name).symlink_to(file)
    if config:
        values = json.loads((demo_folder() / "config.json").read_text()) | config
        values = {key: value for key, value in values.items() if value is not None}
        replaced(folder / "config.json", json.dumps(values))
    return folder


def replaced(path: Path, content: str | bytes) -> Path:
    """The file with this content, and no link any more."""
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
