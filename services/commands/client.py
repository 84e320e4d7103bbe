"""A client of an OpenAI-compatible server for commands, and the server it talks to: a running one, or one started for
the command.

Source: OpenAI API reference; the stream is `text/event-stream` of the HTML standard, data lines only.
"""

from __future__ import annotations

import argparse
import http.client
import select
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.protocol.config import Config, adjusted
from penstock.protocol.errors import REQUEST_ERRORS, ConfigError, EngineFailure, LinkError, Overloaded, RequestError
from penstock.protocol.option import words
from penstock.services.llm.launcher_process import LauncherProcess
from penstock.services.supervisor.options import Effective

DEFAULT_URL = "http://127.0.0.1:8000"
LOG_LEVEL = "warning"  # of a server started for a command
TIMEOUT = 600.0  # seconds without a byte
DONE = b"[DONE]"
BODY = msgspec.json.Decoder(dict[str, Any])


class Response(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    body: dict[str, Any]  # as far as it is a JSON object
    request_id: str = ""
    retry_after: float | None = None


class Client:
    """A server's URL and key. Every request has a connection of its own, so threads may share a client."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises ConfigError for a URL that is neither http nor https."""
        wrong = ConfigError("--url", url, "it must be http://HOST:PORT or https://HOST:PORT")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._address = parts.hostname or "", parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.api_key = api_key
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: Mapping[str, Any] | bytes | None = None) -> Response:
        """The response to a request, whatever its status: POST with a body, GET without.

        Raises LinkError when the server cannot be reached or goes away.
        """
        with self._open(path, body) as response:
            wait = response.headers.get("Retry-After", "")
            return Response(
                response.status, decoded(self._read(response)), response.headers.get("X-Request-Id", ""),
                float(wait) if wait.replace(".", "", 1).isdigit() else None,
            )  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path. Raises RequestError for any status but 200, LinkError."""
        response = self.ask(path)
        if response.status != 200:
            raise refusal(response)
        return response.body

    def text(self, path: str) -> str:
        """The text at a path. Raises RequestError for any status but 200, LinkError."""
        with self._open(path, None) as response:
            data = self._read(response)
        if response.status != 200:
            raise refusal(Response(response.status, decoded(data)))
        return data.decode(errors="replace")

    def model(self) -> str:
        """The first model that the server lists."""
        listed = self.get("/v1/models").get("data") or [{}]
        return str(listed[0].get("id", ""))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed response. Closing it early aborts the request.

        Raises RequestError when it is refused or an event reports an error, LinkError.
        """
        with self._open(path, {**body, "stream": True}) as response:
            if response.status != 200:
                raise refusal(Response(response.status, decoded(self._read(response))))
            while line := self._read(response, line=True):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == DONE:
                    return
                chunk = decoded(data)
                if chunk.get("error"):
                    raise refusal(Response(500, chunk))
                yield chunk
            raise LinkError(f"{self.url} ended the stream before its end")

    def _open(self, path: str, body: Mapping[str, Any] | bytes | None) -> http.client.HTTPResponse:
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        connection = self._kind(*self._address, timeout=TIMEOUT)
        try:
            connection.request("GET" if data is None else "POST", self._path + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise LinkError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        if connection.sock is not None:
            connection.sock.close()  # with the response, which now owns it
        return response

    def _read(self, response: http.client.HTTPResponse, *, line: bool = False) -> bytes:
        try:
            return response.readline() if line else response.read()
        except (OSError, http.client.HTTPException) as error:
            raise LinkError(f"{self.url} went away: {error or type(error).__name__}") from error


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object; anything else becomes its `message`."""
    try:
        return BODY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": data[:500].decode(errors="replace")}


def refusal(response: Response) -> RequestError:
    """The error in a response."""
    found = response.body.get("error")
    fields = found if isinstance(found, dict) else response.body
    message = str(fields.get("message") or f"the server answered {response.status}")
    if response.status == 429:
        return Overloaded(message, retry_after=response.retry_after or 1.0)
    error = REQUEST_ERRORS.get(response.status, EngineFailure)(message)
    error.param, error.code = fields.get("param"), fields.get("code") or error.code
    return error


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="", help="server to talk to, with --api-key or $PENSTOCK_API_KEY if it asks "
                        f"for one; without it and without a MODEL: {DEFAULT_URL} if something answers there, else the "
                        "embedded model is started")  # fmt: skip


@contextmanager
def server_client(namespace: argparse.Namespace, effective: Effective) -> Iterator[Client]:
    """A client of the server, which is ready. Raises ConfigError, and the error that a server failed to start with."""
    key = first_key(effective)
    named = "model" in effective.origins  # an empty name is that of the embedded model
    if namespace.url and named:
        model = effective.config.model.model
        raise ConfigError("--url", namespace.url, f"the command line also names a model to start, {model!r}")
    client = Client(namespace.url or DEFAULT_URL, key)
    if namespace.url or (not named and answers(client)):
        yield client
        return
    config = quiet(effective)
    print(f"starting {config.model.model or 'the embedded model'} …", file=sys.stderr, flush=True)
    with started(config) as url:
        yield Client(url, key)


def first_key(effective: Effective) -> str:
    return next(iter(words(effective.config.api.api_key)), "")


def answers(client: Client) -> bool:
    """Whether a server is there, locked or not."""
    try:
        return client.ask("/v1/models").status in (200, 401, 403)
    except LinkError:
        return False


def quiet(effective: Effective) -> Config:
    """The configuration with a log that stays out of the command's output, unless a level was given."""
    config = effective.config
    if "log_level" in effective.origins:
        return config
    return adjusted(config, log_level=LOG_LEVEL)


@contextmanager
def started(config: Config) -> Iterator[str]:
    """The URL of `penstock serve` on a free port of this machine, once it is ready. Raises its error if it fails."""
    launcher = LauncherProcess(adjusted(config, host="127.0.0.1", port=0, uds=""), "serve")
    try:
        while not launcher.ready:
            select.select([launcher.notices.fileno(), launcher.pidfd], [], [])
            launcher.poll()
            if launcher.failure is not None:
                raise launcher.failure
        yield launcher.url
    finally:
        launcher.end()
