"""`penstock keys`: make the key file for links between hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.services.links.curve import new_keys, write_keys
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

NEXT = """\
Wrote new link keys to {path}, which its owner alone can read.
Copy it to each host of the deployment, for the user that runs Penstock there and nobody else, and give every process
  --link-keys {path}
along with --scheduler-address, --tokenizer-address or --rendezvous. Whoever has this file can join the deployment;
processes that have other keys are refused. To change the keys: make others with --force, copy them, restart all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to write")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Write keys, and print the next steps but never a key. Raises ConfigError for a file that exists or cannot be
    written."""
    del effective
    path = Path(namespace.file).absolute()
    write_keys(path, new_keys(), force=namespace.force)
    print(NEXT.format(path=path))
    return ExitCode.ORDERLY
