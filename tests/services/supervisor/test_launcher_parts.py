"""The launcher on a host that has only some processes of a server, with stand-ins for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.services.links.curve import new_keys, write_keys
from tests.services.supervisor.test_launcher import Server, leftovers, serving, starts_of

ADDRESS = "tcp://127.0.0.1:1"  # nobody of these parts listens there


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "link.keys"
    write_keys(file, new_keys())
    return f"--link-keys={file}"


def worker(keys: str) -> tuple[str, ...]:
    """Options of a host with the last two of four executors."""
    parts = ("--parts=executor:2-3", "--data-parallel-size=4", "--device=cpu", "--drain-timeout=60")
    return (*parts, f"--scheduler-address={ADDRESS}", keys)


def arguments(server: Server) -> dict[str, list[str]]:
    return {name: rest.split() for name, _, event, rest in server.events() if event == "started"}


def test_a_worker_starts_its_part_and_ends_in_order(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *worker(keys), "--port=1") as server:
        server.ready()
        assert set(server.pids()) == {"executor-2", "executor-3"}
        assert server.fields["STATUS"] == "serving executor:2-3"
        assert "X_PENSTOCK_URL" not in server.fields
        started = arguments(server)
        assert all("--first-executor=2" in words for words in started.values())
        code, output = server.end()
        assert code == 0
        assert sorted(server.order("ended")) == ["executor-2", "executor-3"]
        assert leftovers(server) == []
        assert " parts here=executor:2-3 elsewhere=api,tokenizer,scheduler,executor schedulers=" in output
        assert "Penstock serves a part here" in output
        assert "listens" not in output


def test_the_end_of_its_groups_life_is_no_failure(tmp_path: Path, keys: str) -> None:
    """However often the members elsewhere end; a process that is killed counts."""
    with serving(tmp_path, *worker(keys), plan={"executor-3": "group:5"}) as server:
        server.ready()
        assert starts_of(server, "executor-3") == 6
        os.kill(server.pids()["executor-2"], signal.SIGKILL)
        server.until(lambda: server.fields.get("STATUS") == "serving")
        assert starts_of(server, "executor-2") == 2
        code, output = server.end()
        assert code == 0
        assert output.count(" group_broken child=executor-3") == 5
        assert "process_died child=executor-3" not in output
        assert "process_died child=executor-2" in output
        assert "beyond_hope" not in output
        assert leftovers(server) == []


def test_a_worker_drains(tmp_path: Path, keys: str) -> None:
    """What its executors still do is waited for, though no api is here: one elsewhere may drain."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with serving(tmp_path, *worker(keys), plan={"executor-2": f"slow:{fifo}"}) as server:
        server.ready()
        server.process.terminate()
        server.until(lambda: server.fields.get("STOPPING") == "1" and "executor-3" in server.order("ended"))
        server.until(lambda: "executor-2" in server.order("stopping"))
        assert server.order("stopping").count("executor-2") == 1
        fifo.write_text("done")
        code, output = server.wait()
        assert code == 0
        assert " killed " not in output
        assert leftovers(server) == []


def test_keys_that_are_not_there_are_missed_before_anything_starts(tmp_path: Path) -> None:
    given = ("--parts=executor:0", f"--scheduler-address={ADDRESS}", "--link-keys=/nowhere")
    with serving(tmp_path, *given) as server:
        ended, output = server.wait()
        assert ended == 2
        assert output.startswith("penstock: --link-keys: ")
        assert output.count("\n") == 1
        assert server.events() == []
        assert leftovers(server) == []
