"""`penstock collect-env`: the environment, for a bug report: what torch's own collect_env finds, versions, options and
variables. No keys, passwords or tokens."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from penstock.protocol.config import fields
from penstock.protocol.version import VERSION
from penstock.services.supervisor.options import Effective
from penstock.services.supervisor.process import ExitCode

TORCH = "import torch.utils.collect_env; torch.utils.collect_env.main()"
VARIABLES = re.compile(r"(PENSTOCK|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|NCCL|HF|TRANSFORMERS|XDG_CACHE)(_|\Z)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|COOKIE")
ADDRESS = re.compile(r"://[^/@\s]*@")  # a user and a password in a URL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Print the environment."""
    print(f"penstock {VERSION} in {Path(__file__).absolute().parents[2]}", flush=True)
    subprocess.run((sys.executable, "-c", TORCH), check=False)  # the import may fail, and must hold no GPU here
    for title, lines in (("Packages", packages()), ("Options given", options(effective)),
                         ("Environment", variables(os.environ))):  # fmt: skip
        print(f"\n{title}:", *lines, sep="\n  ")
    return ExitCode.ORDERLY


def packages() -> Iterator[str]:
    """The versions of Penstock's dependencies."""
    for line in requires("penstock") or ():
        if "extra ==" not in line:
            name = re.split(r"[^\w.\-]", line, maxsplit=1)[0]
            try:
                yield f"{name}=={version(name)}"
            except PackageNotFoundError:
                yield f"{name} is missing"


def options(effective: Effective) -> Iterator[str]:
    """The options that were given and their origin; secret ones without their value."""
    for field in fields():
        if (origin := effective.origins.get(field.name)) is not None:
            value = getattr(getattr(effective.config, field.section), field.name)
            yield f"{field.flag} {hidden(str(value), secret=field.option.secret)} ({origin})"


def variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that affect Penstock or its libraries."""
    for name in sorted(environ):
        if VARIABLES.match(name):
            yield f"{name}={hidden(environ[name], secret=bool(SECRET.search(name)))}"


def hidden(text: str, *, secret: bool) -> str:
    return "(set and not shown)" if secret else ADDRESS.sub("://***@", text)
