import multiprocessing
import os
import socket
import uuid
from pathlib import Path

import pytest

from penstock.services.supervisor.sd_notify import NoticeSocket, notify, parse, progress


@pytest.fixture
def listener(tmp_path):
    opened = NoticeSocket(tmp_path / "notify.sock")
    yield opened
    opened.close()


def speak(path: str) -> None:
    notify("READY=1", environ={"NOTIFY_SOCKET": path})


def test_a_notice_arrives_with_its_fields_and_its_sender(listener):
    assert notify("READY=1", "STATUS=serving on port 8000", environ={"NOTIFY_SOCKET": str(listener.path)})
    (notice,) = listener.receive()
    assert notice.ready
    assert notice.fields["STATUS"] == "serving on port 8000"
    assert notice.pid == os.getpid()
    assert listener.receive() == []


def test_the_sender_is_the_process_that_sent(listener):
    child = multiprocessing.get_context("spawn").Process(target=speak, args=(str(listener.path),))
    child.start()
    child.join(120)
    (notice,) = listener.receive()
    assert notice.pid == child.pid != os.getpid()


def test_without_a_socket_nothing_is_said():
    assert not notify("READY=1", environ={})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": "/nowhere/notify.sock"})


def test_a_value_keeps_its_line(listener):
    notify("STATUS=two\nREADY=1", environ={"NOTIFY_SOCKET": str(listener.path)})
    (notice,) = listener.receive()
    assert notice.fields == {"STATUS": "two READY=1"}
    assert not notice.ready


def test_abstract_names_work():
    name = f"penstock-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name)
        supervisor.settimeout(60)
        assert notify("READY=1", environ={"NOTIFY_SOCKET": "@" + name})
        assert supervisor.recv(64) == b"READY=1"


def test_a_full_queue_does_not_block(listener):
    sent = [notify("STATUS=" + "x" * 1000, environ={"NOTIFY_SOCKET": str(listener.path)}) for _ in range(5000)]
    assert not sent[-1]
    assert len(listener.receive()) == sum(sent)


def test_descriptors_sent_along_are_closed(listener):
    before = set(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, open(os.devnull, "rb") as file:
        sender.connect(str(listener.path))
        socket.send_fds(sender, [b"READY=1"], [file.fileno()])
    (notice,) = listener.receive()
    assert notice.ready
    assert set(os.listdir("/proc/self/fd")) <= before


def test_parse_takes_any_bytes():
    assert parse(b"") == {}
    assert parse(b"READY\n=1\nA=b=c\nA=d\n\xff=\xfe") == {"A": "d", "\ufffd": "\ufffd"}


def test_closing_removes_the_file(tmp_path):
    opened = NoticeSocket(tmp_path / "n.sock")
    opened.close()
    assert not Path(opened.path).exists()


def test_the_file_of_one_that_was_killed_is_replaced(tmp_path, monkeypatch):
    killed = NoticeSocket(tmp_path / "n.sock")
    following = NoticeSocket(killed.path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(killed.path))
    assert notify("READY=1")
    assert [notice.ready for notice in following.receive()] == [True]
    assert killed.receive() == []
    following.close()
    killed.close()


def test_progress_holds_off_the_limit_of_a_start(tmp_path, monkeypatch):
    listener = NoticeSocket(tmp_path / "notify.sock")
    monkeypatch.setenv("NOTIFY_SOCKET", str(listener.path))
    progress("loading weights")
    assert [notice.fields for notice in listener.receive()] == [
        {"STATUS": "loading weights", "EXTEND_TIMEOUT_USEC": "1800000000"}
    ]
    listener.close()
