"""Where a shared store is, as operators say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.kv_store import MooncakeSettings, bytes_of, read_store


def test_a_master_alone() -> None:
    found = read_store("mooncake://10.0.0.1:50051")
    assert found == MooncakeSettings("10.0.0.1:50051")
    assert (found.metadata_server, found.protocol) == ("P2PHANDSHAKE", "tcp")
    assert (found.segment_bytes, found.buffer_bytes) == (4 << 30, 16 << 20)
    assert read_store("mooncake://[::1]:50051").master_server_address == "[::1]:50051"


def test_settings_have_mooncakes_names() -> None:
    found = read_store(
        "mooncake://kv:1?protocol=rdma&device_name=mlx5_0&global_segment_size=0&local_hostname=h1"
        "&metadata_server=http://kv:8080/metadata"
    )
    assert (found.protocol, found.device_name, found.segment_bytes, found.local_hostname, found.metadata_server) == (
        "rdma", "mlx5_0", 0, "h1", "http://kv:8080/metadata",
    )  # fmt: skip


def test_mooncakes_own_file(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "kv:1", "protocol": "rdma", "global_segment_size": 1073741824}')
    environ = {"MOONCAKE_CONFIG_PATH": str(path)}
    assert read_store("mooncake://", environ) == MooncakeSettings("kv:1", protocol="rdma", global_segment_size=1 << 30)
    assert read_store("mooncake://?protocol=tcp", environ).protocol == "tcp", "the option is nearer"
    for text in ("[", "[]", '{"protocol": "tcp"}', '{"master_server_address": 1}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--kv-store"):
            read_store("mooncake://", environ)
    path.unlink()
    with pytest.raises(ConfigError, match=f"MOONCAKE_CONFIG_PATH={path}.*No such file"):
        read_store("mooncake://", environ)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kv:50051", "it must be mooncake://HOST:PORT of a Mooncake master"),
        ("redis://kv:1", "it must be mooncake://HOST:PORT"),
        ("mooncake://kv", "it must be mooncake://HOST:PORT"),
        ("mooncake://kv:99999", "it must be mooncake://HOST:PORT"),
        ("mooncake://kv:0", "it must be mooncake://HOST:PORT"),
        ("mooncake://user@kv:1", "it must be mooncake://HOST:PORT"),
        ("mooncake://kv:1/path", "it must be mooncake://HOST:PORT"),
        ("mooncake://", "MOONCAKE_CONFIG_PATH must name a file"),
        ("mooncake://kv:1?segment=4gb", "unknown field `segment`; known are master_server_address, metadata_server"),
        ("mooncake://kv:1?protocol=carrier", "protocol is 'carrier', and must be one of tcp, rdma"),
        ("mooncake://kv:1?global_segment_size=much", "'much' is no size such as 4gb"),
        ("mooncake://kv:1?global_segment_size=9999tb", "a size is 10994016766132224, and may be 1125899906842624"),
    ],
)
def test_what_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_store(url, {})


def test_sizes() -> None:
    assert [bytes_of(size) for size in (7, "7", "1k", "1.5 KB", "2gb", "3T", "8b")] == [
        7, 7, 1024, 1536, 2 << 30, 3 << 40, 8,
    ]  # fmt: skip
