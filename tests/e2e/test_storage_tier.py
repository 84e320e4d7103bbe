"""KV blocks on disk, through real processes: they are found again after everything was killed, and whatever happens to
the files costs no request and no token."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks.samples import scrape, total
from tests.e2e.server import LIMIT, Server, serving
from tests.e2e.test_host_tier import EACH, OPTIONS, PLACES, said, until_metric

ROOM = 300  # blocks
FIRST = PLACES[0]  # the first to leave the device


def options(folder: Path) -> tuple[str, ...]:
    return (*OPTIONS, "--kv-disk", str(folder), "--kv-disk-size", str(4096 + ROOM * (EACH + 64)))


def words(server: Server) -> list[str]:
    return [said(server, place)[0] for place in PLACES]


def kill(server: Server) -> None:
    """Everything at once, the launcher first."""
    children = server.children().values()
    for pid in (server.process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    server.process.wait(LIMIT)


def test_prefixes_outlive_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(tmp_path, *options(folder)) as server:
        first = words(server)
        until_metric(server, "engine_disk_stored_blocks_total", 20)
        until_metric(server, "executor_disk_copied_bytes_total", 20 * EACH)
        engine = server.until("/health", lambda found: found["engine"]["disk_blocks_held"] >= 20)["engine"]
        assert engine["disk_blocks"] == ROOM
        kill(server)
    (own,) = folder.glob("*/executor-0")
    assert {path.stat().st_mode & 0o777 for path in (folder, own.parent, own)} == {0o700}
    with serving(tmp_path, *options(folder)) as server:
        found, cached, length = said(server, FIRST)
        assert found == first[0]
        assert cached > length // 2
        until_metric(server, "engine_disk_loads_total", 1)
        until_metric(server, "engine_disk_loaded_blocks_total", 5)
        assert words(server) == first
        data = bytearray((own / "blocks").read_bytes())
        data[EACH // 2 :: EACH] = bytes(255 - byte for byte in data[EACH // 2 :: EACH])  # one byte of each block
        (own / "blocks").write_bytes(data)
        os.kill(server.children()["executor"], signal.SIGKILL)
        assert words(server) == first
        until_metric(server, "engine_disk_failed_blocks_total", 5)
        assert total(scrape(server.url), "engine_block_faults_total") == 0


@pytest.mark.long
def test_each_rank_has_its_own_part(tmp_path: Path) -> None:
    """And where one of them has lost its own, nothing of the others is read."""
    folder = tmp_path / "kv"
    both = (*options(folder), "--tensor-parallel-size", "2", "--device", "cpu")
    with serving(tmp_path, *both) as server:
        first = words(server)
        until_metric(server, "engine_disk_stored_blocks_total", 20)
        kill(server)
    with serving(tmp_path, *both) as server:
        assert words(server) == first
        until_metric(server, "engine_disk_loaded_blocks_total", 5)
        kill(server)
    assert len(list(folder.glob("*/executor-*/blocks"))) == 2
    (lost,) = folder.glob("*/executor-1/index")
    lost.unlink()
    with serving(tmp_path, *both) as server:
        assert words(server) == first
        assert total(scrape(server.url), "engine_disk_loads_total") == 0


def test_a_full_disk_and_a_folder_that_goes(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(tmp_path, *options(folder)) as server:
        resource.prlimit(server.children()["executor"], resource.RLIMIT_FSIZE, (3 * EACH, 3 * EACH))
        first = words(server)
        until_metric(server, "engine_disk_failed_blocks_total", 3)
        shutil.rmtree(folder)
        assert words(server) == first
        os.kill(server.children()["executor"], signal.SIGKILL)
        assert words(server) == first
        server.healthy()
        until_metric(server, "engine_disk_stored_blocks_total", 10)
        assert len(list(folder.glob("*/executor-0/blocks"))) == 1
        assert words(server) == first
