"""A process shut in as a unit of `deploy/systemd` says: the system calls, address families and memory that systemd
would let it have. Run as a program it shuts itself in and becomes another one.

Sources: systemd.exec(5), RestrictAddressFamilies, SystemCallFilter, MemoryDenyWriteExecute; seccomp(2); prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 22, 2, 38, 65
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # what a filter returns; the errno is added to the latter
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
X86_64 = 0xC000003E
SOCKET = 41  # socket(2) there
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")
Code = list[tuple[int, int, int, int]]


def confinement(service: Mapping[str, Sequence[str]]) -> list[str]:
    """The command before a unit's own that shuts it in; none where this machine cannot."""
    if platform.machine() != "x86_64":
        return []
    rules = {
        "families": [getattr(socket, name) for name in service["RestrictAddressFamilies"][0].split()],
        "calls": calls(service["SystemCallFilter"][0]),
        "closed": service.get("MemoryDenyWriteExecute", ["no"]) == ["yes"],
    }
    return [sys.executable, str(Path(__file__)), json.dumps(rules)]


@cache
def calls(group: str) -> list[int]:
    """The numbers of a group's calls, those of its groups included; empty, for all, where nobody knows them here."""
    header = next((Path(path) for path in HEADERS if Path(path).is_file()), None)
    if header is None or shutil.which("systemd-analyze") is None:
        return []
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    return sorted(numbers[name] for name in names(group, groups()) if name in numbers)


def groups() -> dict[str, list[str]]:
    """What stands in each group: calls, and groups."""
    command = ["systemd-analyze", "syscall-filter", "--no-pager"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    group = ""
    for line in told.splitlines():
        if line.startswith("@"):
            group = line
            found[group] = []
        elif group and re.fullmatch(r" +@?[\w-]+", line):
            found[group].append(line.strip())
    return found


def names(group: str, known: Mapping[str, list[str]]) -> set[str]:
    found: set[str] = set()
    for word in known[group]:
        found |= names(word, known) if word.startswith("@") else {word}
    return found


def refuse(number: int) -> tuple[int, int, int, int]:
    return RETURN, 0, 0, REFUSE | number


def native() -> Code:
    return [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, X86_64), refuse(errno.EPERM)]


def only_calls(allowed: Sequence[int]) -> Code:
    listed = [line for number in allowed for line in ((EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW))]
    return [*native(), (LOAD, 0, 0, NUMBER), *listed, refuse(errno.EPERM)]


def only_families(allowed: Sequence[int]) -> Code:
    listed = [line for family in allowed for line in ((EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW))]
    of_sockets = [(LOAD, 0, 0, NUMBER), (EQUAL, 1, 0, SOCKET), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
    return [*native(), *of_sockets, *listed, refuse(errno.EAFNOSUPPORT)]


def shut_in(families: Sequence[int], calls: Sequence[int], closed: bool) -> None:
    """This process, from now on, and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if closed and libc.prctl(PR_SET_MDWE, 1, 0, 0, 0) != 0:
        assert ctypes.get_errno() == errno.EINVAL, "a kernel before 6.3 knows nothing of it"
    for code in [only_families(families), *([only_calls(calls)] if calls else [])]:
        lines = b"".join(struct.pack("HBBI", *line) for line in code)
        kept = ctypes.create_string_buffer(lines, len(lines))
        program = struct.pack("H6xQ", len(code), ctypes.addressof(kept))
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) == 0


if __name__ == "__main__":
    shut_in(**json.loads(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
