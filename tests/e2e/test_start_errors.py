"""A start that fails ends with its cause: nothing stands below it on the terminal, whichever process found it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from penstock.engine_core.models.weight_files import SINGLE
from tests.e2e.server import LIMIT, ONE_EACH
from tests.model_folder import linked, replaced


def on_a_terminal(*arguments: str) -> tuple[int, list[str]]:
    """The exit code of `penstock serve`, and what its terminal shows."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--device", "cpu", *ONE_EACH, *arguments]
    environ = {**os.environ, "COLUMNS": "400", "TERM": "xterm"}
    process = subprocess.Popen(command, env=environ, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    shown = b""
    try:
        while data := os.read(leader, 65536):
            shown += data
    except OSError:  # EIO: nobody has the terminal open any more, the children neither
        pass
    finally:
        os.close(leader)
    return process.wait(LIMIT), [line for line in shown.decode().replace("\r", "").split("\n") if line]


def flip(folder: Path) -> str:
    """Weights that are not the published ones, which only their hash tells."""
    linked(folder, without=("SHA256SUMS",))
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  {SINGLE}\n")
    found = hashlib.sha256((folder / SINGLE).read_bytes()).hexdigest()
    return (
        f"penstock: {folder / SINGLE}: the file is damaged: its SHA-256 is {found}, and {'0' * 64} was published; "
        "download it again, or serve it as it is with --no-verify-weights"
    )


def cut_off(folder: Path) -> str:
    linked(folder)
    size = (folder / SINGLE).stat().st_size
    replaced(folder / SINGLE, (folder / SINGLE).read_bytes()[:-7])
    told = f"its header tells of {size} bytes, and it has {size - 7}; download it again"
    return f"penstock: {folder / SINGLE}: truncated or damaged: {told}"


def test_what_the_launcher_finds_is_all_that_is_shown(tmp_path: Path) -> None:
    cause = cut_off(tmp_path / "model")
    assert on_a_terminal(str(tmp_path / "model")) == (3, [cause])


def test_an_adapter_that_cannot_be_served_is_all_that_is_shown(tmp_path: Path) -> None:
    code, lines = on_a_terminal("--enable-lora", "--lora-modules", f"sql={tmp_path}/none")
    assert (code, lines) == (3, [f"penstock: the adapter 'sql' cannot be served: {tmp_path}/none: no such folder"])


def test_what_a_process_finds_is_shown_last(tmp_path: Path) -> None:
    cause = flip(tmp_path / "model")
    code, lines = on_a_terminal(str(tmp_path / "model"))
    assert (code, lines[-1]) == (3, cause)
    assert not any("Traceback" in line for line in lines)
