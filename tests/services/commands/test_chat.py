"""`penstock chat` (chat.py, client.py): pipes, a conversation on a terminal, and what goes wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.services.commands.chat import Conversation, Screen
from tests.e2e.server import Server
from tests.services.commands.run import penstock, terminal

SUM = "128 + 457 = 585."


@pytest.mark.parametrize(("words", "given"), [((), "What is 128 + 457?\n"), (("--prompt", "What is 128 + 457?"), "")])
def test_a_question_through_a_pipe(server: Server, words: tuple[str, ...], given: str) -> None:
    done = penstock("chat", "--url", server.url, "--temperature", "0", *words, given=given)
    assert (done.returncode, done.stdout) == (0, SUM + "\n"), done.stderr
    assert done.stderr == ""


def test_fields_of_the_request(server: Server) -> None:
    words = ("--set", "temperature=0", "--set", "max_tokens=4", "-p", "What is 128 + 457?")
    done = penstock("chat", "--url", server.url + "/v1", *words)
    assert SUM.startswith(done.stdout.strip())
    assert len(done.stdout) < len(SUM)


@pytest.mark.parametrize(
    ("words", "key", "code", "said"),
    [
        (("--set", "temperature=9"), "open", 1, "temperature is 9; expected"),
        (("--set", "temperature"), "open", 2, "--set: 'temperature' is not allowed; it must be NAME=VALUE"),
        ((), "wrong", 1, "Incorrect API key provided"),
        (("--url", "http://127.0.0.1:1"), "open", 5, "http://127.0.0.1:1 cannot be reached"),
        (("--url", "ftp://x"), "open", 2, "--url: 'ftp://x' is not allowed"),
        (("--model", "somewhere"), "open", 2, "the command line also names a model to start"),
    ],
)
def test_what_goes_wrong_is_one_line(server: Server, words: tuple[str, ...], key: str, code: int, said: str) -> None:
    done = penstock("chat", "--url", server.url, *words, given="x", key=key)
    assert done.returncode == code
    assert said in done.stderr
    assert (done.stderr.count("\n"), done.stdout) == (1, "")


def test_nothing_to_ask(server: Server) -> None:
    done = penstock("chat", "--url", server.url)
    assert done.returncode == 2
    assert "--prompt: there is nothing to ask: give a question, or pipe one in" in done.stderr


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
def test_a_conversation(server: Server) -> None:
    """History, commands, a refusal that it survives, Ctrl-C in an answer and on a line, and the end."""
    with terminal("chat", "--url", server.url, "--temperature", "0") as shown:
        shown.until("> ")
        shown.until("> ", shown.until(SUM, shown.type("What is 128 + 457?\n")))
        shown.until(SUM, shown.type("/retry\n"))
        shown.until("Ctrl-C stops an answer", shown.type("/help\n"))
        shown.until("there is no such command", shown.type("/dance\n"))
        shown.type("/set temperature=9\n")
        shown.until("temperature is 9; expected", shown.type("Hello\n"))
        shown.type("/set temperature=0\n")
        shown.type("/system You are terse.\n")
        shown.until("= 585.", shown.type("What is\\\n128 + 457?\n"))
        for line in ("/clear", "/set max_tokens=4000", "/set ignore_eos=true"):
            shown.until("> ", shown.type(line + "\n") + len(line) + 1)
        shown.until(" the ", shown.type("Tell me a story.\n"))
        shown.until("> ", shown.type("\x03"))
        for line in ("/set ignore_eos=false", "/set max_tokens=40", "/clear"):
            shown.until("> ", shown.type(line + "\n") + len(line) + 1)
        shown.until("half", shown.type("half"))
        shown.until("> ", shown.type("\x03"), again="\x03")
        shown.until(SUM, shown.type("What is 128 + 457?\n"))
        shown.type("/exit\n")
        assert shown.ended() == 0


class Played:
    """A server for `Conversation`: keeps what it is asked, and says no or yes."""

    url = "http://test"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.refuses = False

    def model(self) -> str:
        return "demo"

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append(list(body["messages"]))
        if self.refuses:
            raise InvalidRequest("no")
        yield {"choices": [{"delta": {"content": "a cat"}}]}


def test_pictures_go_with_the_next_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")
    server = Played()
    talk = Conversation(server, Screen(io.StringIO()), "", {})  # type: ignore[arg-type]
    for line in (f"/image {tmp_path}/a.png", f"/image {tmp_path}/b", "what?", "/retry", "and now?", "/image nowhere"):
        assert talk.take(line)
    parts = [
        {"type": "image_url", "image_url": {"url": "data:application/octet-stream;base64,eA=="}},
        {"type": "image_url", "image_url": {"url": "data:application/octet-stream;base64,eQ=="}},
        {"type": "text", "text": "what?"},
    ]
    assert server.asked[0] == server.asked[1] == [{"role": "user", "content": parts}]
    assert server.asked[2][-1] == {"role": "user", "content": "and now?"}
    assert "/image: 'nowhere' is not allowed; it must be a file with a picture" in capsys.readouterr().err
    server.refuses = True
    for line in (f"/image {tmp_path}/a.png", "what?", "again?"):
        assert talk.take(line)
    assert [asked[-1]["content"] for asked in server.asked[3:]] == [[parts[0], parts[2]], "again?"]
