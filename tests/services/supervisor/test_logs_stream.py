"""Streams whose writes never block: order, bounds, what is said of dropped text, descriptors that fail."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.services.supervisor.logs import NonBlockingStream, nonblocking_output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0):
        with open(reader, "rb", buffering=0):
            yield reader, writer
        for thread in threading.enumerate():  # one that is in a write goes on, whoever has the descriptor's number then
            if thread.name == "output":
                thread.join(60)


def read_until(reader: int, last: bytes) -> bytes:
    data = b""
    while last not in data:
        data += os.read(reader, 1 << 20)
    return data


def test_text_comes_out_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = NonBlockingStream(writer)
    for number in range(1000):
        print(number, file=stream)
    assert read_until(reader, b"\n999\n").split() == [str(number).encode() for number in range(1000)]
    assert stream.settle(30)
    assert stream.dropped == stream.waiting_bytes == 0
    stream.finish()


def test_a_reader_that_takes_nothing_costs_text_beyond_the_limit_and_is_told(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = NonBlockingStream(writer, limit=1 << 20)
    line = "x" * 1023 + "\n"
    for _ in range(3000):
        stream.write(line)
    assert stream.waiting_bytes <= 1 << 20
    assert stream.dropped >= 3000 - 1024 - 64
    data = read_until(reader, b"nobody took them\n")
    assert b" lines of output were dropped" in data
    while stream.waiting_bytes > 1 << 19:  # a notice may come while there is no room for a line yet
        os.read(reader, 1 << 20)
    stream.write("later\n")
    assert b"later\n" in read_until(reader, b"later\n")
    stream.finish()


def test_the_end_waits_no_longer_than_it_may(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    stream = NonBlockingStream(writer)
    stream.write("x" * (1 << 20))
    assert not stream.settle(0.01)
    stream.finish(0.01)
    before = stream.dropped
    stream.write("after the end")
    assert stream.dropped == before + 1


def test_a_descriptor_that_fails_costs_text_alone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = NonBlockingStream(writer)
    stream.write("nobody reads this\n")
    assert stream.settle(30)
    assert stream.dropped == 1
    stream.finish()
    os.close(writer)


def test_a_full_disk_costs_text_alone() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        stream = NonBlockingStream(file.fileno())
        stream.write("no room\n")
        assert stream.settle(30)
        assert stream.dropped == 1
        stream.finish()


def test_prints_and_logs_pass_through(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with nonblocking_output():
        print("to stdout")
        print("to stderr: \udcff", file=sys.stderr)
        assert not sys.stderr.isatty()
        assert sys.stderr.fileno() == 2
    assert (sys.stdout, sys.stderr) == before
    out, err = capfd.readouterr()
    assert out == "to stdout\n"
    assert err == "to stderr: \\udcff\n"
