"""Where the api listens: an address, a file, TLS; and what a mistake in each says."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import AddressError, ConfigError
from penstock.protocol.validation import check
from penstock.services.http import server as listening
from penstock.services.supervisor import address
from penstock.services.supervisor.options import sized
from penstock.services.supervisor.process import ExitCode
from tests.services.client.fake_engine import LIMIT, silent
from tests.services.http.process import Tokenizer, api, start

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[Tokenizer]:
    made = Tokenizer(silent, tmp_path)
    yield made
    made.close()


def certificate(folder: Path, name: str, *, signer: str = "", password: str = "") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key, signed by `signer`'s or by itself."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    words += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    words += ["-out", str(certificate), *(["-passout", f"pass:{password}"] if password else ["-nodes"])]
    if signer:
        words += ["-CA", str(folder / f"{signer}.pem"), "-CAkey", str(folder / f"{signer}.key")]
        words += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(words, check=True, capture_output=True)
    return certificate, key


async def test_a_file_that_only_its_owner_may_use(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "api.sock"
    async with api(tmp_path, "--uds", str(file)) as process:
        assert process.url == f"unix:{file}"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(file))
        async with httpx.AsyncClient(timeout=LIMIT, transport=transport, base_url="http://local") as http:
            assert (await http.get("/health/ready")).status_code == 200
        second = await start(tmp_path, tmp_path / "second", "--uds", str(file), "--index", "1")
        assert await asyncio.wait_for(second.wait(), LIMIT) == ExitCode.ADDRESS
        process.signal()
        assert await process.ended() == ExitCode.ORDERLY
    assert not file.exists()
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]


@pytest.mark.parametrize(("mode", "bits"), [("owner", 0o600), ("group", 0o660), ("everybody", 0o666)])
def test_who_may_use_a_file_whatever_the_mask(tmp_path: Path, mode: str, bits: int) -> None:
    options = ApiConfig(uds=str(tmp_path / "s"), uds_mode=mode)
    before = os.umask(0)
    try:
        with listening.listen(options):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == bits
    finally:
        os.umask(before)


def test_a_file_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    options = ApiConfig(uds=str(tmp_path / "s"))
    with listening.listen(options) as first:
        first.listen()
        with pytest.raises(AddressError, match="another process"):
            listening.listen(options)
    with listening.listen(options) as second:
        second.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(options.uds)
    listening.remove_file(options)
    assert list(tmp_path.iterdir()) == []
    listening.remove_file(options)


def test_a_file_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    for path in (tmp_path / "text", tmp_path, tmp_path / "none" / "s", tmp_path / ("x" * 120)):
        with pytest.raises(AddressError) as caught:
            listening.listen(ApiConfig(uds=str(path)))
        assert caught.value.option == "--uds"
    assert (tmp_path / "text").read_text() == "mine"
    longest = tmp_path / ("x" * (address.MAX_UDS - len(os.fsencode(tmp_path)) - 1))
    listening.listen(ApiConfig(uds=str(longest))).close()


def test_one_process_listens_at_a_file() -> None:
    assert sized(Config(api=ApiConfig(uds="s")), 64).api.api_processes == 1
    with pytest.raises(ConfigError, match="one process"):
        check(Config(api=ApiConfig(uds="s", api_processes=2)))
    assert address.hold(ApiConfig(uds="s", api_processes=2, port=0)) is None


def test_a_dead_host_is_noticed() -> None:
    with listening.listen(ApiConfig(port=0)) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert listening.url_of(listener, ApiConfig()).startswith("http://127.0.0.1:")
        assert listening.url_of(listener, ApiConfig(ssl_certfile="c")).startswith("https://127.0.0.1:")


@needs_openssl
async def test_tls(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own, key = certificate(tmp_path, "server")
    async with api(tmp_path, "--ssl-certfile", str(own), "--ssl-keyfile", str(key)) as process:
        assert process.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(own))
        async with httpx.AsyncClient(timeout=LIMIT, verify=trusting) as http:
            assert (await http.get(process.url + "/version")).status_code == 200
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(own)
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with httpx.AsyncClient(timeout=LIMIT, verify=old) as http:
            assert (await http.get(process.url + "/version")).status_code == 200
        async with httpx.AsyncClient(timeout=LIMIT) as http:
            plain = process.url.replace("https", "http") + "/v1/models"
            for answer in (await http.get(plain), await http.post(plain, content=b"{}")):
                assert (answer.status_code, answer.headers["connection"]) == (400, "close")
                assert answer.json()["error"]["message"] == "this port speaks HTTPS, and http:// came"
                assert answer.json()["error"]["code"] == "https_required"


@needs_openssl
async def test_what_is_neither_gets_no_http(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own, key = certificate(tmp_path, "server")
    async with api(tmp_path, "--ssl-certfile", str(own), "--ssl-keyfile", str(key)) as process:
        for begins in (b"\0\0\0\0", b"ssh", b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(process.url.rpartition(":")[2]))
            writer.write(begins)
            writer.write_eof()
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), LIMIT)
            writer.close()


@needs_openssl
@pytest.mark.parametrize("demand", ["required", "optional"])
async def test_certificates_of_clients(tmp_path: Path, tokenizer: Tokenizer, demand: str) -> None:
    own, key = certificate(tmp_path, "server")
    signer, _ = certificate(tmp_path, "signer")
    member, member_key = certificate(tmp_path, "member", signer="signer")
    arguments = ("--ssl-certfile", own, "--ssl-keyfile", key, "--ssl-ca-certs", signer, "--ssl-cert-reqs", demand)
    async with api(tmp_path, *map(str, arguments)) as process:
        known, unknown = (ssl.create_default_context(cafile=str(own)) for _ in range(2))
        known.load_cert_chain(member, member_key)
        async with httpx.AsyncClient(timeout=LIMIT, verify=known) as http:
            assert (await http.get(process.url + "/version")).status_code == 200
        async with httpx.AsyncClient(timeout=LIMIT, verify=unknown) as http:
            if demand == "optional":
                assert (await http.get(process.url + "/version")).status_code == 200
            else:
                with pytest.raises(httpx.HTTPError):
                    await http.get(process.url + "/version")


@needs_openssl
def test_certificates_that_do_not_fit(tmp_path: Path) -> None:
    own, key = certificate(tmp_path, "server")
    _, other = certificate(tmp_path, "other")
    locked, locked_key = certificate(tmp_path, "locked", password="s3cret")
    joined = tmp_path / "joined.pem"
    joined.write_bytes(own.read_bytes() + key.read_bytes())
    assert listening.tls(ApiConfig()) is None
    assert listening.tls(ApiConfig(ssl_certfile=str(joined))) is not None
    options = {"ssl_certfile": str(locked), "ssl_keyfile": str(locked_key)}
    assert listening.tls(ApiConfig(**options, ssl_keyfile_password="s3cret")) is not None
    for wrong, flag in (
        ({"ssl_certfile": str(own), "ssl_keyfile": str(other)}, "--ssl-certfile"),
        ({"ssl_certfile": str(own)}, "--ssl-certfile"),
        (options, "--ssl-certfile"),
        (options | {"ssl_keyfile_password": "wrong"}, "--ssl-certfile"),
        ({"ssl_certfile": str(tmp_path / "none"), "ssl_keyfile": str(key)}, "--ssl-certfile"),
        ({"ssl_certfile": str(own), "ssl_keyfile": str(tmp_path / "none")}, "--ssl-keyfile"),
        ({"ssl_certfile": str(joined), "ssl_ca_certs": str(key)}, "--ssl-ca-certs"),
        ({"ssl_certfile": str(joined), "ssl_ca_certs": str(tmp_path / "none")}, "--ssl-ca-certs"),
    ):
        with pytest.raises(ConfigError) as caught:
            listening.tls(ApiConfig(**wrong))
        assert caught.value.option == flag
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("option", ["ssl_keyfile", "ssl_ca_certs"])
def test_parts_of_tls_need_a_certificate(option: str) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        check(Config(api=ApiConfig(**{option: "file"})))


async def test_keys_change_while_the_server_runs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """SIGHUP at once; a change by itself within a second or so."""
    file = tmp_path / "keys"
    file.write_text("one\n")
    async with api(tmp_path, "--api-key-file", str(file)) as process, httpx.AsyncClient(timeout=LIMIT) as http:

        async def opens(key: str) -> bool:
            answer = await http.get(process.url + "/version", headers={"authorization": f"Bearer {key}"})
            return answer.status_code == 200

        assert await opens("one")
        assert not await opens("two")
        file.write_text("two\n")
        async with asyncio.timeout(LIMIT):
            while not await opens("two"):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.05)
        assert not await opens("one")
        process.signal(signal.SIGHUP)
        async with asyncio.timeout(LIMIT):
            while process.log.read_text().count("api_keys_read") < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert process.process.returncode is None
        assert "two" not in process.log.read_text()


async def test_a_key_file_that_is_not_there_ends_the_process(tmp_path: Path) -> None:
    process = await start(tmp_path, tmp_path / "log", "--api-key-file", str(tmp_path / "none"))
    assert await asyncio.wait_for(process.wait(), LIMIT) == ExitCode.CONFIG
