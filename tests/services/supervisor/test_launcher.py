"""The launcher with stand-ins for the real processes: order, ends, exit codes, and that nothing is left over."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.services.supervisor.restart_policy import CrashLoop, crash_loops
from penstock.services.supervisor.sd_notify import NoticeSocket
from tests.model_folder import linked

FAKE = Path(__file__).parent / "fake_process.py"
ROOT = Path(__file__).resolve().parents[3]
LIMIT = 120.0  # seconds; a loaded machine needs some of them
NAMES = {"executor-0", "scheduler-0", "tokenizer-0", "api-0"}
ONE_EACH = ("--api-processes=1", "--tokenizer-processes=1")  # unless a test asks for more
START = """
import os
import signal
import sys
from pathlib import Path
from penstock.services.supervisor import launcher as launch
from penstock.services import cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and a launcher leaves it so
real = launch.serve
launch.SILENCE_SECONDS = float(os.environ.get("FAKE_SILENCE", "0.5"))
launch.BUSY_SECONDS = float(os.environ.get("FAKE_BUSY", "30"))
launch.serve = lambda config: real(config, Path(sys.argv[1]))
made = launch.Child
def child(role, index, *rest):
    if f"{role}-{index}" == os.environ.get("FAKE_REFUSED"):
        raise BlockingIOError("no more processes")
    return made(role, index, *rest)
launch.Child = child
sys.exit(cli.main(sys.argv[2:]))
"""


class Server:
    """A launcher under test and what its stand-ins wrote down."""

    def __init__(self, process: subprocess.Popen[str], notices: NoticeSocket, folder: Path) -> None:
        self.process = process
        self.notices = notices
        self.folder = folder
        self.fields: dict[str, str] = {}

    def events(self) -> list[list[str]]:
        log = self.folder / "events"
        return [line.split(" ", 3) for line in log.read_text().splitlines()] if log.exists() else []

    def pids(self) -> dict[str, int]:
        return {name: int(pid) for name, pid, event, *_ in self.events() if event == "started"}

    def order(self, event: str) -> list[str]:
        return [name for name, _, found, *_ in self.events() if found == event]

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < deadline, self.events()
            select.select([self.notices], [], [], 0.02)
            for notice in self.notices.receive():
                self.fields |= notice.fields

    def ready(self) -> None:
        self.until(lambda: self.fields.get("READY") == "1")

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, output


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(
    folder: Path, *arguments: str, plan: dict[str, str] | None = None, wrapper: Sequence[str] = ()
) -> Iterator[Server]:
    linked(folder / "model", without=("chat_template.jinja",))
    (folder / "tmp").mkdir()
    notices = NoticeSocket(folder / "notify")
    environ = dict(os.environ, NOTIFY_SOCKET=str(notices.path), TMPDIR=str(folder / "tmp"), PYTHONPATH=str(ROOT))
    environ |= {"FAKE_PLAN": json.dumps(plan or {}), "FAKE_LOG": str(folder / "events"), "WATCHDOG_USEC": "1"}
    command = [sys.executable, "-c", START, str(FAKE), "serve", str(folder / "model"), "--port=0"]
    command = [*wrapper, *command, *ONE_EACH, *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = Server(process, notices, folder)
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for pid in server.pids().values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        notices.close()


def leftovers(server: Server) -> list[object]:
    """Living children and files in the temporary directory."""
    return [pid for pid in server.pids().values() if alive(pid)] + list((server.folder / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_starts_says_so_and_ends_in_order(tmp_path, number):
    with serving(tmp_path) as server:
        server.ready()
        assert set(server.pids()) == NAMES
        assert server.fields["X_PENSTOCK_URL"] == "http://127.0.0.1:1"
        code, output = server.end(number)
        assert code == 0
        assert server.order("stopping") == ["api-0", "tokenizer-0", "scheduler-0", "executor-0"]
        assert server.order("ended") == server.order("stopping")
        assert leftovers(server) == []
        assert "api-0 says hello\n" in output
        assert "Penstock listens on http://127.0.0.1:1\n" in output
        assert "512 blocks of 16 tokens: at most 8,192 tokens\n" in output
        assert "curl http://127.0.0.1:1/v1/completions -H 'Content-Type: application/json'" in output


def test_every_process_gets_the_same_options(tmp_path):
    with serving(tmp_path, "--api-processes=2", "--no-overlap", "--api-key=secret word") as server:
        server.ready()
        started = {name: rest.split() for name, _, event, rest in server.events() if event == "started"}
        assert set(started) == NAMES | {"api-1"}
        assert len({tuple(words) for words in started.values()}) == 1
        assert f"--model={tmp_path / 'model'}" in started["api-0"]
        assert "--served-model-name=model" in started["api-0"]
        assert "--no-overlap" in started["api-0"]
        assert "--port=0" not in started["api-0"]
        assert not any("secret" in word for word in started["api-0"])
        environ = Path(f"/proc/{server.pids()['api-0']}/environ").read_bytes().split(b"\0")
        assert b"PENSTOCK_API_KEY=secret word" in environ
        assert b"WATCHDOG_USEC=500000" in environ  # the launcher's own, not what its supervisor asked of it
        code, output = server.end()
        assert code == 0
        assert "secret" not in output
        assert "Bearer $PENSTOCK_API_KEY" in output


def test_the_others_run_on_while_the_api_drains(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with serving(tmp_path, plan={"api-0": f"slow:{fifo}"}) as server:
        server.ready()
        server.process.terminate()
        server.until(lambda: server.order("stopping") and server.fields.get("STOPPING") == "1")
        assert server.order("stopping") == ["api-0"]
        assert all(alive(pid) for pid in server.pids().values())
        fifo.write_text("done")
        assert server.wait()[0] == 0
        assert len(server.order("ended")) == 4


def test_a_second_signal_ends_at_once(tmp_path):
    with serving(tmp_path, plan={"api-0": "stubborn"}) as server:
        server.ready()
        server.process.terminate()
        server.until(lambda: server.fields.get("STOPPING") == "1")
        code, output = server.end(signal.SIGINT)
        assert code == 1
        assert "ending_at_once" in output
        assert leftovers(server) == []


def test_what_does_not_end_is_killed(tmp_path):
    with serving(tmp_path, "--drain-timeout=0", plan={"api-0": "stubborn"}) as server:
        server.ready()
        code, output = server.end()
        assert code == 0
        assert " killed child=api-0" in output
        assert output.count(" killed child=") == 1
        assert server.order("ended") == ["tokenizer-0", "scheduler-0", "executor-0"]
        assert leftovers(server) == []


def starts_of(server: Server, name: str) -> int:
    return sum(found == name for found in server.order("started"))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_process_that_is_killed_is_started_again(tmp_path, name):
    with serving(tmp_path) as server:
        server.ready()
        os.kill(server.pids()[name], signal.SIGKILL)
        server.until(lambda: server.fields.get("STATUS") == "serving")
        assert {each: starts_of(server, each) for each in NAMES} == {each: 1 + (each == name) for each in NAMES}
        ports = ["--port=1" in rest.split() for _, _, event, rest in server.events() if event == "started"]
        assert ports == [False] * 4 + [True]  # the one that the first api process said
        code, output = server.end()
        assert code == 0
        assert f"process_died child={name}" in output
        assert "signal=SIGKILL" in output
        assert f'last="{name} says hello"' in output
        assert "serving_again" in output
        assert server.order("ended") == ["api-0", "tokenizer-0", "scheduler-0", "executor-0"]
        assert leftovers(server) == []


def test_one_that_fails_five_times_in_a_minute_is_told_of_and_the_others_run_on(tmp_path):
    run_dir = tmp_path / "run"
    with serving(tmp_path, f"--run-dir={run_dir}", plan={"executor-0": "once"}) as server:
        server.ready()
        os.kill(server.pids()["executor-0"], signal.SIGKILL)
        server.until(lambda: crash_loops(run_dir))
        (failure,) = crash_loops(run_dir)
        reason = "executor-0 failed 5 times within 60 seconds, the last time with exit code 1"
        assert failure == CrashLoop("executor-0", "executor", reason)
        assert starts_of(server, "executor-0") == 5
        server.until(lambda: server.fields.get("STATUS") == reason)
        assert all(alive(pid) for name, pid in server.pids().items() if name != "executor-0")
        code, output = server.end()
        assert code == 0
        assert f'beyond_hope child=executor-0 reason="{reason}"' in output
        assert crash_loops(run_dir) == ()
        assert leftovers(server) == []


def test_a_full_run_directory_does_not_end_the_launcher(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    small = f'mount -t tmpfs -o size=256k,mode=700 none "{run_dir}" && exec "$@"'
    wrapper = ("unshare", "--map-root-user", "--mount", "sh", "-c", small, "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode != 0:
        pytest.skip("no file system may be mounted here")
    with serving(tmp_path, f"--run-dir={run_dir}", plan={"executor-0": "fill"}, wrapper=wrapper) as server:
        server.ready()
        server.until(lambda: server.order("full") == ["executor-0"])
        os.kill(server.pids()["executor-0"], signal.SIGKILL)
        server.until(lambda: "executor-0 failed 5 times" in server.fields.get("STATUS", ""))
        seen_there = Path("/proc", str(server.process.pid), "root", *run_dir.parts[1:])
        (failure,) = crash_loops(seen_there)
        assert failure.process == "executor-0"
        assert server.process.poll() is None
        code, output = server.end()
        assert code == 0
        assert "crashed" not in output
        assert leftovers(server) == []


def test_nobody_waits_for_a_terminal_that_takes_nothing(tmp_path):
    """A pipe that is not read stands for it: it holds 64 KiB, and what is written here is 6 MB."""
    with serving(tmp_path, plan={"executor-0": "chatty:6000000"}) as server:
        server.until(lambda: server.order("spoken") == ["executor-0"])
        server.ready()
        os.kill(server.pids()["api-0"], signal.SIGKILL)
        server.until(lambda: starts_of(server, "api-0") == 2)
        server.until(lambda: server.fields.get("STATUS") == "serving")
        code, output = server.end()
        assert code == 0
        assert "lines of output were dropped: nobody took them\n" in output
        assert leftovers(server) == []


def test_one_that_falls_silent_is_killed_and_started_again(tmp_path):
    with serving(tmp_path, plan={"scheduler-0": "silent"}) as server:
        server.ready()
        (tmp_path / "go").touch()
        server.until(lambda: starts_of(server, "scheduler-0") == 2)
        server.until(lambda: server.fields.get("STATUS") == "serving")
        code, output = server.end()
        assert code == 0
        assert "process_hangs child=scheduler-0" in output
        assert leftovers(server) == []


def test_one_that_computes_for_long_is_late_and_not_dead(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SILENCE", "3")  # which leaves it the time to get a processor on a busy machine
    with serving(tmp_path, plan={"api-0": "busy:5"}) as server:
        server.ready()
        (tmp_path / "go").touch()
        server.until(lambda: server.order("through"))
        code, output = server.end()
        assert code == 0
        assert starts_of(server, "api-0") == 1
        assert "process_hangs" not in output
        assert leftovers(server) == []


def test_one_that_computes_for_ever_is_dead(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_BUSY", "1")
    with serving(tmp_path, plan={"api-0": "busy:3600"}) as server:
        server.ready()
        (tmp_path / "go").touch()
        server.until(lambda: starts_of(server, "api-0") == 2)
        server.process.kill()


def test_what_drains_gets_back_what_it_needs(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with serving(tmp_path, plan={"api-0": f"slow:{fifo}"}) as server:
        server.ready()
        server.process.terminate()
        server.until(lambda: server.order("stopping"))
        os.kill(server.pids()["executor-0"], signal.SIGKILL)
        server.until(lambda: starts_of(server, "executor-0") == 2)
        assert server.order("stopping") == ["api-0"]
        fifo.write_text("done")
        assert server.wait()[0] == 0
        assert server.order("ended") == ["api-0", "tokenizer-0", "scheduler-0", "executor-0"]
        assert leftovers(server) == []


@pytest.mark.parametrize(("child", "launcher"), [(0, 1), (1, 1), (3, 3), (4, 4), (77, 1)])
def test_a_process_that_fails_to_start_gives_its_reason(tmp_path, child, launcher):
    with serving(tmp_path, plan={"executor-0": f"exit:{child}", "api-0": "mute"}) as server:
        code, output = server.wait()
        assert code == launcher
        assert f"exit_code={child}" in output
        assert "executor-0 says hello\\nit went wrong" in output
        cause = f"executor-0 ended before the server was ready (exit code {child}): it went wrong"
        assert output.splitlines()[-1] == f"penstock: {cause}"
        assert leftovers(server) == []


@pytest.mark.parametrize("own_directory", [False, True])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, own_directory):
    run_dir = tmp_path / "run"
    with serving(tmp_path, *([f"--run-dir={run_dir}"] if own_directory else [])) as server:
        server.ready()
        server.process.kill()
        server.until(lambda: not leftovers(server))
        if own_directory:
            assert [path.name for path in run_dir.iterdir()] == ["lock"]


def test_two_launchers_do_not_share_a_run_directory(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run_dir = f"--run-dir={tmp_path / 'run'}"
    with serving(tmp_path / "a", run_dir) as first:
        first.ready()
        with serving(tmp_path / "b", run_dir) as second:
            code, output = second.wait()
            assert code == 2
            assert "--run-dir" in output
        assert first.end()[0] == 0


def test_on_a_terminal_it_shows_progress(tmp_path):
    """The same under a pseudo-terminal: what the processes say scrolls past, nothing is mangled."""
    leader, follower = os.openpty()
    linked(tmp_path / "model")
    environ = dict(os.environ, FAKE_LOG=str(tmp_path / "events"), PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="100")
    command = [sys.executable, "-c", START, str(FAKE), "serve", str(tmp_path / "model"), "--port=0"]
    process = subprocess.Popen(command, env=environ, stdout=follower, stderr=follower, start_new_session=True)
    os.close(follower)
    seen = b""
    try:
        while b"Try it:" not in seen:
            assert select.select([leader], [], [], LIMIT)[0], seen
            seen += os.read(leader, 65536)
        process.terminate()
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:
                break
            seen += data
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert b"executor-0 says hello\r\n" in seen
    assert b"scheduler-0" in seen
    assert b"Penstock listens on http://127.0.0.1:1" in seen


def test_what_cannot_be_started_for_want_of_descriptors_is_tried_again(tmp_path):
    with serving(tmp_path) as server:
        server.ready()
        pid = server.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1  # room for a notice, none for a child's pipes
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
        os.kill(server.pids()["api-0"], signal.SIGKILL)
        server.until(lambda: "Too many open files" in server.fields["STATUS"])
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        server.until(lambda: server.fields["STATUS"] == "serving")
        assert starts_of(server, "api-0") == 2
        assert starts_of(server, "scheduler-0") == 1
        code, output = server.end()
        assert code == 0
        assert " process_not_started child=api-0 reason=" in output
        assert leftovers(server) == []


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_server_whose_process_cannot_be_started_says_why_and_ends(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FAKE_REFUSED", name)
    with serving(tmp_path) as server:
        code, output = server.wait()
        assert code == 1
        assert f" process_not_started child={name} reason=" in output
        assert "Traceback" not in output
        assert leftovers(server) == []
