"""Which processes of this machine are one server's: by its run directory, and by nothing that two servers share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from penstock.services.commands.local import APART, Local, companions, local_processes, role_of, value_of
from tests.e2e.server import Server, serving
from tests.services.commands.run import penstock

PAGE = os.sysconf("SC_PAGE_SIZE")


def local(role: str, pid: int, run_dir: str, began: float = 1000.0, index: str = "0") -> Local:
    return Local(role, index, pid, 1 << 20, began, run_dir)


def place(proc: Path, pid: str, line: str, environ: str = "", *, seconds: float = 5.0) -> None:
    """A process that was started `seconds` ago."""
    (proc / pid).mkdir()
    (proc / pid / "cmdline").write_bytes(line.replace("|", "\0").encode())
    (proc / pid / "environ").write_bytes(environ.replace("|", "\0").encode())
    (proc / pid / "statm").write_text("1000 256 3")
    ticks = int((time.clock_gettime(time.CLOCK_BOOTTIME) - seconds) * os.sysconf("SC_CLK_TCK"))
    (proc / pid / "stat").write_text(f"{pid} (a) b) S " + "0 " * 18 + str(ticks))


def test_processes_by_their_command_lines(tmp_path: Path) -> None:
    place(tmp_path, "7", "python|/x/penstock/__main__.py|api|--index=2|--run-dir=/a|")
    place(tmp_path, "8", "/opt/penstock|executor|--run-dir|/r|", seconds=100.0)
    place(tmp_path, "9", "vim|penstock.md|api|")
    place(tmp_path, "11", "/opt/penstock|scheduler|", "PATH=/bin|RUNTIME_DIRECTORY=/run/penstock:/run/more|")
    (tmp_path / "10").mkdir()  # it ended meanwhile
    found = {one.role: one for one in local_processes(tmp_path)}
    assert {role: (one.index, one.pid, one.run_dir) for role, one in found.items()} == {
        "api": ("2", 7, "/a"), "executor": ("0", 8, "/r"), "scheduler": ("0", 11, "/run/penstock"),
    }  # fmt: skip
    assert found["api"].resident_bytes == 256 * PAGE
    assert found["api"].began - found["executor"].began == pytest.approx(95.0, abs=1.0)
    assert abs(found["executor"].began - (time.time() - 100.0)) < APART / 2


def test_one_that_is_told_of_brings_the_others_of_its_run_directory() -> None:
    mine = [local("api", 7, "/a"), local("executor", 8, "/a")]
    theirs = [local("api", 17, "/b"), local("executor", 18, "/b")]
    assert companions(mine + theirs, {("api", "0", 7): 1000.4}) == tuple(mine)


@pytest.mark.parametrize(
    "known",
    [
        {("api", "0", 9): 1000.0},  # another process
        {("api", "1", 7): 1000.0},
        {("tokenizer", "0", 7): 1000.0},
        {("api", "0", 7): 1000.0 + 2 * APART},  # of another host or container, whose pids are names of its own
    ],
)
def test_what_only_looks_alike_brings_nobody(known: dict[tuple[str, str, int], float]) -> None:
    assert companions([local("api", 7, "/a"), local("executor", 8, "/a")], known) == ()


def test_without_a_run_directory_nobody_is_alike() -> None:
    found = [local("api", 7, ""), local("api", 17, "")]
    assert companions(found, {("api", "0", 7): 1000.0}) == ()


def test_words_of_a_command_line() -> None:
    assert role_of(["python", "-m", "pytest", "api", ""]) == ""
    assert role_of(["/x/python", "-m", "penstock", "api", ""]) == "api"
    assert role_of(["penstock", "serve"]) == ""
    assert value_of("--index", ["--index"]) == ""


def test_two_servers_on_one_machine(server: Server, tmp_path: Path) -> None:
    """Each is shown with its own processes alone, all of them, of one that has several of a kind as well."""
    several = ("--api-processes", "2", "--tokenizer-processes", "2", "--api-key", "open")
    with serving(tmp_path, *several) as other:
        for url, processes in ((server.url, 4), (other.url, 6)):
            shown = json.loads(penstock("top", "--url", url, "--once", "--json", "--interval", "0.1").stdout)
            told = {(one["role"], one["index"]) for one in shown["processes"]}
            assert len(shown["processes"]) == len(told) == processes, shown["processes"]
