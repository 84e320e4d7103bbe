"""`penstock engine` with stand-ins for the processes: no api, an end with its owner, and faults passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocol.config import Config, RunConfig
from penstock.protocol.engine_config import ModelConfig
from penstock.protocol.errors import ConfigError, LinkError
from penstock.services.supervisor import run_directory
from penstock.services.supervisor.launcher import engine
from penstock.services.supervisor.process import PARENT
from penstock.services.supervisor.sd_notify import ERROR_FIELD, NoticeSocket, read_error
from tests.model_folder import linked
from tests.services.supervisor.test_launcher import FAKE, ROOT, Server, alive

START = """
import sys
from pathlib import Path
from penstock.services.supervisor import launcher
from penstock.services import cli
launcher.ENTRY = Path(sys.argv[1])
sys.exit(cli.main(sys.argv[2:]))
"""
OWNED = "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:]).wait())"


def start(folder: Path, *, plan: dict[str, str] | None = None, owned: bool = False) -> Server:
    """An engine; `owned` by a process of its own, which the server's `process` is then."""
    linked(folder / "model")
    (folder / "run").mkdir(mode=0o700)
    notices = NoticeSocket(folder / "notify")
    environ = dict(os.environ, NOTIFY_SOCKET=str(notices.path), PYTHONPATH=str(ROOT))
    environ |= {"FAKE_PLAN": json.dumps(plan or {}), "FAKE_LOG": str(folder / "events")}
    environ[run_directory.TEMPORARY] = str(folder / "run")
    command = [sys.executable, "-c", START, str(FAKE), "engine", str(folder / "model"), "--tokenizer-processes=1"]
    command.append(f"--run-dir={folder / 'run'}")
    if owned:
        line = "import os, sys; os.environ['PENSTOCK_PARENT'] = str(os.getpid());" + OWNED
        command = [sys.executable, "-c", line, *command]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return Server(process, notices, folder)


def end(server: Server) -> None:
    server.process.kill()
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()
    for pid in server.pids().values():
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    server.notices.close()


def test_it_starts_all_but_the_api_and_ends_in_order(tmp_path: Path) -> None:
    server = start(tmp_path)
    try:
        server.ready()
        assert set(server.pids()) == {"executor-0", "scheduler-0", "tokenizer-0"}
        assert "X_PENSTOCK_URL" not in server.fields
        code, output = server.end()
        assert code == 0
        assert server.order("stopping") == ["tokenizer-0", "scheduler-0", "executor-0"]
        assert "listens" not in output
        assert not (tmp_path / "run").exists()
    finally:
        end(server)


def test_it_ends_with_the_program_that_wants_it(tmp_path: Path) -> None:
    server = start(tmp_path, owned=True)
    try:
        server.ready()
        server.process.kill()
        server.until(lambda: not any(alive(pid) for pid in server.pids().values()))
        server.until(lambda: not (tmp_path / "run").exists())
    finally:
        end(server)


@pytest.mark.parametrize(("plan", "said"), [("exit:3", "it went wrong"), ("exit:77", "exit code 77")])
def test_a_process_that_fails_is_told_of(tmp_path: Path, plan: str, said: str) -> None:
    server = start(tmp_path, plan={"executor-0": plan})
    try:
        server.until(lambda: ERROR_FIELD in server.fields)
        error = read_error(server.fields[ERROR_FIELD])
        assert isinstance(error, LinkError)
        assert said in str(error)
        assert server.wait()[0] in (1, 3)
    finally:
        end(server)


def test_of_parts_the_program_itself_is_the_api(tmp_path: Path) -> None:
    linked(tmp_path / "model")
    model = ModelConfig(model=str(tmp_path / "model"))
    config = Config(model=model, run=RunConfig(run_dir=str(tmp_path / "run"), parts="tokenizer,scheduler,executor"))
    with pytest.raises(ConfigError, match="the program that starts an engine is its api"):
        engine(config)
    assert not (tmp_path / "run").exists()


def test_it_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="--run-dir"):
        engine(Config())


def test_it_does_not_outlive_a_parent_that_ended_before_it(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "penstock.services.cli", "engine", f"--run-dir={tmp_path / 'run'}"]
    environ = {**os.environ, PARENT: "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 1
