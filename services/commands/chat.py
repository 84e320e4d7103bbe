"""`penstock chat`: a conversation with a server's model in the terminal, or one question through a pipe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock.protocol.errors import ConfigError, RequestError
from penstock.services.commands import sampling, target, terminal
from penstock.services.commands.client import Client
from penstock.services.commands.terminal import Screen
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

PATH = "/v1/chat/completions"
HELP = """/system TEXT  what the model is told before everything else; forgets the conversation
/clear        forget the conversation
/retry        another answer to the last question
/set N=VALUE  a field of the requests from now on, such as temperature=0.2
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("-p", "--prompt", help="ask this, print the answer, end; what is piped in comes after it")
    parser.add_argument("--system", default="", help="what the model is told before everything else")
    sampling.add_arguments(parser)


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Answer one question or hold a conversation; the exit code."""
    question = terminal.piped(namespace.prompt, sys.stdin)
    if question == "":
        raise ConfigError("--prompt", "", "there is nothing to ask: neither a prompt nor anything piped in")
    fields = sampling.fields(namespace)
    with target.reached(namespace, effective) as found, found.client() as client:
        talk = Talk(client, Screen(sys.stdout), namespace.system, fields)
        if question is not None:
            talk.answer(question)
            return ExitCode.FAILED if talk.stopped else ExitCode.ORDERLY
        print(f"{talk.model} at {client.url}; /help tells more", file=sys.stderr)
        try:
            import readline  # noqa: F401 (it gives `input` a history)
        except ImportError:
            print("lines cannot be edited here", file=sys.stderr)
        for line in terminal.lines("> "):
            if not talk.take(line):
                break
    return ExitCode.ORDERLY


class Talk:
    """One conversation: its messages and the fields of its requests."""

    def __init__(self, client: Client, screen: Screen, system: str, fields: dict[str, Any]) -> None:
        self.model = client.model()
        self.stopped = False  # the last answer was cut off by the user
        self._client = client
        self._screen = screen
        self._fields = fields
        self._messages: list[dict[str, Any]] = []
        self._begin(system)

    def take(self, line: str) -> bool:
        """Do what a typed line says; False to leave. What the server refuses is told, and the conversation goes on."""
        try:
            if line.startswith("/"):
                return self._command(*line[1:].partition(" ")[::2])
            self.answer(line)
        except (RequestError, ConfigError) as error:
            self._screen.end()
            print(f"penstock: {error}", file=sys.stderr)
        return True

    def answer(self, question: str) -> None:
        """Show the answer as it comes. Ctrl-C ends it; what came until then is remembered.

        Raises RequestError; the question is forgotten then.
        """
        self._messages.append({"role": "user", "content": question})
        body = {"model": self.model, "messages": self._messages, **self._fields}
        chunks = self._client.stream(PATH, body)
        said: list[str] = []
        self.stopped = False
        try:
            for chunk in chunks:
                self._show(chunk, said)
        except KeyboardInterrupt:
            self.stopped = True
        except RequestError:
            self._messages.pop()
            raise
        finally:
            chunks.close()  # type: ignore[attr-defined]
            self._screen.end()
        self._messages.append({"role": "assistant", "content": "".join(said)})

    def _show(self, chunk: dict[str, Any], said: list[str]) -> None:
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                self._screen.think(thought)
            if text := delta.get("content"):
                self._screen.say(text)
                said.append(text)
            for call in delta.get("tool_calls") or ():
                asked = call.get("function") or {}
                self._screen.say((asked.get("name") or "") + (asked.get("arguments") or ""))

    def _command(self, name: str, rest: str) -> bool:
        match name:
            case "exit" | "quit":
                return False
            case "help":
                print(HELP)
            case "clear":
                self._begin(self._system)
            case "system":
                self._begin(rest.strip())
            case "set":
                field, equals, text = rest.strip().partition("=")
                if not (field and equals):
                    raise ConfigError("/set", rest, "it must be NAME=VALUE")
                self._fields[field] = sampling.value(text)
            case "retry":
                self._retry()
            case _:
                raise ConfigError(f"/{name}", rest, "there is no such command; /help names them")
        return True

    def _retry(self) -> None:
        if len(self._messages) < 2 or self._messages[-1]["role"] != "assistant":
            raise ConfigError("/retry", "", "nothing was asked yet")
        del self._messages[-1]
        self.answer(self._messages.pop()["content"])

    def _begin(self, system: str) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []
