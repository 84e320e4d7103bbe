"""The parts of NIXL that Penstock calls: without the library, and with it, on this machine."""

from __future__ import annotations

import select
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.engine_core.distributed import nixl

LIMIT = 60.0
present = pytest.mark.skipif(not nixl.installed(), reason=nixl.MISSING)


def test_without_it_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULES", ("nixl_none",))
    assert not nixl.installed()
    with pytest.raises(nixl.NixlError, match=r"NIXL is not installed: pip install 'penstock\[nixl\]'"):
        nixl.Agent("nobody")


def test_one_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_broken").mkdir()
    (tmp_path / "nixl_broken" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl, "MODULES", ("nixl_broken",))
    with pytest.raises(nixl.NixlError, match=r"NIXL cannot be loaded: .*_bindings"):
        nixl.Agent("nobody")


@present
def test_memory_of_another_agent_is_read_in_runs() -> None:
    reader, writer = nixl.Agent("reader"), nixl.Agent("writer", served=True)
    theirs, ours = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    writer.register(theirs.ctypes.data, theirs.nbytes)
    memory = reader.register(ours.ctypes.data, ours.nbytes)
    name = reader.meet(writer.metadata)
    assert name == "writer"
    here, there = int(ours.ctypes.data), int(theirs.ctypes.data)
    read = reader.read(name, nixl.runs([here, here + 8], [8, 4]), nixl.runs([there + 32, there + 60], [8, 4]))
    deadline = time.monotonic() + LIMIT
    while not reader.ended(read):
        assert time.monotonic() < deadline
        select.select([], [], [], 0.001)
    reader.release(read)
    assert ours[:12].tolist() == [*range(32, 40), *range(60, 64)]
    assert not ours[12:].any()
    with pytest.raises(nixl.NixlError, match="NIXL failed: "):
        reader.read(name, nixl.runs([here], [8]), nixl.runs([there + 64], [8]))
    reader.deregister(memory)
    reader.forget(name)
    reader.forget(name)
    with pytest.raises(nixl.NixlError, match="NIXL failed: "):
        reader.read(name, nixl.runs([here], [8]), nixl.runs([there], [8]))


@present
def test_bytes_that_no_agent_gave_are_refused() -> None:
    with pytest.raises(nixl.NixlError):
        nixl.Agent("reader").meet(b"not an agent")


@present
def test_an_agent_that_nobody_reads_sleeps() -> None:
    """The library's own thread would take a core."""
    agent = nixl.Agent("served", served=True)
    began, used = time.monotonic(), time.process_time()
    select.select([], [], [], 0.3)
    assert time.process_time() - used < 0.5 * (time.monotonic() - began)
    assert agent.metadata
