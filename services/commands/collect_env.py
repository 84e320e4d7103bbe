"""`penstock collect-env`: the environment, for a bug report. No keys, passwords or tokens."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import msgspec

from penstock.protocol.config import fields
from penstock.protocol.version import VERSION
from penstock.services.commands.progress import fitted
from penstock.services.supervisor.options import Effective, usable_cores
from penstock.services.supervisor.process import ExitCode

GPU_QUERY = "index,name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current,ecc.mode.current"
VARIABLES = re.compile(r"(PENSTOCK|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|NCCL|HF|TRANSFORMERS|XDG_CACHE)(_|\Z)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|AUTH|CREDENTIAL|COOKIE")
ADDRESS = re.compile(r"://[^/@\s]*@")  # a user and a password in a URL
LIMIT = 60.0  # seconds that another program may take
TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
                  "threads": torch.get_num_threads(), "arch": torch.cuda.get_arch_list()}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def command(namespace: argparse.Namespace, effective: Effective) -> int:
    """Print the environment; unavailable entries say so."""
    found = environment(effective, os.environ)
    if namespace.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
        return ExitCode.ORDERLY
    for title, entries in found.items():
        print(f"{title}:")
        for name, value in entries.items():
            print(fitted(f"  {name}: {value}"))
        print()
    return ExitCode.ORDERLY


def environment(effective: Effective, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Everything, by section."""
    return {
        "penstock": {"version": VERSION, "place": str(Path(__file__).absolute().parents[2])},
        "python": {"version": sys.version.replace("\n", " "), "executable": sys.executable, "prefix": sys.prefix},
        "system": system(),
        "gpu": gpus(),
        "torch": torch(),
        "packages": packages(),
        "options given": options(effective),
        "environment": variables(environ),
    }


def system() -> dict[str, str]:
    memory = words_of(Path("/proc/meminfo"), "MemTotal", "MemAvailable")
    processor = words_of(Path("/proc/cpuinfo"), "model name", "flags")
    flags = [word for word in processor.pop("flags", "").split() if word.startswith(("avx", "amx"))]
    return {
        "os": release(),
        "kernel": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "processor": processor.get("model name", platform.machine()),
        "vector units": " ".join(flags) or "none known",
        "cores": f"{os.cpu_count()}, usable {usable_cores()}",
        **memory,
        "open files": " ".join(map(str, limits())),
        "temporary directory free": f"{shutil.disk_usage('/tmp').free >> 20} MiB",
    }


def limits() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)


def release() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def words_of(path: Path, *names: str) -> dict[str, str]:
    """The first `name: value` lines of a file in /proc."""
    found: dict[str, str] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            found.setdefault(name.strip(), value.strip())
    return found


def gpus() -> dict[str, str]:
    """The driver's figures for each GPU."""
    printed = output_of("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    if not printed:
        return {"gpus": "none: nvidia-smi is missing or found none"}
    found = dict(enumerate(printed.splitlines()))
    topology = output_of("nvidia-smi", "topo", "-m") if len(found) > 1 else ""
    return {f"gpu {index}": line for index, line in found.items()} | ({"topology": topology} if topology else {})


def torch() -> dict[str, str]:
    """torch's version and build, from a process of its own: the import may fail, and must not hold a GPU here."""
    printed = output_of(sys.executable, "-c", TORCH)
    if not printed:
        return {"torch": "it cannot be imported"}
    answer: dict[str, object] = msgspec.json.decode(printed.splitlines()[-1])
    return {name: str(value) for name, value in answer.items()}


def packages() -> dict[str, str]:
    """The versions of Penstock's dependencies."""
    try:
        lines = requires("penstock") or []
    except PackageNotFoundError:
        lines = []
    names = [re.split(r"[^\w.\-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    found = {}
    for name in names or ["torch", "triton", "transformers", "pyzmq", "msgspec", "uvicorn", "llguidance"]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def options(effective: Effective) -> dict[str, str]:
    """The options that were given and their origin; secret ones without their value."""
    found = {}
    for field in fields():
        origin = effective.origins.get(field.name)
        if origin is not None:
            value = getattr(getattr(effective.config, field.section), field.name)
            shown = "set and not shown" if field.option.secret else ADDRESS.sub("://***@", str(value))
            found[field.flag] = f"{shown} ({origin})"
    return found or {"options": "none"}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that affect Penstock or its libraries."""
    found = {}
    for name in sorted(environ):
        if VARIABLES.match(name):
            found[name] = "set and not shown" if SECRET.search(name) else ADDRESS.sub("://***@", environ[name])
    return found or {"variables": "none that matter"}


def output_of(*words: str) -> str:
    """The output of another program; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
