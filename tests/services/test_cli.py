from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocol.config import fields
from penstock.protocol.errors import AddressError, ConfigError, LinkError, ModelError, PenstockError
from penstock.protocol.links import Role
from penstock.services import cli
from penstock.services.supervisor.process import ExitCode

ROOT = Path(__file__).resolve().parents[2]


def penstock(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_an_executor_prints_into_a_pipe_is_there():
    """It ends without Python's own end, which would write what a buffer holds."""
    buffered = penstock("executor", "--version", PYTHONUNBUFFERED="")
    assert (buffered.returncode, buffered.stdout) == (0, penstock("--version").stdout)


def test_the_overview_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n  {command} " in text
    assert cli.main([]) == 0


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_every_command_fits_a_screen(command, capsys, monkeypatch):
    """60 lines at 80 columns; --help=all has every option of the command."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") <= 60
    assert text.startswith(f"usage: penstock {command} ")
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main([*command.split(), "--help=all"]) == 0
    whole = capsys.readouterr().out
    flags = cli.parser_of(command).flags()
    assert all(re.search(rf"{flag}\b", whole) for flag in flags)
    assert ("--help=all" in text) == (command != "keys")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_narrow_terminal_breaks_no_number_of_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main([*command.split(), "--help=all"]) == 0
    narrow = capsys.readouterr().out
    texts = [line for line in narrow.splitlines() if not re.match(r" *-|usage|.*:$", line)]
    assert max(map(len, texts)) <= 40
    monkeypatch.setenv("COLUMNS", "1000")
    assert cli.main([*command.split(), "--help=all"]) == 0
    wide = capsys.readouterr().out
    numbers = re.compile(r"\d[\d.,]*")
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))


def test_help_about_a_word(capsys):
    assert cli.main(["serve", "--help=timeout"]) == 0
    text = capsys.readouterr().out
    assert "--drain-timeout" in text
    assert "--request-timeout" in text
    assert "--port" not in text


def test_every_command_has_its_own_options_alone(capsys):
    own = {command: set(cli.parser_of(command).flags()) for command in cli.COMMANDS}
    assert own["keys"] == {"--force"}
    assert own["top"] == {"--url", "--port", "--interval", "--once", "--config", "--api-key"}
    assert "--temperature" in own["chat"]
    assert not {"--host", "--port", "--uds", "--parts"} & (own["chat"] | own["plan"] | own["bench serve"])
    assert {field.flag for field in fields()} <= own["serve"] & own["api"] & own["engine"] & own["config"]
    assert cli.main(["plan", "--port", "1", "--temprature=3"]) == 2
    assert capsys.readouterr().err == (
        "penstock: command line: 2 flags are not allowed\n"
        "  --port: `penstock plan` does not use it; it is an option of `penstock serve`\n"
        "  --temprature: there is no such option\n"
    )
    assert cli.main(["keys", "--temperature", "1"]) == 2
    assert "'--temperature' is not allowed; there is no such option\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("run", "serve"),
        ("srve", "serve"),
        ("launch-server", "serve"),
        ("generate", "complete"),
        ("ask", "chat"),
        ("batch", "run-batch"),
        ("benchmark", "bench serve"),
        ("memory", "plan"),
        ("ps", "top"),
        ("doctor", "collect-env"),
        ("keygen", "keys"),
        ("some/model", "penstock serve MODEL"),
    ],
)
def test_a_command_is_guessed_by_its_meaning(typed, meant, capsys):
    assert cli.main([typed]) == 2
    told = capsys.readouterr().err
    assert "; did you mean " in told or meant in told.rpartition(";")[2]
    assert meant in told.rpartition("; ")[2]


@pytest.mark.parametrize("words", [["--version"], ["serve", "--version"]])
def test_the_version_is_told(words, capsys):
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("penstock 0.")


@pytest.mark.parametrize("words", [["help"], ["-h"], []])
def test_help_is_a_command_too(words, capsys):
    assert cli.main(words) == 0
    assert "\n  serve " in capsys.readouterr().out
    assert cli.main(["help", "bench", "serve"]) == 0
    assert capsys.readouterr().out.startswith("usage: penstock bench serve ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srve"], "command line: 'srve' is not allowed; the commands are serve, chat"),
        (["keys"], "command line: FILE is missing"),
        (["chat", "--temperature", "x"], "--temperature: 'x' is not allowed; it must be a number"),
        (["bench", "serve", "--endpoint", "x"], "--endpoint: 'x' is not allowed; it must be one of completions, chat"),
        (["bench", "serve", "--input", "x"], "--input: 'x' is not allowed; it must be"),
        (["bench", "serve", "--extra-body", "{"], "--extra-body: '{' is not allowed; it must be JSON"),
        (["serve", "--overlap=3"], "--overlap: '3' is not allowed; it takes no value; its opposite is --no-overlap"),
        (["serve", "--port", "-3"], "--port: -3 is not allowed"),
        (["api", "--index=64", "--run-dir=/tmp/x"], "--index: '64' is not allowed"),
        (["api", "--index=-1", "--run-dir=/tmp/x"], "--index: '-1' is not allowed"),
        (
            ["api", "--index=2", "--api-processes=2", "--run-dir=/tmp/x"],
            "--index: '2' is not allowed; it must be a whole number",
        ),
        (["executor", "--index=1", "--run-dir=/tmp/x"], "--index: '1' is not allowed; it must be a whole number"),
        (["executor", "--local-index=x", "--run-dir=/tmp/x"], "--local-index: 'x' is not allowed"),
        (
            ["executor", "--local-index=2", "--first-executor=2", "--tensor-parallel-size=4", "--run-dir=/tmp/x"],
            "--local-index: '2' is not allowed; it must be a whole number between 0 and 1",
        ),
        (
            ["executor", "--local-index=0", "--index=0", "--run-dir=/tmp/x"],
            "--local-index: '0' is not allowed; --index is given too: 0",
        ),
        (
            ["executor", "--index=1", "--first-executor=2", "--tensor-parallel-size=4", "--run-dir=/tmp/x"],
            "--index: '1' is not allowed; executors of this host begin at 2, as --first-executor says",
        ),
        (
            ["api", "--local-index=0", "--run-dir=/tmp/x"],
            "command line: '--local-index' is not allowed; there is no such",
        ),
        (["scheduler"], "--run-dir: '' is not allowed; a process started by itself needs the directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"penstock: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--x", 1, "y"), ExitCode.CONFIG),
        (AddressError("--port", 1, "y"), ExitCode.ADDRESS),
        (ModelError("m"), ExitCode.MODEL),
        (LinkError("l"), ExitCode.LINK),
        (PenstockError("p"), ExitCode.FAILED),
    ],
)
def test_each_kind_of_error_has_an_exit_code(error, code, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "run", fail)
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"penstock: {error}\n"


def test_a_model_that_is_not_there_is_exit_code_3():
    found = penstock("serve", "/nowhere/model", "--port=0")
    assert found.returncode == 3
    assert found.stderr.startswith("penstock: /nowhere/model: no such folder")
    assert found.stderr.count("\n") == 1


def test_config_prints_what_holds_and_where_it_came_from():
    found = penstock("config", "some/model", "--no-overlap", PENSTOCK_API_KEY="hush")
    assert found.returncode == 0
    assert 'model = "some/model"  # command line' in found.stdout
    assert "overlap = false  # command line" in found.stdout
    assert "# api_key is set and not shown  # environment PENSTOCK_API_KEY" in found.stdout
    assert "hush" not in found.stdout


def test_the_command_line_and_the_public_face_are_light():
    code = (
        "import sys, penstock, penstock.services.cli\n"
        "penstock.services.cli.main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'zmq', 'rich', 'asyncio', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from penstock import Config, ConfigError, ModelError"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(("command", "said"), [("api", "said False\n"), ("plan", "said True\ntaken down\n")])
def test_a_process_of_a_server_starts_without_garbage_collection_and_ends_at_once(command, said):
    code = (
        "import atexit, gc, sys\n"
        "from penstock.services import cli\n"
        "cli.main = lambda: print('said', gc.isenabled()) or 3\n"
        "atexit.register(print, 'taken down')\n"
        "cli.entry()"
    )
    command = [sys.executable, "-c", code, command]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout) == (3, said), found.stderr


@pytest.mark.parametrize("role", Role)
def test_each_role_collects_garbage_once_it_has_started(role):
    module = f"penstock.services.{cli.ROLE_MODULES.get(role, f'{role}.main')}"
    found = importlib.util.find_spec(module)
    assert "gc.enable()" in Path(found.origin).read_text()


def test_a_role_runs_in_its_process(tmp_path, monkeypatch):
    ran = []

    class Module:
        @staticmethod
        def run(config, index):
            ran.append((config.run.run_dir, index))
            return 7

    monkeypatch.setattr("penstock.services.supervisor.process.enter", lambda *words: ran.append(words[:2]))
    monkeypatch.setattr("importlib.import_module", lambda name: ran.append(name) or Module)
    assert cli.main(["tokenizer", "--index=3", f"--run-dir={tmp_path / 'run'}"]) == 7
    assert ran == [("tokenizer", 3), "penstock.services.tokenizer.main", (str(tmp_path / "run"), 3)]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_an_executor_may_be_numbered_within_its_host(tmp_path, monkeypatch):
    ran = []

    class Module:
        @staticmethod
        def run(config, index):
            ran.append((config.executor.first_executor, index))
            return 7

    monkeypatch.setattr("penstock.services.supervisor.process.enter", lambda *words: ran.append(words[:2]))
    monkeypatch.setattr("importlib.import_module", lambda name: Module)
    words = ["executor", "--local-index=1", "--first-executor=2", "--tensor-parallel-size=4"]
    assert cli.main([*words, f"--run-dir={tmp_path / 'run'}"]) == 7
    assert ran == [("executor", 3), (2, 3)]


@pytest.mark.parametrize("words", [["bench"], ["bench", "--help"], ["bench", "-h"]])
def test_the_benchmarks_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    told = capsys.readouterr().out
    assert all(f"  {name.removeprefix('bench ')}" in told and cli.COMMANDS[name] in told for name in cli.BENCHES)


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "nothing"]) == 2
    assert "bench serve" in capsys.readouterr().err
