"""`penstock bench start`: how long a server takes from its first process to readiness, several times in a row."""

from __future__ import annotations

import argparse
import time

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.services.commands.target import quiet, started
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="starts, one after the other [default 3]")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Start, measure and end a server so many times. The first start fills caches that the others find.

    Raises ConfigError, and what a server failed to start with.
    """
    if namespace.runs < 1:
        raise ConfigError("--runs", namespace.runs, "it must be at least 1")
    taken = []
    for number in range(1, namespace.runs + 1):
        taken.append(seconds(quiet(effective)))
        print(f"start {number}: ready after {taken[-1]:.2f} s", flush=True)
    print(f"fastest {min(taken):.2f} s, slowest {max(taken):.2f} s", flush=True)
    return ExitCode.ORDERLY


def seconds(config: Config) -> float:
    """From the start of the launcher to readiness."""
    began = time.monotonic()
    with started(config):
        return time.monotonic() - began
