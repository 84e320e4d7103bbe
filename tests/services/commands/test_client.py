"""The client of the commands against answers of every kind, good and bad."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.protocol.errors import (
    ConfigError,
    EngineFailure,
    InvalidRequest,
    LinkError,
    Overloaded,
    RequestError,
    Unauthorized,
)
from penstock.services.commands.client import Client, Response, decoded, refusal
from tests.e2e.server import Server


@contextmanager
def replying(*answers: bytes, close: bool = True) -> Iterator[str]:
    """A server that gives one answer per connection, whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as asked:
                    size = 0
                    while (line := asked.readline()).strip():
                        name, _, value = line.partition(b":")
                        size = int(value) if name.lower() == b"content-length" else size
                    asked.read(size)  # what is left unread would reset the connection
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def stream(*events: str) -> bytes:
    body = "".join(f"data: {event}\n\n" for event in events)
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: hello\n{body}".encode()


def test_a_server_answers_whole_and_streamed(server: Server) -> None:
    client = Client(server.url, "open")
    assert client.model() == "penstock-demo"
    body = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = client.ask("/v1/completions", body)
    assert (answer.status, bool(answer.request_id)) == (200, True)
    texts = [chunk["choices"][0]["text"] for chunk in client.stream("/v1/completions", body)]
    assert "".join(texts) == answer.body["choices"][0]["text"]
    assert client.ask("/v1/nothing").status == 404


def test_a_stream_that_is_left_is_aborted_and_the_next_request_served(server: Server) -> None:
    client = Client(server.url, "open")
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
    chunks = client.stream("/v1/completions", body)
    next(chunks)
    chunks.close()
    assert client.model() == "penstock-demo"


def test_refusals_are_the_servers_own_words(server: Server) -> None:
    client = Client(server.url, "open")
    with pytest.raises(InvalidRequest, match="temperature") as raised:
        list(client.stream("/v1/completions", {"prompt": "x", "temperature": 9}))
    assert raised.value.param == "temperature"
    with pytest.raises(RequestError, match="nothing at"):
        client.get("/nowhere")
    with pytest.raises(Unauthorized):
        Client(server.url).model()


def test_an_error_in_a_stream() -> None:
    events = ('{"choices": []}', '{"error": {"message": "it failed", "code": "c"}}')
    with replying(stream(*events)) as url, pytest.raises(EngineFailure, match="it failed"):
        list(Client(url).stream("/v1/completions", {}))


def test_a_stream_without_its_end() -> None:
    cut = stream('{"choices": []}')
    with replying(cut) as url, pytest.raises(LinkError, match="before its end"):
        list(Client(url).stream("/v1/completions", {}))


def test_what_is_no_json_is_shown() -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    with replying(page) as url, pytest.raises(EngineFailure, match="<html>"):
        Client(url).get("/v1/models")


def test_each_request_has_a_connection_of_its_own() -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with replying(good, good) as url:
        client = Client(url)
        assert client.ask("/a").status == 200
        assert client.ask("/b").status == 200


def test_nobody_is_there() -> None:
    with pytest.raises(LinkError, match="cannot be reached"):
        Client("127.0.0.1:1").get("/v1/models")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url)


def test_a_busy_server_says_when_to_come_back() -> None:
    error = refusal(Response(429, {"error": {"message": "full"}}, "", 7.0))
    assert isinstance(error, Overloaded)
    assert error.retry_after == 7.0
    assert decoded(b"[1]") == {"message": "[1]"}
