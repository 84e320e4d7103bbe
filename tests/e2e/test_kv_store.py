"""Two servers that share KV blocks through a Mooncake store, through real processes: what one has computed the other
finds, and whatever happens to the store or to the first one costs no request and no token.

With a store of files in Mooncake's place, and with Mooncake itself where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.samples import scrape, total
from tests.e2e.server import LIMIT, Server, command_line, serving
from tests.e2e.test_host_tier import EACH, PLACES, said, until_metric
from tests.e2e.test_storage_tier import kill
from tests.services.executor.mooncake import fake_mooncake
from tests.services.links.network import free_port

OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--kv-cache-memory", str(400 * EACH), "--kv-host-memory", str(400 * EACH)),
)
CLIENT = b"penstock.services.executor.mooncake_client"
OTHERS = ("lake", "island", "village", "garden")  # that nobody has asked for


@contextmanager
def server_with(folder: Path, url: str) -> Iterator[Server]:
    folder.mkdir()
    with serving(folder, *OPTIONS, "--kv-store", url) as server:
        server.logged("executor-0 kv_store ")
        yield server


def fill(server: Server) -> list[str]:
    """Have it say something of each place, until all of that is stored."""
    found = [said(server, place)[0] for place in PLACES]
    until_metric(server, "engine_disk_stored_blocks_total", 12 * len(PLACES))
    return found


def check_shared(server: Server, first: list[str]) -> None:
    """It has not been asked before, and goes on from what another one has computed, unless it was kept waiting."""
    answers = [said(server, place) for place in PLACES]
    assert [found for found, _, _ in answers] == first
    assert max([cached / length for _, cached, length in answers]) > 1 / 2
    until_metric(server, "engine_disk_loaded_blocks_total", 5)
    assert total(scrape(server.url), "engine_disk_failed_blocks_total") == 0


def test_servers_share_what_they_compute(tmp_path: Path) -> None:
    with fake_mooncake(tmp_path / "store") as mooncake, server_with(tmp_path / "a", mooncake.url) as first:
        expected = fill(first)
        with server_with(tmp_path / "b", mooncake.url) as second:
            check_shared(second, expected)
            kill(first)
            mooncake.fault("die")
            for place in OTHERS:
                said(second, place)
            until_metric(second, "engine_kv_store_failed_lookups_total", 1)
            mooncake.fault()
            second.logged("executor-0 kv_store ", 2)
            executor = second.children()["executor"]
            (client,) = clients(executor)
            os.kill(executor, signal.SIGKILL)
            assert [said(second, place)[0] for place in PLACES] == expected
            assert CLIENT not in command_line(client), "it ends with its executor"
            assert total(scrape(second.url), "engine_block_faults_total") == 0


def clients(executor: int) -> list[int]:
    """Pids of the processes in which this one has Mooncake's client run, which a thread has started."""
    tasks = Path(f"/proc/{executor}/task").glob("*/children")
    return [pid for task in tasks for pid in map(int, task.read_text().split()) if CLIENT in command_line(pid)]


def missing_library() -> str:
    """Why Mooncake itself cannot be tried; empty: it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


@contextmanager
def master(port: int) -> Iterator[subprocess.Popen[bytes]]:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.origin is not None
    words = [str(Path(spec.origin).parent / "mooncake_master"), f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    words.append(f"--metrics_port={free_port()}")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + LIMIT
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            select.select((), (), (), 0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def test_servers_share_blocks_through_mooncake_itself(tmp_path: Path) -> None:
    if reason := missing_library():
        pytest.skip(reason)
    port = free_port()
    url = f"mooncake://127.0.0.1:{port}?global_segment_size=64mb"
    with master(port) as found, server_with(tmp_path / "a", url) as first:
        expected = fill(first)
        with server_with(tmp_path / "b", url) as second:
            check_shared(second, expected)
            with ThreadPoolExecutor(len(OTHERS)) as threads:
                asked = [threads.submit(said, second, place) for place in OTHERS]
                found.kill()
                kill(first)
                words = [one.result()[0] for one in asked]
            assert [said(second, place)[0] for place in PLACES] == expected
            said(second, "tower")
            until_metric(second, "engine_kv_store_failed_lookups_total", 1)
            with master(port):
                stored = total(scrape(second.url), "engine_disk_stored_blocks_total")
                number = 0
                while total(scrape(second.url), "engine_disk_stored_blocks_total") == stored:
                    said(second, f"house with {(number := number + 1)} doors")
                    assert number < 1000, "it has not come back"
            assert [said(second, place)[0] for place in OTHERS] == words
            assert total(scrape(second.url), "engine_block_faults_total") == 0
