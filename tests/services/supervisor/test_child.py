from __future__ import annotations

import errno
import os
import select
import signal
import sys
from contextlib import contextmanager

import pytest

from penstock.protocol.links import Role
from penstock.services.supervisor.child import MAX_LINE, TAIL_LINES, Child

LIMIT = 60.0


@contextmanager
def child(code: str):
    started = Child(Role.EXECUTOR, 2, [sys.executable, "-c", code], dict(os.environ))
    try:
        yield started
    finally:
        started.signal(signal.SIGKILL)
        started.wait()
        started.close()


def ended(child: Child) -> bool:
    return bool(select.select([child.pidfd], [], [], LIMIT)[0]) and child.reap()


def lines_of(child: Child) -> list[str]:
    lines = []
    while child.speaking:
        assert select.select([child.output], [], [], LIMIT)[0]
        lines += child.read()
    return lines


def test_its_output_comes_in_lines():
    code = "import sys; print('one'); sys.stdout.flush(); print('two', file=sys.stderr); print('end', end='')"
    with child(code) as one:
        assert one.name == "executor-2"
        assert lines_of(one) == ["one", "two", "end"]
        assert list(one.tail) == ["one", "two", "end"]
        assert ended(one)
        assert one.ending() == {"exit_code": 0}


def test_reading_never_blocks():
    with child("import sys; print('x', end='', flush=True); sys.stdin.read(); import signal; signal.pause()") as one:
        assert select.select([one.output], [], [], LIMIT)[0]
        assert one.read() == []
        assert one.read() == []
        assert one.speaking
        assert not one.reap()


def test_the_tail_is_bounded():
    with child("for number in range(1000): print(number)") as one:
        assert lines_of(one) == [str(number) for number in range(1000)]
        assert list(one.tail) == [str(number) for number in range(1000 - TAIL_LINES, 1000)]


def test_a_line_without_end_is_passed_on_in_pieces():
    with child(f"print('x' * {3 * MAX_LINE})") as one:
        lines = lines_of(one)
        assert len(lines) > 1
        assert "".join(lines) == "x" * 3 * MAX_LINE


def test_bytes_that_are_no_text_do_no_harm():
    with child(r"import os; os.write(1, b'a\xff\n')") as one:
        assert lines_of(one) == ["a\ufffd"]


def test_the_rest_is_read_even_while_a_grandchild_holds_the_pipe():
    code = "import os, signal\nprint('last words', flush=True)\npid = os.fork()\n"
    code += "print(pid, flush=True) if pid else signal.pause()"
    with child(code) as one:
        assert ended(one)
        last, grandchild = one.rest()
        assert last == "last words"
        assert one.speaking
        os.kill(int(grandchild), signal.SIGKILL)


def test_a_signal_that_ended_it_is_named():
    with child("import signal; signal.pause()") as one:
        one.signal(signal.SIGKILL)
        assert ended(one)
        assert one.code == -9
        assert one.ending() == {"signal": "SIGKILL"}
        one.signal(signal.SIGTERM)


def test_what_it_says_of_itself_is_kept():
    with child("") as one:
        assert (one.ready, one.status) == (False, "starting")
        one.notice({"STATUS": "loading", "X_PENSTOCK_URL": "u"}, 1.0)
        assert (one.ready, one.status) == (False, "loading")
        one.notice({"READY": "1"}, 2.0)
        one.notice({"X_PENSTOCK_BLOCKS": "3"}, 3.0)
        assert one.beat == float("inf")
        one.notice({"WATCHDOG": "1"}, 4.0)
        assert one.beat == 4.0
        assert one.ready
        assert one.status == "loading"
        assert one.fields["X_PENSTOCK_URL"] == "u"
        assert one.fields["X_PENSTOCK_BLOCKS"] == "3"


def test_one_that_computes_is_told_from_one_that_waits_or_is_stopped():
    with child("print('up', flush=True)\nwhile True: pass") as one:
        assert select.select([one.output], [], [], LIMIT)[0]
        one.runs()
        until(one.runs)
        one.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
        one.runs()
        assert not one.runs()
    with child("print('up', flush=True); import signal; signal.pause()") as one:
        assert select.select([one.output], [], [], LIMIT)[0]
        until(lambda: not one.runs())
    assert not one.runs()  # it is gone


def until(done) -> None:
    for _ in range(3000):
        if done():
            return
        select.select([], [], [], 0.02)
    raise AssertionError("it did not come to be")


def test_one_that_cannot_be_watched_is_not_left_behind(monkeypatch):
    """Popen has taken the last descriptors."""
    started = []

    def exhausted(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", exhausted)
    with pytest.raises(OSError, match="Too many open files"), child("import time; time.sleep(1000)"):
        pass
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
