"""`penstock complete`: what a server's model writes after a text, without a chat template."""

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

PATH = "/v1/completions"
MAX_TOKENS = 256  # unless told otherwise: a text has no natural end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument("-p", "--prompt", help="go on from this, end; what is piped in comes after it")
    parser.add_argument("--show-prompt", action="store_true", help="print the text in front of what follows it")
    sampling.add_arguments(parser)


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Complete one text, or each line that is typed; the exit code."""
    text = terminal.piped(namespace.prompt, sys.stdin)
    if text == "":
        raise ConfigError("--prompt", "", "there is nothing to complete: neither a prompt nor anything piped in")
    fields = {"max_tokens": MAX_TOKENS, "echo": namespace.show_prompt, **sampling.fields(namespace)}
    with target.reached(namespace, effective) as found, found.client() as client:
        fields = {"model": client.model(), **fields}
        if text is not None:
            return ExitCode.FAILED if complete(client, text, fields) else ExitCode.ORDERLY
        print(f"{fields['model']} at {client.url}; each line is a text to go on from, Ctrl-D ends", file=sys.stderr)
        for line in terminal.lines("> "):
            try:
                complete(client, line, fields)
            except RequestError as error:
                print(f"penstock: {error}", file=sys.stderr)
    return ExitCode.ORDERLY


def complete(client: Client, text: str, fields: dict[str, Any]) -> bool:
    """Show what follows `text`; whether Ctrl-C ended it. Raises RequestError."""
    screen = Screen(sys.stdout)
    chunks = client.stream(PATH, {"prompt": text, **fields})
    try:
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                screen.say(choice.get("text") or "")
    except KeyboardInterrupt:
        return True
    finally:
        chunks.close()  # type: ignore[attr-defined]
        screen.end()
    return False
