"""The launcher on a host that has only some processes of a server, with stand-ins for them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from services.linkkeys import new_keys, write_keys
from tests.services.test_launch import Server, leftovers, lives, serving

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
    with serving(tmp_path, *worker(keys), plan={"executor-3": "group:8"}) as server:
        server.ready()
        assert lives(server, "executor-3") == 9
        os.kill(server.pids()["executor-2"], signal.SIGKILL)
        server.until(lambda: server.fields.get("STATUS") == "serving")
        assert lives(server, "executor-2") == 2
        code, output = server.end()
        assert code == 0
        assert output.count(" group_broken process=executor-3") == 8
        assert "process_died process=executor-3" not in output
        assert "process_died process=executor-2" in output
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
        assert server.order("stopping").count("executor-2") == 1
        fifo.write_text("done")
        code, output = server.wait()
        assert code == 0
        assert " killed " not in output
        assert leftovers(server) == []


def test_refused_keys_end_it_with_their_code(tmp_path: Path, keys: str) -> None:
    with serving(tmp_path, *worker(keys), plan={"executor-2": "exit:5"}) as server:
        code, output = server.wait()
        assert code == 5
        assert "it went wrong" in output
        assert leftovers(server) == []


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (("--parts=executor:0",), "--scheduler-address"),
        (("--parts=executors",), "--parts"),
        (("--parts=executor:0", f"--scheduler-address={ADDRESS}", "--link-keys=/nowhere"), "--link-keys"),
    ],
)
def test_mistakes_are_found_before_anything_starts(tmp_path: Path, given: tuple[str, ...], option: str) -> None:
    with serving(tmp_path, *given) as server:
        ended, output = server.wait()
        assert ended == 2
        assert output.startswith(f"penstock: {option}: ")
        assert output.count("\n") == 1
        assert server.events() == []
        assert leftovers(server) == []


def test_an_address_that_is_taken_is_one_of_them(tmp_path: Path, keys: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        parts = ("--parts=scheduler,tokenizer,api", f"--scheduler-address={where}", keys)
        with serving(tmp_path, *parts) as server:
            ended, output = server.wait()
            assert (ended, server.events()) == (4, [])
            assert output.startswith("penstock: --scheduler-address: ")
