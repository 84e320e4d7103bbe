"""Where the store of KV blocks is that servers share: mooncake://MASTER:PORT?NAME=VALUE&...

Names and values are those of Mooncake's own configuration. `mooncake://` alone means the JSON file that
MOONCAKE_CONFIG_PATH names, as Mooncake's tools have it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.protocol.errors import ConfigError

OPTION = "--kv-store"
FORM = "it must be mooncake://HOST:PORT of a Mooncake master, perhaps with ?protocol=rdma&device_name=mlx5_0"
CONFIG_PATH = "MOONCAKE_CONFIG_PATH"
HOST = r"\[[0-9a-fA-F:.]+\]|[^][\s:/?#@]+"
URL = re.compile(rf"mooncake://(?P<master>(?:{HOST}):(?P<port>[0-9]{{1,5}}))?/?(?:\?(?P<settings>[^#]*))?")
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", re.IGNORECASE)
PROTOCOLS = ("tcp", "rdma")
MOST_BYTES = 1 << 50


class MooncakeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Mooncake's client is set up with."""

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"  # clients tell one another: no server is needed
    protocol: str = "tcp"
    device_name: str = ""  # of RDMA; empty: Mooncake chooses
    local_hostname: str = ""  # under which others reach this host; empty: the address by which it reaches the master
    global_segment_size: int | str = "4gb"  # of this host's memory that each executor adds to the store
    local_buffer_size: int | str = "16mb"  # Mooncake's own; blocks do not go through it

    @property
    def segment_bytes(self) -> int:
        return bytes_of(self.global_segment_size)

    @property
    def buffer_bytes(self) -> int:
        return bytes_of(self.local_buffer_size)


def store_bytes(url: str) -> int:
    """The host's memory that each executor's client of the store takes; 0 without a store. Raises ConfigError."""
    if not url:
        return 0
    settings = read_store(url)
    return settings.segment_bytes + settings.buffer_bytes


def read_store(url: str, environ: Mapping[str, str] = os.environ) -> MooncakeSettings:
    """The settings that --kv-store names. Raises ConfigError."""
    match = URL.fullmatch(url)
    if match is None or int(match["port"] or 1) not in range(1, 1 << 16):
        raise ConfigError(OPTION, url, FORM)
    given: dict[str, object] = {}
    for setting in filter(None, (match["settings"] or "").split("&")):
        name, _, given[name] = setting.partition("=")
    if match["master"]:
        given["master_server_address"] = match["master"]
    else:
        given = read_file(url, environ) | given
    try:
        found = msgspec.convert(given, MooncakeSettings)
        sizes = found.segment_bytes, found.buffer_bytes
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(OPTION, url, f"{error}; known are {', '.join(MooncakeSettings.__struct_fields__)}") from None
    if found.protocol not in PROTOCOLS:
        raise ConfigError(OPTION, url, f"protocol is {found.protocol!r}, and must be one of {', '.join(PROTOCOLS)}")
    if max(sizes) > MOST_BYTES:
        raise ConfigError(OPTION, url, f"a size is {max(sizes)}, and may be {MOST_BYTES} at most")
    return found


def read_file(url: str, environ: Mapping[str, str]) -> dict[str, object]:
    path = environ.get(CONFIG_PATH, "")
    if not path:
        raise ConfigError(OPTION, url, f"{FORM}; without one, {CONFIG_PATH} must name a file of Mooncake's settings")
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(OPTION, url, f"{CONFIG_PATH}={path}: {error}") from None


def bytes_of(size: int | str) -> int:
    """As Mooncake writes it: 4gb, 512 MB, 1024. Raises ValueError."""
    match = SIZE.fullmatch(str(size).strip())
    if match is None:
        raise ValueError(f"{size!r} is no size such as 4gb")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))
