"""A client of an OpenAI-compatible server, for commands: one request at a time, whole or as a stream of events.

Source: OpenAI API reference; the stream is `text/event-stream` of the HTML standard, data lines alone.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.protocol.errors import REQUEST_ERRORS, ConfigError, EngineFailure, LinkError, Overloaded, RequestError

TIMEOUT = 600.0  # seconds without a byte
DONE = b"[DONE]"
BODY = msgspec.json.Decoder(dict[str, Any])


class Answer(msgspec.Struct, frozen=True):
    """A whole response; `body` is what came, decoded as far as it is a JSON object."""

    status: int
    body: dict[str, Any]
    request_id: str
    retry_after: float | None


class Client:
    """One kept connection. Not for several threads."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises ConfigError for a URL that is neither http nor https."""
        wrong = ConfigError("--url", url, "it must be http://HOST:PORT or https://HOST:PORT")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, port, timeout=TIMEOUT)

    def ask(self, path: str, body: Mapping[str, Any] | bytes | None = None) -> Answer:
        """The answer of a request, whatever its status: POST with a body, GET without.

        Raises LinkError when the server cannot be reached or goes away.
        """
        response = self._send(path, body)
        data = self._read(response)
        wait = response.headers.get("Retry-After", "")
        return Answer(
            response.status, decoded(data), response.headers.get("X-Request-Id", ""),
            float(wait) if wait.replace(".", "", 1).isdigit() else None,
        )  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        """The body of a good answer. Raises RequestError for any other, LinkError."""
        answer = self.ask(path)
        if answer.status != 200:
            raise refusal(answer)
        return answer.body

    def text(self, path: str) -> str:
        """A good answer that is no JSON. Raises RequestError for any other, LinkError."""
        response = self._send(path, None)
        data = self._read(response)
        if response.status != 200:
            raise refusal(Answer(response.status, decoded(data), "", None))
        return data.decode(errors="replace")

    def model(self) -> str:
        """The first model that the server lists."""
        listed = self.get("/v1/models").get("data") or [{}]
        return str(listed[0].get("id", ""))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer. Closed early, the server hears of it and aborts the request.

        Raises RequestError when it is refused or an event says that it failed, LinkError.
        """
        response = self._send(path, {**body, "stream": True})
        if response.status != 200:
            raise refusal(Answer(response.status, decoded(self._read(response)), "", None))
        ended = False
        try:
            while line := self._line(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == DONE:
                    ended = True
                    self._read(response)
                    return
                chunk = decoded(data)
                if chunk.get("error"):
                    raise refusal(Answer(500, chunk, "", None))
                yield chunk
            raise LinkError(f"{self.url} ended the stream before its end")
        finally:
            if not ended:
                self.close()

    def close(self) -> None:
        """End the connection; the next request opens another."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, path: str, body: Mapping[str, Any] | bytes | None) -> http.client.HTTPResponse:
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        method = "GET" if data is None else "POST"
        # RFC 9112, 9.3.1: a server may close a kept connection just when it is used; a second attempt is due then.
        for last in (False, True):
            fresh = self._connection.sock is None
            try:
                self._connection.request(method, self._path + path, data, self._headers)
                return self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last or fresh or isinstance(error, TimeoutError):
                    raise LinkError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        raise AssertionError("the second attempt returns or raises")

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise LinkError(f"{self.url} went away: {error or type(error).__name__}") from error

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise LinkError(f"{self.url} went away: {error or type(error).__name__}") from error


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object; what is none stands under `message`."""
    try:
        return BODY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"message": data[:500].decode(errors="replace")}


def refusal(answer: Answer) -> RequestError:
    """The error that a server answered with."""
    found = answer.body.get("error")
    fields = found if isinstance(found, dict) else answer.body
    message = str(fields.get("message") or f"the server answered {answer.status}")
    if answer.status == 429:
        return Overloaded(message, retry_after=answer.retry_after or 1.0)
    kind = REQUEST_ERRORS.get(answer.status, EngineFailure)
    error = kind(message)
    error.param, error.code = fields.get("param"), fields.get("code")
    return error
