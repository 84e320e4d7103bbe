"""What is known of one replica, between its reports and without them."""

from __future__ import annotations

import msgspec
import pytest

from penstock.engine_core.placement.placement import Replica
from tests.engine_core.placement.reports import report


def test_an_unknown_replica_takes_nothing() -> None:
    replica = Replica()
    assert (replica.taking, replica.ready, replica.stalled, replica.load) == (False, False, False, 0)


def test_readiness() -> None:
    replica = Replica()
    replica.report(report(ready=False))
    assert (replica.taking, replica.ready, replica.stalled) == (False, False, True)
    replica.report(report())
    assert (replica.taking, replica.ready, replica.stalled) == (True, True, False)
    replica.report(report(ready=False))
    assert (replica.taking, replica.ready, replica.stalled) == (True, False, True), "it waits for its executors"
    replica.report(report(ready=False, draining=True))
    assert (replica.taking, replica.ready, replica.stalled) == (False, False, False)


def test_load_is_what_it_said_and_what_we_did_since() -> None:
    replica = Replica()
    replica.report(report(running=3, waiting=2))
    assert replica.load == 5
    replica.take(4)
    assert replica.load == 9
    replica.report(report(running=9))
    assert replica.load == 9
    replica.give(1)
    assert replica.load == 8
    replica.report(report())
    assert replica.load == 3, "ours are there, whatever it says: they are on their way"
    replica.give(3)
    assert replica.load == 0
    with pytest.raises(AssertionError):
        replica.give(1)


def test_executors_that_begin_anew_have_nothing_cached() -> None:
    replica = Replica()
    replica.report(report())
    replica.shadow.use([b"a"])
    replica.report(report(ready=False))
    assert replica.shadow.hits([b"a"]) == 1
    replica.report(msgspec.structs.replace(report(), epoch=2))
    assert replica.shadow.hits([b"a"]) == 0


def test_who_left_has_nothing() -> None:
    replica = Replica()
    replica.report(report(running=3))
    replica.take(1)
    replica.shadow.use([b"a"])
    replica.leave()
    assert (replica.taking, replica.ready, replica.stalled, replica.load, len(replica.shadow)) == (
        False, False, False, 0, 0,
    )  # fmt: skip
    assert replica.placed == 1
