"""`penstock bench` (serve.py, offline.py): each once with the embedded model, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.services.bench.client import Progress
from penstock.services.bench.serve import described, length
from tests.e2e.server import Server
from tests.services.commands.run import penstock

LOAD = ("--requests", "4", "--concurrency", "2", "--input", "8", "--output-tokens", "4:6", "--warmup", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    from tests.e2e.server import serving

    with serving(tmp_path_factory.mktemp("server"), "--api-key", "open") as server:
        yield server


def test_a_server_under_load(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = penstock("bench", "serve", "--url", server.url, *LOAD, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "out tok/s" in done.stdout
    found = json.loads(output.read_text())
    assert (found["summary"]["completed"], found["summary"]["failed"]) == (4, 0)
    assert found["workload"]["output"] == [4, 6]


def test_a_load_that_fails_says_so(server: Server) -> None:
    done = penstock("bench", "serve", "--url", server.url, *LOAD, "--temperature", "9")
    assert done.returncode == 1
    assert "4 × http 400" in done.stderr


def test_the_python_api_under_load() -> None:
    done = penstock("bench", "offline", "--max-num-seqs", "4", *LOAD)
    assert done.returncode == 0, done.stderr
    assert "out tok/s" in done.stdout


def test_a_start() -> None:
    done = penstock("bench", "start", "--runs", "1", "--max-num-seqs", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("start 1: ready after ")
    assert "fastest" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("bench", "nothing"), 2, "'bench nothing' is not allowed"),
        (("bench", "start", "--runs", "0"), 2, "--runs"),
        (("bench", "offline", "--rate", "3"), 2, "--rate"),
        (("bench", "serve", "--input", "9:3"), 2, "--input"),
        (("bench", "serve", "--url", "http://127.0.0.1:1"), 5, "http://127.0.0.1:1"),
        (("bench", "serve", "--url", "https://127.0.0.1:1"), 2, "without TLS"),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], code: int, said: str) -> None:
    done = penstock(*words)
    assert done.returncode == code
    assert said in done.stderr


def test_lengths_and_words() -> None:
    assert (length("8"), length("8:16")) == ((8, 8), (8, 16))
    assert described(Progress(finished=1, failed=2, events=30, open=3), 2.0) == "3 open, 2 failed, 15 tok/s so far"


def test_without_a_word_it_says_what_there_is() -> None:
    done = penstock("bench")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in ("serve", "offline", "start"))
