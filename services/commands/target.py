"""The server that a command talks to: one that runs, or one that is started for it and ends with it."""

from __future__ import annotations

import argparse
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, LinkError
from penstock.protocol.option import words
from penstock.services.commands.client import Client
from penstock.services.llm.launcher_process import LauncherProcess
from penstock.services.supervisor.options import Effective

DEFAULT = "http://127.0.0.1:8000"
QUIET = "warning"


class Target(msgspec.Struct, frozen=True):
    """Where requests go."""

    url: str
    api_key: str

    def client(self) -> Client:
        """A connection of its own."""
        return Client(self.url, self.api_key)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="server to talk to, with --api-key or $PENSTOCK_API_KEY if it asks "
                        f"for one; without it and without a MODEL: {DEFAULT} if something answers there, else the "
                        "embedded model is started")  # fmt: skip


@contextmanager
def reached(namespace: argparse.Namespace, effective: Effective) -> Iterator[Target]:
    """The server, ready. Raises ConfigError, and what a server that was started for it failed with."""
    key = next(iter(words(effective.config.api.api_key)), "")
    named = "model" in effective.origins  # an empty name is that of the embedded model
    if namespace.url and named:
        model = effective.config.model.model
        raise ConfigError("--url", namespace.url, f"the command line also names a model to start, {model!r}")
    if namespace.url or (not named and answers(Client(DEFAULT, key))):
        yield Target(namespace.url or DEFAULT, key)
        return
    config = quiet(effective)
    print(f"starting {config.model.model or 'the embedded model'} …", file=sys.stderr, flush=True)
    with started(config) as url:
        yield Target(url, key)


def answers(client: Client) -> bool:
    """Whether a server is there, locked or not."""
    try:
        with client:
            return client.ask("/v1/models").status in (200, 401, 403)
    except LinkError:
        return False


def quiet(effective: Effective) -> Config:
    """The configuration of a server whose log would stand between questions and answers, unless it is wanted."""
    config = effective.config
    if "log_level" in effective.origins:
        return config
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, log_level=QUIET))


@contextmanager
def started(config: Config) -> Iterator[str]:
    """`penstock serve` on a free port of this machine, once it is ready; its URL. Raises what it failed with."""
    free = msgspec.structs.replace(config.api, host="127.0.0.1", port=0, uds="")
    launcher = LauncherProcess(msgspec.structs.replace(config, api=free), "serve")
    try:
        while not launcher.ready:
            select.select([launcher.notices.fileno(), launcher.pidfd], [], [])
            launcher.poll()
            if launcher.failure is not None:
                raise launcher.failure
        yield launcher.url
    finally:
        launcher.end()
