"""A server as its operator sees it: four processes, what they say, what they cost idle, what they leave behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import LIMIT, Server, descendants, serving
from tests.speed import slowness

LISTENS = "0A"  # state of a socket in proc(5), net/tcp
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int, *, ended: bool = False) -> float:
    """That a process has used, and with `ended` those of its children that it has waited for. Source: proc(5), stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended else 13])) / TICKS


def gone(pid: int) -> bool:
    """Whether the process has ended; one that nobody has reaped yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pids: list[int]) -> None:
    descriptors = []
    for pid in pids:
        try:
            descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + LIMIT
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], "a process is left over"
        os.close(descriptor)
    assert all(map(gone, pids))


def test_each_part_is_a_process_of_its_own_and_torch_stays_in_one(server: Server) -> None:
    children = server.children()
    assert set(children) == {"api", "tokenizer", "scheduler", "executor"}
    loaded = {role: "libtorch" in Path(f"/proc/{pid}/maps").read_text() for role, pid in children.items()}
    assert loaded == {"api": False, "tokenizer": False, "scheduler": False, "executor": True}


def test_the_socket_files_are_closed_to_others(server: Server) -> None:
    assert server.run_dir.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in server.run_dir.glob("*.sock")} >= {"text-0.sock", "tokens-0.sock", "steps-0.sock"}


def listening(pid: int) -> set[str]:
    """Addresses of this machine where a process waits for connections over a network. Source: proc(5), net/tcp."""
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own and (kind.startswith("udp") or fields[3] == LISTENS):
                found.add(fields[1])
    return found


def test_nothing_listens_on_a_network_but_the_api_on_this_machine(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    found = {role: listening(pid) for role, pid in server.children().items()}
    assert found == {"api": {f"0100007F:{port:04X}"}, "tokenizer": set(), "scheduler": set(), "executor": set()}
    assert listening(server.process.pid) == set()


def test_it_says_what_a_newcomer_needs(server: Server) -> None:
    for words in (server.url, "penstock-demo", "blocks of 16 tokens", "at most", "curl "):
        server.logged(words)


def test_idle_costs_next_to_nothing(server: Server) -> None:
    """Under 2 % of one core in all, and as many times more of a core as it is slower; a machine that runs other tests
    beside them gets half as much again. What had to be done before it is idle may take its time."""
    most, deadline, shares = 0.03 * slowness(), time.monotonic() + LIMIT, [1.0]
    while shares[-1] >= most:
        assert time.monotonic() < deadline, shares
        pids = [*descendants(server.process.pid), server.process.pid]
        began, before = time.monotonic(), sum(map(cpu_seconds, pids))
        select.select([], [], [], 3.0)
        shares.append((sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - began))


def test_sigterm_finishes_what_runs_and_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        pids = descendants(server.process.pid)
        body = {"prompt": "Once upon a time", "max_tokens": 150, "stream": True, "ignore_eos": True}
        lines = []
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=LIMIT) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    server.process.send_signal(signal.SIGTERM)
        assert lines[-2] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-4]
        assert server.process.wait(LIMIT) == 0
        wait_gone(pids)
        assert not list(server.run_dir.glob("*.sock"))


def test_a_dead_process_is_started_again(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for deaths, role in enumerate(("executor", "scheduler", "tokenizer", "api"), 1):
            before = server.children()
            os.kill(before[role], signal.SIGKILL)
            server.logged("serving_again", deaths)
            server.healthy()
            after = server.children()
            assert {each for each in before if before[each] != after[each]} == {role}
            assert f"process_died child={role}-0" in server.log.read_text()
            body = {"prompt": "Once upon a time", "max_tokens": 4}
            assert httpx.post(server.url + "/v1/completions", json=body, timeout=LIMIT).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
        wait_gone(list(after.values()))
        assert not list(server.run_dir.glob("*.sock"))


def test_a_port_that_is_taken_is_an_exit_code_too(server: Server) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", server.url.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 4
    assert "another process listens there" in done.stderr


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        pids = descendants(server.process.pid)
        server.process.kill()
        server.process.wait()
        wait_gone(pids)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--prot", "80"), 2, "--port"),
        pytest.param(("--block-size", "0"), 2, "--block-size", marks=pytest.mark.long),
        pytest.param(("--max-num-batched-tokens", "8"), 2, "--max-num-seqs", marks=pytest.mark.long),
        pytest.param(("--tensor-parallel-size", "3"), 2, "--tensor-parallel-size", marks=pytest.mark.long),
        (("--max-model-len", "1000000"), 2, "--max-model-len"),
        (("--kv-cache-memory", "4096"), 2, "--kv-cache-memory"),
        (("--model", "no/such/folder/here"), 3, "no/such/folder/here"),
    ],
)
def test_a_wrong_option_is_one_line_and_an_exit_code(arguments: tuple[str, ...], code: int, words: str) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == code
    assert words in done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
