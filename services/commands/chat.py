"""`penstock chat`: a conversation with a server's model in the terminal, or one question through a pipe; and `penstock
complete`: the model's continuation of a text, without a chat template."""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import msgspec

from penstock.protocol.errors import ConfigError, RequestError
from penstock.services.commands.client import Client, add_server_arguments, server_client
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
COMPLETION_TOKENS = 256  # by default: a text has no natural end
HELP = """/system TEXT  set the system prompt; forgets the conversation
/clear        forget the conversation
/image FILE   show a picture with the next question
/retry        another answer to the last question
/set N=VALUE  a field of the requests from now on, such as temperature=0.2
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("-p", "--prompt", help="ask this, print the answer, and exit; input from a pipe is appended")
    parser.add_argument("--system", default="", help="the system prompt")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", dest="pictures",
                        help="show this picture with the first question; may be repeated")  # fmt: skip
    add_request_arguments(parser)


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Answer one question or hold a conversation; the exit code."""
    question = piped(namespace.prompt, sys.stdin)
    if question == "":
        raise ConfigError("--prompt", namespace.prompt, "there is nothing to ask: give a question, or pipe one in")
    fields = request_fields(namespace)
    with server_client(namespace, effective) as client:
        talk = Conversation(client, Screen(sys.stdout), namespace.system, fields)
        for name in namespace.pictures:
            talk.show("--image", name)
        if question is not None:
            talk.answer(question)
            return ExitCode.FAILED if talk.stopped else ExitCode.ORDERLY
        print(f"{talk.model} at {client.url}; /help tells more", file=sys.stderr)
        try:
            import readline  # noqa: F401 (it gives `input` a history)
        except ImportError:
            print("lines cannot be edited here", file=sys.stderr)
        for line in lines("> "):
            if not talk.take(line):
                break
    return ExitCode.ORDERLY


def add_complete_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("-p", "--prompt", help="complete this text and exit; input from a pipe is appended")
    parser.add_argument("--show-prompt", action="store_true", help="print the text in front of its completion")
    add_request_arguments(parser)


def complete_command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Complete one text, or each typed line; the exit code."""
    text = piped(namespace.prompt, sys.stdin)
    if text == "":
        raise ConfigError("--prompt", namespace.prompt, "there is nothing to complete: give a text, or pipe one in")
    fields = {"max_tokens": COMPLETION_TOKENS, "echo": namespace.show_prompt, **request_fields(namespace)}
    with server_client(namespace, effective) as client:
        fields = {"model": client.model(), **fields}
        if text is not None:
            return ExitCode.FAILED if complete(client, text, fields) else ExitCode.ORDERLY
        print(f"{fields['model']} at {client.url}; each line is a text to go on from, Ctrl-D ends", file=sys.stderr)
        for line in lines("> "):
            try:
                complete(client, line, fields)
            except RequestError as error:
                print(f"penstock: {error}", file=sys.stderr)
    return ExitCode.ORDERLY


def complete(client: Client, text: str, fields: dict[str, Any]) -> bool:
    """Print the continuation of `text`; whether Ctrl-C ended it. Raises RequestError."""
    screen = Screen(sys.stdout)
    try:
        with closing(client.stream("/v1/completions", {"prompt": text, **fields})) as chunks:
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    screen.say(choice.get("text") or "")
    except KeyboardInterrupt:
        return True
    finally:
        screen.end()
    return False


class Conversation:
    """Its messages and the fields of its requests."""

    def __init__(self, client: Client, screen: Screen, system: str, fields: dict[str, Any]) -> None:
        self.model = client.model()
        self.stopped = False  # Ctrl-C cut the last answer off
        self._client = client
        self._screen = screen
        self._fields = fields
        self._messages: list[dict[str, Any]] = []
        self._pictures: list[dict[str, Any]] = []  # of the next question
        self._begin(system)

    def take(self, line: str) -> bool:
        """Handle a typed line; False to leave. An error is printed, and the conversation goes on."""
        try:
            if line.startswith("/"):
                return self._command(*line[1:].partition(" ")[::2])
            self.answer(line)
        except (RequestError, ConfigError) as error:
            self._screen.end()
            print(f"penstock: {error}", file=sys.stderr)
        return True

    def show(self, option: str, name: str) -> None:
        """Put the picture of a file to the next question. Raises ConfigError where it cannot be read."""
        try:
            data = Path(name).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            raise ConfigError(option, name, f"it must be a file with a picture: {error}") from error
        url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"  # its name may say a wrong type
        self._pictures.append({"type": "image_url", "image_url": {"url": url}})

    def answer(self, question: str | list[dict[str, Any]]) -> None:
        """Print the answer as it arrives. Ctrl-C ends it and keeps the beginning.

        Raises RequestError; the question is then forgotten, its pictures as well.
        """
        if self._pictures and isinstance(question, str):
            question = [*self._pictures, {"type": "text", "text": question}]
        self._pictures = []
        self._messages.append({"role": "user", "content": question})
        body = {"model": self.model, "messages": self._messages, **self._fields}
        said: list[str] = []
        self.stopped = False
        try:
            with closing(self._client.stream("/v1/chat/completions", body)) as chunks:
                for chunk in chunks:
                    self._show(chunk, said)
        except KeyboardInterrupt:
            self.stopped = True
        except RequestError:
            self._messages.pop()
            raise
        finally:
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
                function = call.get("function") or {}
                self._screen.say((function.get("name") or "") + (function.get("arguments") or ""))

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
                self._fields[field] = json_or_text(text)
            case "image":
                self.show("/image", rest.strip())
            case "retry":
                if len(self._messages) < 2 or self._messages[-1]["role"] != "assistant":
                    raise ConfigError("/retry", "", "nothing was asked yet")
                del self._messages[-1]
                self.answer(self._messages.pop()["content"])
            case _:
                raise ConfigError(f"/{name}", rest, "there is no such command; /help names them")
        return True

    def _begin(self, system: str) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []


class Screen:
    """Prints an answer piece by piece. Reasoning is dim on a terminal, and left out of a pipe's output."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._thinking = False
        self._last = "\n"

    def say(self, text: str) -> None:
        if self._thinking:
            self._thinking = False
            self._out.write(f"{PLAIN}\n")
        self._write(text)

    def think(self, text: str) -> None:
        if not self._terminal:
            return
        if not self._thinking:
            self._thinking = True
            self._out.write(DIM)
        self._write(text)

    def end(self) -> None:
        """The answer is over; start the next line."""
        if self._thinking:
            self._thinking = False
            self._out.write(PLAIN)
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._out.write(text)
            self._out.flush()


def lines(prompt: str, read: Callable[[str], str] = input) -> Iterator[str]:
    """The typed lines; one that ends with a backslash continues. Ctrl-C drops the line, Ctrl-D ends."""
    while True:
        try:
            line = read(prompt)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + read("… ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def piped(given: str | None, source: TextIO) -> str | None:
    """The only question of a command: --prompt, standard input if it is a pipe, or both; None for a conversation."""
    text = "" if source.isatty() else source.read()
    parts = [part for part in (given, text.rstrip("\n")) if part]
    if not parts and source.isatty():
        return None
    return "\n\n".join(parts)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's own")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    help_of_set = "any other field of the request, its value in JSON or as text; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="fields", help=help_of_set)


def request_fields(namespace: argparse.Namespace) -> dict[str, Any]:
    """The request fields in the options. Raises ConfigError for a --set without a value."""
    options = {"temperature": namespace.temperature, "max_tokens": namespace.max_tokens}
    found: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for word in namespace.fields:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ConfigError("--set", word, "it must be NAME=VALUE")
        found[name] = json_or_text(text)
    return found


def json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
