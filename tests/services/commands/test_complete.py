"""`penstock complete`: pipes, lines on a terminal, and a server that is started for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.services.commands.run import penstock, terminal

WORDS = ("--temperature", "0", "--max-tokens", "8")


def test_a_text_through_a_pipe(server: Server) -> None:
    done = penstock("complete", "--url", server.url, *WORDS, given="Once upon a time")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    shown = penstock("complete", "--url", server.url, *WORDS, "--show-prompt", given="Once upon a time")
    assert shown.stdout == "Once upon a time" + done.stdout


def test_a_prompt_and_a_pipe_are_one_text(server: Server) -> None:
    done = penstock("complete", "--url", server.url, *WORDS, "--show-prompt", "-p", "Go on:", given="Once\n")
    assert done.stdout.startswith("Go on:\n\nOnce")


def test_nothing_to_complete(server: Server) -> None:
    assert penstock("complete", "--url", server.url).returncode == 2


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
def test_each_line_is_a_text(server: Server) -> None:
    with terminal("complete", "--url", server.url, *WORDS, "--show-prompt") as shown:
        shown.until("Ctrl-D ends")
        shown.until("> ")
        for line in ("Once upon a time", "The river"):
            start = shown.type(line + "\n")
            shown.until("> ", start + len(line) + 2)
            assert shown.seen[start:].count(line) >= 2
        shown.type("\x04")
        assert shown.ended() == 0


def test_a_model_is_started_and_ended(tmp_path: Path) -> None:
    done = penstock("complete", "--model", "", "--max-num-seqs", "2", "-p", "Once", *WORDS, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "starting the embedded model …\n"
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_start_says_why() -> None:
    done = penstock("complete", "--kv-cache-memory", "1", "--log-level", "error", "-p", "Once")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("penstock: --kv-cache-memory: 1 is not allowed")
    assert done.stdout == ""
