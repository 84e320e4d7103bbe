"""The stages of a start, with their times."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.services.supervisor.process import IMPORTS, StartupPhase, StartupPhases
from penstock.services.supervisor.sd_notify import NOTIFY_SOCKET, NoticeSocket


def test_the_first_stage_began_with_the_process() -> None:
    stages = StartupPhases()
    assert [stage.name for stage in stages.all] == [IMPORTS]
    assert 0.0 < time.monotonic() - stages.all[0].began < 86400.0


def test_a_stage_ends_where_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = NoticeSocket(tmp_path / "notify.sock")
    monkeypatch.setenv(NOTIFY_SOCKET, str(notices.path))
    stages = StartupPhases()
    stages.begin("loading weights")
    stages.note("waiting")
    assert [stage.name for stage in stages.all] == [IMPORTS, "loading weights", "waiting"]
    times = [stage.began for stage in stages.all]
    assert times == sorted(times)
    assert [notice.fields["STATUS"] for notice in notices.receive()] == ["loading weights"]
    notices.close()


def test_what_they_took_is_told_in_order() -> None:
    stages = StartupPhases()
    stages.all[:] = [StartupPhase(IMPORTS, 10.0), StartupPhase("loading weights", 11.5)]
    assert stages.durations(14.0) == "importing 1.50 s, loading weights 2.50 s"
