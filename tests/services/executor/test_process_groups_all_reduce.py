"""Whether a group gets an exchange, and what its log says. What that does: tests/engine_core/execution."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from penstock.engine_core.distributed.group import ALONE, Group
from penstock.engine_core.execution.all_reduce_tuning import Trial
from penstock.services.executor import process_groups as subject
from penstock.services.executor.process_groups import DISABLED, device_memory, figures, with_exchange

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
RANKS = SimpleNamespace()  # stands for a process group
TWO = Group(rank=1, size=2, ranks=RANKS)  # type: ignore[arg-type]
TRIALS = [Trial(1, 3.14, 9.0), Trial(8, 4.0, 8.27)]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, subject.log.name)
    return caplog


@pytest.mark.parametrize(("group", "device"), [(ALONE, GPU), (Group(stage=1, stages=2), GPU), (TWO, CPU)])
def test_who_has_nobody_to_exchange_with(group: Group, device: torch.device, told: pytest.LogCaptureFixture) -> None:
    assert with_exchange(group, 8, torch.float32, device) is group
    assert not told.records


@pytest.mark.parametrize(("stages", "value", "reason"), [
    (1, None, ""), (1, "0", ""), (1, "1", DISABLED), (2, None, "stages"),
])  # fmt: skip
def test_whose_memory_is_not_shared(
    stages: int, value: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(subject, "CudaMemory", lambda: "memory")
    environment = {} if value is None else {DISABLED: value}
    group = replace(TWO, stages=stages)
    if not reason:
        assert device_memory(group, GPU, environment) == "memory"
        return
    with pytest.raises(OSError, match=reason):
        device_memory(group, GPU, environment)


def test_what_fails_on_one_rank_is_told_and_done_without(
    told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(ranks: object, step: object) -> None:
        assert ranks is RANKS
        raise OSError("rank 0: no driver")

    monkeypatch.setattr(subject, "together", together)
    assert with_exchange(TWO, 8, torch.float32, GPU) is TWO
    (record,) = told.records
    assert record.fields == {"rows": 0, "reason": "rank 0: no driver"}


@pytest.mark.parametrize("rows", [0, 8])
def test_the_log_says_what_was_chosen(
    rows: int, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SimpleNamespace(inboxes=SimpleNamespace(size=1 << 20), rows=rows)
    found = replace(TWO, exchange=opened if rows else None)  # type: ignore[arg-type]
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(subject, "together", lambda ranks, step: "memory")
    monkeypatch.setattr(subject, "open_exchange", lambda *arguments: asked.append(arguments) or opened)
    monkeypatch.setattr(subject, "quickest", lambda group, exchange, device: (found, TRIALS))
    assert with_exchange(TWO, 4096, torch.bfloat16, GPU) is found
    assert asked == [(RANKS, 4096, torch.bfloat16, GPU, "memory")]
    (record,) = told.records
    assert record.getMessage() == "all_reduce"
    assert record.fields == {"rows": rows, "size": (1 << 20) * (rows > 0), **figures(TRIALS)}


def test_figures_by_rows() -> None:
    assert figures(TRIALS) == {"exchange_us": "1:3.1 8:4.0", "collective_us": "1:9.0 8:8.3"}
    assert figures([]) == {"exchange_us": "", "collective_us": ""}
